"""How the module's params are made from its checkpoint, in the layout that the hub holds.

What transformers converts while it loads a checkpoint (`precast.builder.weights.conversions`) and what a quantised
checkpoint stores in few bits (`precast.builder.weights.quantisation`) becomes recipes here. What no recipe can say is
refused by name: no weight is guessed.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from precast.builder.graph.context import KvScales
from precast.builder.graph.rounding import NONE, Roundings
from precast.builder.source.model_class import Unmade
from precast.builder.source.quantised_options import in_all_layers
from precast.builder.weights.at_load import scheme as at_load_scheme
from precast.builder.weights.conversions import Converted, converted, other_prefixes, saved_name, saved_tensors
from precast.builder.weights.quantisation import scheme_of
from precast.builder.weights.schemes.scheme import Scheme, Weight
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Cast, Read, Recipe, Tie
from precast.ir.manifest import Checkpoint
from precast.ir.patterns import matches
from precast.ir.weights import fit
from precast.ir.weights import recipes as ir_recipes

_ALWAYS_IGNORED = ("*rotary_emb.inv_freq",)
_PART_BEGINS = "(^|\\.)"
_PATTERN_TOKEN = re.compile(r"\\d\+|\.\*|\\\.|[A-Za-z0-9_.]")


def _all_of(errors: Sequence[BuildError]) -> BuildError:
    """Several errors as one."""
    if len(errors) == 1:
        return errors[0]
    lines = in_all_layers(error.message for error in errors)
    heads = {line.partition(": ")[0] for line in lines}
    head = f"{heads.pop()}: " if len(heads) == 1 else ""
    message = (f"{head}{len(errors)} weights can't be stored so", *(line.removeprefix(head) for line in lines))
    return BuildError(errors[0].code, "\n  ".join(message), where=errors[0].where, fix=errors[0].fix)


class ModelCheckpoint:
    """A model's checkpoint: what is in it, what becomes of that, and which of it a graph doesn't use.

    `quantisation`: the config's `quantization_config`, if the checkpoint is quantised; an unknown one is refused
    (`feature-unsupported`). `whole`: the multimodal model that the model is the text decoder of, if its checkpoint may
    be the other's. `beside`: patterns of tensors of the checkpoint that are no part of the model. `at_load`: what
    weights of a checkpoint that isn't quantised become while they are read, as the option `quantise` has it.
    """

    def __init__(
        self, model: PreTrainedModel, quantisation: Mapping[str, Any] | None = None,
        whole: PreTrainedModel | None = None, beside: Iterable[str] = (), *, at_load: str | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._whole = whole
        self._beside = tuple(beside)
        self._tied = _tied(model)
        self._scheme: Scheme | None = None  # what a scheme asks of the checkpoint's names, it asks while it is made
        if at_load is not None:
            self._scheme = at_load_scheme(model, at_load)
        else:
            self._scheme = scheme_of(model, quantisation, self._is_left_out)
        self._quantised: dict[str, Weight] = {}
        self._refused: list[BuildError] = []

    def recipes(self, names: Iterable[str]) -> dict[str, Recipe]:
        """The recipes of these entries of the state dict, and of those that they are tied to.

        Raises BuildError("recipe-unsupported"), and `feature-unsupported` for all weights that can't be stored as the
        config says.
        """
        state = self._model.state_dict()
        made: dict[str, Recipe] = {}
        for name in names:
            for each in (name, self._first(name)):
                made[each] = Tie(self._tied[each]) if each in self._tied else self._recipe(each, state[each])
        if self._refused:
            raise _all_of(self._refused)
        return made

    def scales(self) -> dict[str, KvScales]:
        """What the checkpoint calls the scales of cached keys and values, by the path of the attention layer; empty
        where its format has none."""
        known = self._scheme.scales if self._scheme else ()
        layers = [path for path, part in self._model.named_modules() if known and "Attention" in type(part).__name__]

        def names(path: str, which: str) -> tuple[str, ...]:
            ends = (end.replace("?", which) for end in known)
            return tuple(saved_name(self._model, f"{path}.{end}") for end in ends)

        return {path: KvScales(names(path, "k"), names(path, "v")) for path in layers}

    def roundings(self) -> Roundings:
        """How the inputs of layers are rounded whose weights `recipes` has made, where they are in few bits."""
        if self._scheme is None:
            return {}
        made = {tensor: self._scheme.rounding(weight) for tensor, weight in self._quantised.items()}
        return {tensor: rounding for tensor, rounding in made.items() if rounding != NONE}

    def known_names(self, used: Iterable[str] | None = None) -> Checkpoint:
        """The names that a checkpoint may hold beyond those that recipes read.

        `used` are the entries of the state dict that the graph uses; None: all of them.
        """
        prefix = self._model.base_model_prefix
        patterns = sorted(set(self._model._keys_to_ignore_on_load_unexpected or ()))
        ignored = {glob for pattern in patterns for glob in _globs(pattern)}
        ignored |= {f"{path}.*" for path, part in self._model.named_modules() if isinstance(part, Unmade)}
        names = {name: saved_name(self._model, name) for pair in self._tied.items() for name in pair}
        rules = Checkpoint(
            optional_prefixes=(prefix + ".",) if prefix else (),
            ignored=tuple(sorted({*ignored, *_ALWAYS_IGNORED, *(self._scheme.ignored if self._scheme else ())})),
            tied={names[second]: names[first] for second, first in sorted(self._tied.items())},
            prefixes=other_prefixes(self._model),
            groups_in_order=dict(self._scheme.groups_in_order) if self._scheme else {},
            zeros=dict(self._scheme.zeros) if self._scheme else {},
            endings=dict(self._scheme.endings) if self._scheme else {},
        )
        return rules if used is None else msgspec.structs.replace(rules, unused=self._unused(rules, set(used)))

    def _unused(self, rules: Checkpoint, used: set[str]) -> tuple[str, ...]:
        """What the graph doesn't use of the model's checkpoint, or of the multimodal model's."""
        tensors = self._used_tensors(used)
        patterns = {*self._beside, *unused_patterns(self._saved, tensors), *self._unused_of_whole(rules, tensors)}
        return tuple(sorted(patterns))

    def _unused_of_whole(self, rules: Checkpoint, tensors: Iterable[str]) -> tuple[str, ...]:
        """What of the multimodal model's checkpoint is none of these tensors, by their names in the model's."""
        if self._whole is None:
            return ()
        saved = saved_tensors(self._whole, _tied(self._whole))
        found = [fit.resolve(name, saved, rules) for name in tensors]
        return () if None in found else unused_patterns(saved, [name for name in found if name is not None])

    def _is_left_out(self, layer: str) -> bool:
        """Whether a layer of this name, which is none of the model's, is of a part of checkpoints that isn't read."""
        return any(matches(pattern, f"{layer}.weight") for pattern in self._left_out)

    @functools.cached_property
    def _left_out(self) -> tuple[str, ...]:
        rules = self.known_names()
        return (*rules.ignored, *self._beside, *self._unused_of_whole(rules, self._saved))

    @functools.cached_property
    def _saved(self) -> dict[str, torch.Tensor]:
        return saved_tensors(self._model, self._tied)

    @functools.cached_property
    def _converted(self) -> Converted:
        return converted(self._model, self._saved, self._source)

    def _source(self, name: str, tensor: torch.Tensor, param: str) -> Recipe:
        """What reads a checkpoint tensor: as it is stored, in any floating type, or in few bits."""
        shape, dtype = tuple(tensor.shape), _dtype(tensor)
        weight = Weight(name, shape, param)
        if not tensor.is_floating_point():
            return Read(name, shape, dtype)
        if self._scheme is None:
            return Read(name, shape)
        if not self._scheme.holds(weight):
            return Cast(Read(name, shape), dtype)
        try:
            recipe = self._scheme.recipe(weight)
        except BuildError as error:
            self._refused.append(error)  # to be named with the others
            return Read(name, shape)
        self._quantised |= {read.tensor: weight for read in ir_recipes.each_leaf(recipe)}
        return Cast(recipe, dtype)

    def _recipe(self, name: str, tensor: torch.Tensor) -> Recipe:
        made = self._converted.params.get(name)
        if made is None:
            # the reason may be that of several params that are made together, under the name of another one
            reasons = list(self._converted.failed.values())
            reason = self._converted.failed.get(name, reasons[0] if reasons else None)
            raise reason or BuildError(
                "recipe-unsupported", f"{name}: transformers' conversions make it from no tensor of a checkpoint"
            )
        dtype = _dtype(tensor)
        return made.recipe if ir_recipes.dtype(made.recipe) == dtype else Cast(made.recipe, dtype)

    def _used_tensors(self, used: Iterable[str]) -> set[str]:
        """The checkpoint tensors that these entries of the state dict are made of."""
        return {tensor for name in used for tensor in self._converted.params[self._first(name)].tensors}

    def _first(self, name: str) -> str:
        """The param that this one is tied to, or the one itself."""
        while name in self._tied:
            name = self._tied[name]
        return name


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Entries of the state dict, and those that they are tied to."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _dtype(tensor: torch.Tensor) -> Any:
    """The dtype's name; the verifier refuses one that the schema doesn't have."""
    return str(tensor.dtype).removeprefix("torch.")


def _globs(pattern: str) -> list[str]:
    """A regular expression of transformers as patterns with `*`; those that say more than that are left out.

    Leaving one out is safe: its tensors are then reported as unexpected.
    """
    if pattern.startswith(_PART_BEGINS):
        rest = pattern.removeprefix(_PART_BEGINS)
        return [*_globs("^" + rest), *_globs("\\." + rest)]
    anchored_start, anchored_end = pattern.startswith("^"), pattern.endswith("$")
    body = pattern.removeprefix("^").removesuffix("$")
    tokens: list[str] = _PATTERN_TOKEN.findall(body)
    if "".join(tokens) != body:
        return []
    spelled = {"\\d+": "*", ".*": "*", "\\.": "."}
    text = "".join(spelled.get(token, token) for token in tokens)
    return [("" if anchored_start else "*") + text + ("" if anchored_end else "*")]


def unused_patterns(names: Iterable[str], used: Iterable[str]) -> tuple[str, ...]:
    """Patterns that describe all of `names` but those in `used`, sorted: `model.vision_tower.*`, or a single name.

    Where layers, or all their experts, differ only by their number, `*` stands for it, unless that names a used tensor.
    """
    kept = set(used)
    text = "\n".join(kept)
    parts = {prefix for name in kept for prefix in itertools.accumulate(name.split("."), "{}.{}".format)}
    found = {_part(name, parts) for name in names if name not in kept}
    for stars in (None, 1):
        safe = {short for short in {_numbers_starred(each, stars) for each in found} if not _any(short, kept, text)}
        found = safe | {pattern for pattern in found if _numbers_starred(pattern, stars) not in safe}
    return tuple(sorted(found))


def _part(name: str, parts: set[str]) -> str:
    """The largest part of the model with this tensor in it of which nothing is used."""
    prefixes = list(itertools.accumulate(name.split("."), "{}.{}".format))
    whole = next((prefix for prefix in prefixes if prefix not in parts), name)
    return name if whole == name else whole + ".*"


def _numbers_starred(pattern: str, count: int | None) -> str:
    """With `*` for the first `count` numbers, the layer's first; None: for all."""
    words = pattern.split(".")
    at = [place for place, word in enumerate(words) if word.isdigit()][:count]
    return ".".join("*" if place in at else word for place, word in enumerate(words))


def _any(pattern: str, names: Iterable[str], text: str) -> bool:
    """Whether it is a pattern of one of the names, of which `text` is made: most are seen there not to be."""
    literal = max(pattern.split("*"), key=len)
    return literal in text and any(matches(pattern, name) for name in names)
