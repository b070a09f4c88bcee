"""How a step draws a token for each row of its logits, which may be shared by several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from precast.ir.graph.schema import Dtype, Graph
from precast.kernels import cuda_source, registry
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.sampling.parts import VocabularyPart, sample_parts, whole
from precast.kernels.sampling.sample import Parameters, greedy
from precast.kernels.use import Target, types_in
from precast.loader.program.instructions import HostCall
from precast.loader.run.stages import Stages

if TYPE_CHECKING:
    from precast.kernels.sampling.on_ranks import PartSampler


class Drawing:
    """What draws on one device. `part`: the graph's logits are those of a rank's part of the vocabulary, from which
    `sampler` draws on a GPU. `stages`: the graph is that of one stage of several; the last one has logits, and all
    others are given what it drew."""

    def __init__(
        self, graph: Graph, on: torch.device, target: Target, part: VocabularyPart | None = None,
        sampler: PartSampler | None = None, stages: Stages | None = None,
    ) -> None:  # fmt: skip
        assert part is None or sampler is not None or on.type == "cpu", "GPUs have a sampler for parts"
        self._part, self._sampler, self._stages, self._on = part, sampler, stages, on
        if stages is None or stages.is_last:
            dtypes: dict[str, Dtype] = {"logits": types_in(graph)[graph.outputs["logits"]].dtype}
            name, version = "precast.sample", SAMPLE_VERSION
            drawing = partial(registry.resolve_into, name, version, on, dtypes=dtypes, target=target)
            self._sample, self._sample_captured = drawing(), drawing(control="static")

    def draw(self, logits: torch.Tensor | None, asked: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """A token for each row of `logits` into `out` [R], op by op; with nothing `asked` the likeliest."""
        if logits is not None:
            self._draw(logits, asked, out)
        if self._stages is not None:
            self._stages.share(out)

    def _draw(self, logits: torch.Tensor, asked: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        if self._part is not None and (self._meets_on_host or not asked):
            out.copy_(sample_parts(logits, Parameters(**asked) if asked else None, self._part))
        elif not asked:
            out.copy_(greedy(logits))
        else:
            (self._sampler or self._sample)(logits=logits, **asked, out=out)

    def captured(
        self, logits: torch.Tensor | None, asked: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> Iterator[HostCall]:
        """The same in a step that is captured, cut in front of what meets other ranks on the host."""
        if logits is not None and self._part is not None and self._meets_on_host:
            given = {"logits": logits, "parameters": Parameters(**asked), "part": self._part}
            yield HostCall(sample_parts, given, (out,), allocates=True)
        elif logits is not None:
            (self._sampler or self._sample_captured)(logits=logits, **asked, out=out)
        if self._stages is not None and self._meets_on_host:
            yield HostCall(self._stages.share, {"tensor": out}, (), allocates=False)
        elif self._stages is not None:
            self._stages.share(out)

    def whole(self, logits: torch.Tensor | None, num_rows: int) -> torch.Tensor:
        """The logits of all ranks, [R, V], on each of them; `num_rows` are wanted of the last stage."""
        found = None if logits is None else self._joined(logits)
        if self._stages is None:
            assert found is not None, "only a stage has none"
            return found
        if found is None:
            found = self._stages.new_logits(num_rows)
        if num_rows:
            self._stages.share(found)
        return found

    @property
    def _meets_on_host(self) -> bool:
        """Whether the host waits for other ranks."""
        return self._on.type == "cpu"

    def _joined(self, logits: torch.Tensor) -> torch.Tensor:
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
