"""What the ranks of a test do on a GPU each; a module of its own, which their processes import."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from precast.kernels.collectives.all_reduce_norm import all_reduce_residual_rms_norm_into
from precast.kernels.collectives.group import Connected
from precast.kernels.collectives.processes import connect

CASES = [
    (shape, dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for shape in ((1, 8), (1, 1, 4096), (3, 40), (77, 4096), (2500, 4096))
] + [((3, 5), torch.bfloat16), ((4,), torch.float64)]
"""With some of no whole vectors of 16 bytes, or of another type: NCCL's."""
TURNS = 5
NORMS = [
    (shape, dtype, offset, cast)
    for dtype, offset, cast in ((torch.bfloat16, 0.0, True), (torch.float16, 1.0, False), (torch.float32, 0.0, True),
                                (torch.bfloat16, 1.0, True))
    for shape in ((1, 1, 4096), (1, 300, 4096), (1, 7, 72), (1, 9, 2048), (1, 2, 16384), (1, 2300, 4096))
] + [((1, 3, 33), torch.bfloat16, 0.0, True)]  # fmt: skip
"""With one whose rows are no whole vectors."""


def group_of(rank: int, size: int, folder: Path) -> Connected:
    """Whose ranks write each other's memory."""
    torch.cuda.set_device(rank)
    store = distributed.FileStore(str(folder / "store"), size)
    group = connect(store, rank, size, torch.device("cuda", rank), timedelta(minutes=2))
    assert group.text.startswith("memory of each other"), group.text
    return group


def given(rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank has in this turn, on the CPU."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(100 * turn + rank))
    return made.masked_fill(made.abs() < 0.1, -0.0).to(dtype)


def add_up(rank: int, size: int, folder: Path) -> None:
    """Eagerly and in replays of a graph of all cases, by turns; what came of it goes to a file."""
    group = group_of(rank, size, folder)
    on = torch.device("cuda", rank)
    xs = [given(rank, 0, *case).to(on) for case in CASES]
    outs = [torch.empty_like(x) for x in xs]

    def run() -> None:
        for x, out in zip(xs, outs, strict=True):
            group.all_reduce(out, x)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    found = []
    for turn in range(TURNS):
        for x, case in zip(xs, CASES, strict=True):
            x.copy_(given(rank, turn, *case))
        for out in outs:
            out.fill_(float("nan"))
        if turn % 2:
            run()
        else:
            graph.replay()
        found.append([out.cpu() for out in outs])
    torch.save(found, folder / f"{rank}.pt")
    group.all_reduce(outs[0], xs[0])  # nobody leaves before all have what they need
    torch.cuda.synchronize()


def weight_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A norm's, on the CPU."""
    return torch.linspace(-1.0, 2.0, shape[-1]).to(dtype)


def norm_sums(rank: int, size: int, folder: Path) -> None:
    """The norms of all cases, in replays of a graph and eagerly; what came of it goes to a file."""
    group = group_of(rank, size, folder)
    on = torch.device("cuda", rank)
    xs = [given(rank, 0, *case[:2]).to(on) for case in NORMS]
    streams = [given(77, 0, *case[:2]).to(on) for case in NORMS]
    weights = [weight_of(*case[:2]).to(on) for case in NORMS]
    outs = [(torch.empty_like(x), torch.empty_like(x)) for x in xs]

    def run() -> None:
        for i, (_, _, offset, cast) in enumerate(NORMS):
            all_reduce_residual_rms_norm_into(
                xs[i], streams[i], weights[i], eps=1e-5, offset=offset, cast_before_scale=cast, group=group, out=outs[i]
            )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    found = []
    for turn in range(TURNS):
        for x, case in zip(xs, NORMS, strict=True):
            x.copy_(given(rank, turn, *case[:2]))
        for out in outs:
            for each in out:
                each.fill_(float("nan"))
        if turn % 2:
            run()
        else:
            graph.replay()
        found.append([tuple(each.cpu() for each in out) for out in outs])
    torch.save(found, folder / f"{rank}.pt")
    group.all_reduce(outs[0][0], xs[0])  # nobody leaves before all have what they need
    torch.cuda.synchronize()


def wait_in_vain(rank: int, size: int, folder: Path) -> None:
    """The first rank adds up alone, until it is told to stop; then it says what its GPU computes."""
    group = group_of(rank, size, folder)
    end = distributed.FileStore(str(folder / "end"), size)
    if rank:
        end.wait(["said"], timedelta(minutes=2))
        return
    x = torch.ones(4096, device="cuda")
    x.sum().item()  # to load a kernel waits for those that run, and holds up whoever tells them to stop
    threading.Timer(1.0, group.abort).start()
    for _ in range(3):  # those behind it end too
        group.all_reduce(torch.empty_like(x), x)
    (folder / "said").write_text(str(x.sum().item()))
    end.set("said", "so")
