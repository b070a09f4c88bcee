"""What ranks compare: equal worlds go on, and a difference is told with every rank's value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from precast.ir.errors import RequestError, TargetError
from precast.loader.world.agree import OWN, Facts, Sized, check_facts, slabs_of_all
from precast.loader.world.messages import Failed
from precast.loader.world.start import Launched, launched
from precast.loader.world.timeouts import Timeouts, timeouts_of

FACTS = Facts(
    bundle="sha256:aa", precast="1", torch="2", device="cuda", gpu="H200", capability="sm_90", choices="c", options="o",
    machine="m", host="one", gpu_id="GPU-0", weights_bytes=100, free_bytes=200,
)  # fmt: skip


def facts(**changes: Any) -> Facts:
    return msgspec.structs.replace(FACTS, **{"gpu_id": "GPU-1", **changes})


def test_ranks_may_differ_in_what_is_their_own() -> None:
    check_facts([FACTS, facts(host="two", weights_bytes=90, free_bytes=150)])


@pytest.mark.parametrize("name", [name for name in Facts.__struct_fields__ if name not in OWN])
def test_a_difference_is_told_with_every_rank_s_value(name: str) -> None:
    ranks = [FACTS, facts(**{name: "other"}), facts(gpu_id="GPU-2")]
    message = rf"differ in {name}: rank 0\+2 {getattr(FACTS, name)}, rank 1 other\n"
    with pytest.raises(TargetError, match=message) as error:
        check_facts(ranks)
    assert error.value.code == "ranks-differ"


def test_two_ranks_on_one_gpu_are_refused() -> None:
    with pytest.raises(TargetError, match=r"two ranks have the same GPU: rank 0\+1 GPU-0 of one"):
        check_facts([FACTS, FACTS])


def test_weights_without_room_are_told_with_every_rank_s_numbers() -> None:
    message = r"rank 0 100 bytes of weights, 200 free on one, rank 1 100 bytes of weights, 99 free on two"
    with pytest.raises(TargetError, match=message) as error:
        check_facts([FACTS, facts(host="two", free_bytes=99)])
    assert error.value.code == "device-memory"


def test_the_smallest_cache_is_that_of_all() -> None:
    assert slabs_of_all([Sized(9, {}), Sized(7, {}), Sized(8, {})]) == 7


def test_a_rank_without_room_is_told_with_every_rank_s_arithmetic() -> None:
    failure = Failed.of(RequestError("cache-too-small", "0 slabs", fix="free memory"), 1)
    sizes = [Sized(9, {"bytes_free": 500, "slabs": 9}), Sized(0, {}, failure)]
    with pytest.raises(RequestError, match=r"rank 1: 0 slabs; rank 0 bytes_free 500, slabs 9, rank 1 0 slabs") as error:
        slabs_of_all(sizes)
    assert (error.value.code, error.value.fix) == ("cache-too-small", "free memory")


def test_timeouts_have_names_and_seconds() -> None:
    assert timeouts_of(None) == Timeouts()
    assert timeouts_of({"join": 3}) == Timeouts()._replace(join=3)
    for wrong in (
        {"jon": 3},
        {"join": 0},
        {"join": "3"},
        {"join": 1e300},
        {"join": float("inf")},
        {"join": float("nan")},
        {"end": True},
    ):
        with pytest.raises(RequestError) as error:
            timeouts_of(wrong)  # type: ignore[arg-type]
        assert error.value.code == "engine-option-invalid"


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def test_what_a_launcher_says() -> None:
    assert launched({}) is None
    assert launched({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert launched(TORCHRUN) == Launched(1, 4, 0, 1)
    assert launched({"RANK": "1", "WORLD_SIZE": "2"}) == Launched(1, 2, 1, 2)
    for wrong in ({"RANK": "-1"}, {"RANK": "4"}, {"WORLD_SIZE": "x"}, {"LOCAL_RANK": ""}):
        with pytest.raises(RequestError):
            launched({**TORCHRUN, **wrong})
