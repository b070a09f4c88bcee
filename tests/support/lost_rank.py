"""A world that loses a rank while it generates: what it says, and that its processes end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from precast.ir.errors import TargetError
from precast.loader.engine.params import SamplingParams
from precast.loader.load import load


def lose_a_rank(folder: Path, axis: str, how: signal.Signals, device: str) -> None:
    """Rank 1 of two along `axis` is given the signal; the bundle and the weights are those of `tiny_world.py`.

    A process with a GPU loads again, and computes what it did.
    """
    options = {"device": device, "max_num_tokens": 7, axis: 2}
    if device == "cuda":
        options["capture"] = "before"  # what is lost is then lost in a step, which has a limit of its own
    with load(folder / "split.bundle", weights=folder / "ckpt", **options) as engine:
        lead = engine._runner._lead
        assert lead is not None
        assert lead._processes is not None
        pid = lead._processes[1]
        found = {signal.SIGKILL: ("rank-lost", rf"rank 1 \(process {pid}\) was ended by SIGKILL"),
                 signal.SIGSTOP: ("rank-late", "rank 0 waited 1 s for rank 1")}  # fmt: skip
        code, message = found[how]
        stream = engine.stream([5], SamplingParams(max_tokens=60, ignore_eos=True))
        first = next(stream)
        if how == signal.SIGSTOP:  # nothing but the time tells that it is lost
            lead.timeouts = lead.timeouts._replace(step=1, end=1)
        os.kill(pid, how)

        with pytest.raises(TargetError, match=message) as error:
            for _ in stream:
                pass

        assert error.value.code == code
        with pytest.raises(TargetError, match=message):
            engine.generate([[5]])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    if device == "cuda":
        with load(folder / "split.bundle", weights=folder / "ckpt", **options) as engine:
            again = next(engine.stream([5], SamplingParams(max_tokens=60, ignore_eos=True)))
        assert again.token_ids == first.token_ids


def lose_ranks_one_after_another(folder: Path) -> None:
    """What the device of rank 0 has free after the second loss is what it had after the first, but for a little."""
    free = []
    for _ in range(3):
        lose_a_rank(folder, "tp", signal.SIGKILL, "cuda")
        free.append(torch.cuda.mem_get_info(0)[0])
    assert min(free[1:]) > free[0] - (32 << 20), f"free {free}"


def lose_a_rank_whose_logits_are_wanted(folder: Path, device: str) -> None:
    """A rank that doesn't go on: logits that all would have to add up are not given."""
    options = {"device": device, "max_num_tokens": 7, "tp": 2}
    with load(folder / "split.bundle", weights=folder / "ckpt", **options) as engine:
        lead = engine._runner._lead
        assert lead is not None
        assert lead._processes is not None
        engine.logits([5, 9])
        lead.timeouts = lead.timeouts._replace(step=1, end=1)
        os.kill(lead._processes[1], signal.SIGSTOP)
        with pytest.raises(TargetError, match="rank 0 waited 1 s for rank 1"):
            engine.logits([5, 9])
