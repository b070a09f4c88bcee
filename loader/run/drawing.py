"""How a step draws a token for each row of its logits, of which a rank of several has a part of the columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from precast.ir.graph.schema import Dtype
from precast.kernels import cuda_source, registry
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.sampling.parts import VocabularyPart, sample_parts, whole
from precast.kernels.sampling.sample import Parameters, greedy
from precast.loader.program.instructions import HostCall

if TYPE_CHECKING:
    from precast.kernels.sampling.on_ranks import PartSampler


class Drawing:
    """What draws on one device. `part`: the logits are those of a rank's part of the vocabulary.

    `sampler`: what draws from parts on a GPU.
    """

    def __init__(
        self, dtype: Dtype, on: torch.device, part: VocabularyPart | None = None, sampler: PartSampler | None = None
    ) -> None:
        assert part is None or sampler is not None or on.type == "cpu", "GPUs have a sampler for parts"
        drawing = partial(registry.resolve_into, "precast.sample", SAMPLE_VERSION, on, dtypes={"logits": dtype})
        self._sample, self._sample_captured = drawing(), drawing(control="static")
        self._part, self._sampler = part, sampler
        self._meets_on_host = part is not None and on.type == "cpu"

    def draw(self, logits: torch.Tensor, asked: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """A token for each row of `logits` into `out` [R], op by op; with nothing `asked` the likeliest."""
        if self._part is not None and (self._meets_on_host or not asked):
            out.copy_(sample_parts(logits, Parameters(**asked) if asked else None, self._part))
        elif not asked:
            out.copy_(greedy(logits))
        else:
            (self._sampler or self._sample)(logits=logits, **asked, out=out)

    def captured(
        self, logits: torch.Tensor, asked: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> Iterator[HostCall]:
        """The same in a step that is captured, cut in front of what meets other ranks on the host."""
        if self._meets_on_host:
            given = {"logits": logits, "parameters": Parameters(**asked), "part": self._part}
            yield HostCall(sample_parts, given, (out,), allocates=True)
        else:
            (self._sampler or self._sample_captured)(logits=logits, **asked, out=out)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks, [R, V]."""
        return logits if self._part is None else whole(logits, self._part)


def sampler_on(part: VocabularyPart, dtype: torch.dtype, most_rows: int) -> PartSampler | None:
    """What draws on GPUs from up to so many rows at a time; None: these GPUs don't write each other's memory.

    All ranks call it.
    """
    if not cuda_source.is_installed() or find_spec("triton") is None:
        return None
    from precast.kernels.collectives.peers import Peers
    from precast.kernels.sampling.on_ranks import PartSampler

    if not isinstance(part.group, Peers) or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    return PartSampler(part.group, part, dtype, most_rows)
