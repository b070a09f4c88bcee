"""What `precast.load` is asked for, checked. No torch, and little else: a start waits for nothing else first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from precast.ir.artifact import Bundle
    from precast.ir.bundle.trust import Trust
    from precast.ir.weights.sources import Folder
    from precast.kernels.measured import Table
    from precast.loader.sizing import EngineLimits

Capture = Literal["background", "before", "off"]
"""When steps are captured as CUDA graphs."""
Backend = Literal["driver", "torch"]
"""What runs a model: the CUDA driver alone, or torch."""


class LoadOptions(NamedTuple):
    """The arguments of `precast.load`; `table` has the choices of `choices`, if any are given, `native` is a list, and
    `repository` is the one that the bundle's address names."""

    bundle: str | Path | Bundle
    weights: str | Path
    device: str | torch.device | None
    max_num_seqs: int
    max_num_tokens: int
    max_prefill_tokens: int | None
    cache_bytes: int | None
    reuse_prefixes: bool
    allow_config_mismatch: bool
    table: Table | None
    capture: Capture | None
    native: Sequence[str] = ()
    trust: Trust | str | os.PathLike[str] | None = None
    repository: str | None = None
    weights_timeout: float = 30.0

    def folder(self) -> Folder:
        """Where the weights are; no server is asked yet. Raises what `precast.loader.sources.open.folder_of` raises."""
        from precast.loader.sources.open import folder_of
        from precast.loader.sources.remote import Waits

        return folder_of(self.weights, Waits(self.weights_timeout))

    def limits(self, max_seq_len: int) -> EngineLimits:
        """The engine's limits, for a model of so many tokens a sequence."""
        from precast.loader.sizing import EngineLimits

        return EngineLimits(self.max_num_seqs, self.max_num_tokens, max_seq_len, self.cache_bytes)

    def rules_text(self) -> str:
        """What decides on native layers, in words that are equal for equal rules."""
        from precast.ir.trust.loading import rules_text

        return rules_text(self.trust, self.native)

    def rules(self, bundle: Bundle) -> Trust:
        """What lets the opened bundle's native layers in. Raises what `precast.ir.trust.loading.rules_of` raises."""
        from precast.ir.trust.loading import rules_of

        return rules_of(bundle, self.trust, self.repository)
