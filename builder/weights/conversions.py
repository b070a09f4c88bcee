"""What transformers does with a checkpoint while it loads it: which tensors there are, and what becomes of them.

Its conversions are run in both directions. Backwards, as when a model is saved, they give the checkpoint's names and
shapes: the layout that the hub holds. Forwards, as when it is loaded, on tensors that know their recipe, they give the
recipe of each param.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from transformers import PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from precast.builder.weights.tensor_recipes import RecipeTensor
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Recipe

PUBLISHED: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({
    # Kimi-K2.5 and -K2.7: transformers renames the vision tower's `blocks` to `layers`, in all names, so what it writes
    # itself has blocks in the decoder, too. The publishers' quantisation configs name `language_model.model.layers.*`.
    "kimi_k25": (("language_model.model.blocks.", "language_model.model.layers."),),
})  # fmt: skip
"""By model type, beginnings of names that transformers' conversions give when they are taken back, and what the
publishers' checkpoints have in their place. Both are read."""

ALSO_READ: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({
    # DeepSeek-V4: transformers' renamings can't all be taken back. Two names of norms become one, and those of what
    # stands outside of layers are a model's without its prefix.
    "deepseek_v4": (
        ("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"),
        ("model.layers.*.attn.norm.", "layers.*.attn.kv_norm."),
    ),
})  # fmt: skip
"""By model type, beginnings of names that recipes read, and what may stand there instead: the publishers' names, where
transformers writes others. `*` is the number of each layer."""

ReadBy = Callable[[str, torch.Tensor, str], Recipe]
"""Gives a checkpoint tensor's recipe, by its name, the tensor (on the meta device) and the first param it makes."""


class Made(NamedTuple):
    """A param's recipe, and the checkpoint tensors that it is made of, or were split to make it."""

    recipe: Recipe
    tensors: tuple[str, ...]


class Converted(NamedTuple):
    """What the checkpoint makes, by the names of the state dict; `failed` has the reasons for what is missing."""

    params: dict[str, Made]
    failed: dict[str, BuildError]


def saved_tensors(model: PreTrainedModel, tied: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of the model's checkpoint by name, on the meta device; those tied to others are left out.

    Raises BuildError("recipe-unsupported") for a conversion that transformers can't take back.
    """
    left_out = set(tied)
    # A model that was traced has fake tensors, of which each view takes many times as long.
    state = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict().items() if name not in left_out
    }  # fmt: skip
    try:
        saved = loading.revert_weight_conversion(model, state)
    except NotImplementedError as error:
        message = f"a conversion of {model.config.model_type} checkpoints has no reverse, so their layout is unknown"
        raise BuildError("recipe-unsupported", message) from error
    return {_published(model, name): tensor for name, tensor in saved.items()}


def _published(model: PreTrainedModel, name: str) -> str:
    """The publisher's name for the tensor that transformers saves under this one."""
    for written, published in PUBLISHED.get(model.config.model_type, ()):
        if name.startswith(written):
            return published + name.removeprefix(written)
    return name


def saved_name(model: PreTrainedModel, name: str) -> str:
    """The checkpoint's name for an entry of the state dict that no conversion splits or merges."""
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [each.reverse_transform() for each in transforms[::-1] if not isinstance(each, loading.PrefixChange)]
    renamings = [each for each in reverse if isinstance(each, loading.WeightRenaming)]
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return _published(model, name)


def other_prefixes(model: PreTrainedModel) -> dict[str, str]:
    """Beginnings of checkpoint names, and what may stand there instead: a text model's in a multimodal checkpoint."""
    found = {published: written for written, published in PUBLISHED.get(model.config.model_type, ())}
    for written, published in ALSO_READ.get(model.config.model_type, ()):
        layers = range(model.config.num_hidden_layers if "*" in written else 1)
        found |= {written.replace("*", str(layer)): published.replace("*", str(layer)) for layer in layers}
    for change in get_model_conversion_mapping(model, add_legacy=False):
        if not isinstance(change, loading.PrefixChange) or change.scope_prefix:
            continue
        outer = change.model_prefix + "." if change.model_prefix else ""
        if change.prefix_to_remove is not None:
            found[outer] = f"{outer}{change.prefix_to_remove}."
        else:
            found[f"{outer}{change.prefix_to_add}."] = outer
    return found


def converted(model: PreTrainedModel, saved: Mapping[str, torch.Tensor], source: ReadBy) -> Converted:
    """The recipes of the state dict's entries that the `saved` tensors make."""
    find = _Targets(model, get_model_conversion_mapping(model))
    loads: dict[str, _Load] = {}
    made: dict[str, Made] = {}
    for name in sorted(saved, key=loading.dot_natural_key):
        target, pattern = find(name)
        if target is None:
            continue
        tensor = saved[name]
        recipe = source(name, tensor, target)
        if pattern is None:
            made[target] = Made(recipe, (name,))
            continue
        if target not in loads:
            loads[target] = _Load(copy.deepcopy(find.converter(pattern)), [])
        known = RecipeTensor.of(recipe, tensor.shape, tensor.dtype)
        loads[target].converter.add_tensor(target, name, pattern, known)  # type: ignore[arg-type]
        loads[target].tensors.append(name)
    failed: dict[str, BuildError] = {}
    for target, load in loads.items():
        try:
            made |= _run(target, load, model)
        except BuildError as error:
            failed[target] = error
    return Converted(made, failed)


class _Load(NamedTuple):
    converter: loading.WeightConverter
    tensors: list[str]


class _Targets:
    """Where transformers puts a checkpoint tensor.

    Names must be asked for in their natural order: some renamings count on it.
    """

    def __init__(self, model: PreTrainedModel, transforms: Sequence[loading.WeightTransform]) -> None:
        self._renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()

    def __call__(self, name: str) -> tuple[str | None, str | None]:
        """The entry of the state dict that a tensor makes, the first of several, and its conversion's pattern."""
        target, pattern = loading.rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        if target not in self._state and name in self._state:
            target, pattern = loading.rename_source_key(name, [], [], self._prefix, self._state)
        return (target, pattern) if target in self._state else (None, None)

    def converter(self, pattern: str) -> loading.WeightConverter:
        """The conversion of this pattern; of several, transformers takes the last."""
        return [each for each in self._converters if pattern in each.source_patterns][-1]


def _run(target: str, load: _Load, model: PreTrainedModel) -> dict[str, Made]:
    names = ", ".join(type(operation).__name__ for operation in load.converter.operations)
    try:
        made = load.converter.convert(target, model=model, config=model.config)
    except BuildError as error:
        raise BuildError("recipe-unsupported", f"{target} is made by {names}: {error.message}") from None
    except ValueError as error:  # what operations raise for tensors that they weren't made for
        raise BuildError("recipe-unsupported", f"{target} is made by {names}: {error}") from error
    return {name: Made(cast(RecipeTensor, tensor).recipe, tuple(load.tensors)) for name, tensor in made.items()}
