"""rotary_write_kv: by hand, and against the ops that it puts together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_samples.attention import rotary_write_kv as samples
from op_samples.draw import Draw, Sample

from precast.kernels.attention.write_kv import write_kv
from precast.kernels.rms_norm.rms_norm import rms_norm
from precast.kernels.rotary.rotary import rotary
from precast.kernels.rotary_write_kv.rotary_write_kv import rotary_write_kv

CPU = torch.device("cpu")


def quarter_turn(**more: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two tokens by a quarter, the second padding: the result, and caches of zeros afterwards."""
    q = torch.tensor([[3.0, 4.0, 5.0], [6.0, 8.0, 1.0]]).view(1, 2, 1, 3)
    k_cache, v_cache = torch.zeros(1, 4, 1, 3), torch.zeros(1, 4, 1, 2)
    zero, one = torch.zeros(1, 2, 1), torch.ones(1, 2, 1)
    given = {"q_weight": None, "k_weight": None, "interleaved": False, **more}
    slots, v = torch.tensor([2, -1]), torch.tensor([[7.0, 8.0], [9.0, 9.0]]).view(1, 2, 1, 2)
    y = rotary_write_kv(
        q=q, k=2 * q, v=v, cos=zero, sin=one, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, **given
    )
    return y, k_cache, v_cache


def test_a_quarter_turn_without_a_norm() -> None:
    y, k_cache, v_cache = quarter_turn()

    assert y.flatten().tolist() == [-4.0, 3.0, 5.0, -8.0, 6.0, 1.0]
    assert k_cache.flatten().tolist() == [0.0] * 6 + [-8.0, 6.0, 10.0] + [0.0] * 3
    assert v_cache.flatten().tolist() == [0.0] * 4 + [7.0, 8.0] + [0.0] * 2


def test_the_norm_is_first_and_each_weight_its_own() -> None:
    q_weight, k_weight = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 1.0])
    y, k_cache, _ = quarter_turn(eps=0.0, q_weight=q_weight, k_weight=k_weight)
    root = (50 / 3) ** 0.5

    torch.testing.assert_close(y[0, 0, 0], torch.tensor([-8.0, 3.0, 15.0]) / root)
    torch.testing.assert_close(k_cache[0, 2, 0], torch.tensor([0.0, 0.0, 5.0]) / root)


def test_a_norm_without_weights() -> None:
    y, k_cache, _ = quarter_turn(eps=0.0)

    torch.testing.assert_close(y[0, 0, 0], torch.tensor([-4.0, 3.0, 5.0]) / (50 / 3) ** 0.5)
    torch.testing.assert_close(k_cache[0, 2, 0], y[0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_the_ops_one_after_the_other(dtype: torch.dtype, copied: Callable[[Sample], Sample]) -> None:
    for sample in samples(Draw(dtype, CPU)):
        apart, turned = copied(sample), {}
        for name in "qk":
            turned[name] = apart[name]
            if apart.get("eps") is not None:
                rule = {name: apart[name] for name in ("offset", "cast_before_scale") if name in apart}
                rule = {"cast_before_scale": False, "eps": apart["eps"], **rule}
                turned[name] = rms_norm(apart[name], apart[f"{name}_weight"], **rule)
            turned[name] = rotary(turned[name], apart["cos"], apart["sin"], interleaved=apart["interleaved"])
        scales = {name: apart[name] for name in ("k_scale", "v_scale") if name in apart}
        write_kv(turned["k"], apart["v"], apart["k_cache"], apart["v_cache"], apart["slot_mapping"], **scales)
        found = rotary_write_kv(**sample)

        assert torch.equal(found, turned["q"])
        for name in ("k_cache", "v_cache"):
            assert torch.equal(sample[name].float(), apart[name].float())
