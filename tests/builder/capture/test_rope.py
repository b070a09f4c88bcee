"""Rotary embeddings whose frequencies depend on the length, and the constants that models make in code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import dynamic_rope_update

from precast.builder.capture.factory import make_module, materialise_buffers
from precast.builder.capture.rope import long_frequencies, route_dynamic_rope
from precast.builder.capture.routing import Trace, tracing
from precast.ir.errors import BuildError
from precast.kernels.registry import register
from precast.kernels.rotary.rope_frequencies import rope_frequencies


def on_the_cpu(variant: str) -> Any:
    return AutoModelForCausalLM.from_config(families.make_config(variant), attn_implementation="eager")


def test_long_frequencies_are_those_behind_the_original_limit() -> None:
    rotary = on_the_cpu("phi3-longrope").model.rotary_emb
    short = rotary.inv_freq.clone()

    found = long_frequencies(rotary)

    rotary(torch.zeros(1), torch.tensor([[16]]))  # one position behind the limit of 16: the module switches
    assert not torch.equal(rotary.inv_freq, short)
    torch.testing.assert_close(found, rotary.inv_freq, rtol=0, atol=0)


@pytest.mark.parametrize("variant", ["llama-rope-dynamic", "phi3-longrope", "phimoe-longrope"])
def test_length_dependent_modules_are_routed(variant: str) -> None:
    module = make_module(families.make_config(variant), "float32")

    assert "forward" in vars(module.model.rotary_emb)


@pytest.mark.parametrize("variant", ["llama", "llama-rope-yarn", "llama-rope-linear", "gemma3", "phimoe"])
def test_other_modules_stay_as_they_are(variant: str) -> None:
    module = make_module(families.make_config(variant), "float32")

    assert "forward" not in vars(module.model.rotary_emb)


class OldRotary(torch.nn.Module):
    """As transformers wrote it until 5.18: angles are the outer product of one set of frequencies and positions."""

    rope_type = "dynamic"
    config = SimpleNamespace(max_position_embeddings=8, rope_parameters={"rope_theta": 100.0, "factor": 2.0})

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = torch.nn.Buffer(torch.tensor([1.0, 0.5, 0.25]))

    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        column = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
        freqs = (column.float() @ position_ids[:, None, :].float()).transpose(1, 2)
        return freqs.cos()


def test_each_token_has_its_own_frequencies_in_an_outer_product_too() -> None:
    """Of two sequences of 3 and 9 tokens the second is longer than the original limit."""
    model: Any = torch.nn.ModuleDict({"rotary_emb": OldRotary()})
    lengths, positions = torch.tensor([[3] * 3 + [9] * 9]), torch.tensor([[*range(3), *range(9)]])
    inv_freq = model.rotary_emb.inv_freq
    own = rope_frequencies(lengths, inv_freq, None, kind="dynamic", original_length=8, factor=2.0, base=100.0)

    register()
    route_dynamic_rope(model)
    with tracing(Trace(torch.tensor([0, 3, 12], dtype=torch.int32), lengths, 16)):
        found = model.rotary_emb(torch.zeros(1), positions)

    assert not torch.equal(own[0, 3], inv_freq)
    torch.testing.assert_close(found, (positions[..., None] * own).cos(), rtol=0, atol=0)


def test_a_module_that_updates_its_frequencies_itself_is_refused() -> None:
    class Rotary(torch.nn.Module):
        rope_type = "dynamic"

        @torch.no_grad()
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return x

    model: Any = torch.nn.ModuleDict({"rotary_emb": Rotary()})

    with pytest.raises(BuildError, match="rotary_emb has length-dependent frequencies, but not by") as error:
        route_dynamic_rope(model)

    assert error.value.code == "feature-unsupported"


def test_length_dependent_rope_of_some_layers_is_refused() -> None:
    rotary = torch.nn.Module()
    rotary.rope_type = {"full_attention": "dynamic", "sliding_attention": "default"}  # type: ignore[assignment]
    model: Any = torch.nn.ModuleDict({"rotary_emb": rotary})

    with pytest.raises(BuildError, match="rotary_emb: length-dependent rope per layer type") as error:
        route_dynamic_rope(model)

    assert error.value.code == "feature-unsupported"


# --- constants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("llama-rope-llama3", "model.rotary_emb.inv_freq"),
        ("llama-rope-yarn", "model.rotary_emb.inv_freq"),
        ("phi3-partial-window", "model.rotary_emb.inv_freq"),
        ("gpt_neox", "gpt_neox.rotary_emb.inv_freq"),
        ("gemma", "model.embed_tokens.embed_scale"),
        ("gemma3", "model.rotary_emb.sliding_attention_inv_freq"),
    ],
)
def test_constants_have_the_values_that_transformers_gives_them(variant: str, name: str) -> None:
    meta = make_module(families.make_config(variant), "float32")
    assert meta.get_buffer(name).is_meta

    values = materialise_buffers(meta, {name})

    assert values.keys() == {name}
    torch.testing.assert_close(values[name], on_the_cpu(variant).get_buffer(name), rtol=0, atol=0)


def test_nothing_is_made_that_nobody_wants() -> None:
    assert materialise_buffers(make_module(families.make_config("llama"), "float32"), set()) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_a_buffer_of_unknown_value_is_refused(dtype: torch.dtype) -> None:
    meta = make_module(families.make_config("llama"), "float32")
    meta.model.register_buffer("table", torch.zeros(3, dtype=dtype, device="meta"), persistent=False)

    with pytest.raises(
        BuildError, match=r"model\.table is used by the model but transformers gives it no value"
    ) as error:
        materialise_buffers(meta, {"model.table"})

    assert error.value.code == "feature-unsupported"


def test_a_buffer_that_is_filled_in_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = make_module(families.make_config("llama"), "float32")
    meta.model.register_buffer("table", torch.zeros(3, device="meta"), persistent=False)

    def fill_in_part(module: Any) -> None:
        if hasattr(module, "table"):
            module.table[:2] = 1.0

    monkeypatch.setattr(meta.model, "_init_weights", fill_in_part)

    with pytest.raises(BuildError, match=r"model\.table"):
        materialise_buffers(meta, {"model.table"})
