"""Where each fact of a published config is read: the one place that knows, for flat configs and nested ones.

`_FACTS` says under which names a fact stands, and whose word counts: that of `generation_config.json`, of the config's
top level, or of its decoder's part. What none of them says is the default of the config's class.
`precast.builder.source.numbers` says what numbers may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from precast.builder.limits import MAX_SEQ_LEN
from precast.builder.source.quantised_options import ignored_outputs, kv_dtype_of, quantisation_of
from precast.builder.source.small_files import GENERATION
from precast.ir.errors import BuildError, some
from precast.ir.graph.schema import Dtype
from precast.ir.weights.config_facts import decoder_part


class _Fact(NamedTuple):
    """The names of a fact, and the places that are asked, in this order; the first that says anything counts."""

    names: tuple[str, ...]
    places: tuple[str, ...]


_FACTS = {
    # The decoder's own, if the whole names another one: other parts of a model may be stored in other dtypes.
    "dtype": _Fact(("dtype", "torch_dtype"), ("decoder", "top")),
    # As transformers generates: what the publisher of the whole model says goes before the decoder's first training.
    "eos": _Fact(("eos_token_id",), (GENERATION, "top", "decoder")),
    "bos": _Fact(("bos_token_id",), (GENERATION, "top", "decoder")),
    "pad": _Fact(("pad_token_id",), ("top", "decoder")),
    "tied": _Fact(("tie_word_embeddings",), ("top", "decoder")),
    # The decoder's code reads its own: tables of positions have so many rows.
    "positions": _Fact(("max_position_embeddings",), ("decoder",)),
}
"""Quantisation has names, and files, of its own: `quantised_options` and `quantised_files` beside this module."""


class Facts(NamedTuple):
    """What a build takes from a config beside what the model's code reads in it."""

    dtype: str
    """Of weights and activations; it may be one that a bundle can't have."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tied: bool | None
    """Whether the head shares the embedding's weight. The model's class decides; this is what the config says."""
    quantisation: dict[str, Any] | None
    dtype_note: str | None = None
    """What to tell whoever names no dtype either: which one was chosen in the config's stead."""
    notes: tuple[str, ...] = ()
    """What of the config is not taken as it stands there, for the user to know."""
    kv_dtype: Dtype | None = None
    """Of keys and values, where the checkpoint was quantised for another one than that of the activations."""


class Said(NamedTuple):
    """A fact's value, None where nothing says it, the entry's name, and where it stands, for messages."""

    value: Any
    entry: str
    where: str
    is_written: bool = True
    """Whether the publisher says it, not the default of transformers' class."""


def decoder_way(config: PreTrainedConfig) -> tuple[str, ...]:
    """The names of the entries that lead to the decoder's part of a config; empty where it is the whole."""
    return next(_ways(config, config.get_text_config()), ())


def _ways(config: PreTrainedConfig, text: PreTrainedConfig) -> Iterator[tuple[str, ...]]:
    if config is text:
        yield ()
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            yield from ((name, *way) for way in _ways(inner, text))


def read_facts(config: PreTrainedConfig, entries: Mapping[str, Any], generation: Mapping[str, Any], name: str) -> Facts:
    """The facts of a config. `entries`: its text, empty for a config object; `generation`: the generation config's.

    Raises BuildError (`config-invalid`) for token ids that are none, and for a padding token outside of the vocabulary.
    """
    said = _reader(config, entries, generation)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    size = vocabulary if type(vocabulary) is int else 1 << 31
    quantisation = quantisation_of(config)
    dtype, dtype_note = said("dtype").value, None
    if dtype is None:
        dtype, dtype_note = _chosen_dtype(quantisation)
    kv_dtype, kv_note = kv_dtype_of(quantisation)
    eos, eos_notes = _within(_token_ids(said("eos"), name), said("eos"), size)
    bos, bos_notes = _within(_token_ids(said("bos"), name), said("bos"), size)
    _check_padding(said("pad"), size, name)
    return Facts(
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=eos,
        bos_token_id=bos[0] if bos else None,
        tied=said("tied").value,
        quantisation=quantisation,
        dtype_note=dtype_note,
        notes=(*eos_notes, *bos_notes, *([kv_note] if kv_note else []), *ignored_outputs(quantisation)),
        kv_dtype=kv_dtype,
    )


def _chosen_dtype(quantisation: object) -> tuple[str, str]:
    """The dtype where a config names none, and what to tell the user.

    Neither transformers' classes nor published configs say it of a family (`docs/capture.md`). float32 holds what any
    checkpoint stores, and what is quantised was made from bfloat16 or float16.
    """
    if quantisation:
        return "bfloat16", "the config names no dtype; bfloat16 was chosen as for any quantised checkpoint (--dtype)"
    return "float32", (
        "the config names no dtype; float32 was chosen, which holds what any checkpoint stores and takes twice the "
        "memory of bfloat16: name another one if the checkpoint has that (--dtype)"
    )


def _reader(
    config: PreTrainedConfig, entries: Mapping[str, Any], generation: Mapping[str, Any]
) -> Callable[[str], Said]:
    """A function that finds a fact by its name in `_FACTS`: first in what is written, then in the classes' defaults."""
    way = decoder_way(config)
    written = {GENERATION: generation, "top": entries, "decoder": decoder_part(entries, way)}
    read = {"top": config, "decoder": config.get_text_config()}
    decoder = f"the config's {'.'.join(way)}" if way else "the config"
    spelt = {GENERATION: GENERATION, "top": "the config", "decoder": decoder}

    def said(fact: str) -> Said:
        names, places = _FACTS[fact]
        for place in places:
            for name in names:
                if written[place].get(name) is not None:
                    return Said(written[place][name], name, spelt[place])
        for place in places:
            value = getattr(read[place], names[0], None) if place in read else None
            if value is not None:
                return Said(value, names[0], spelt[place], is_written=not entries)
        return Said(None, names[0], spelt[places[-1]])

    return said


def _token_ids(said: Said, name: str) -> tuple[int, ...]:
    """Token ids, of which there may be one, several or none; some publishers write none as -1."""
    value = said.value
    ids = tuple(value) if isinstance(value, (list, tuple)) else () if value in (None, -1) else (value,)
    if not all(type(token_id) is int and 0 <= token_id < 1 << 31 for token_id in ids):
        raise _no_token(said, "token ids, whole numbers of at least 0", name)
    return ids


def _within(ids: tuple[int, ...], said: Said, size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids that a vocabulary of this size has, and a note about the others: models are published that name some."""
    beyond = [token_id for token_id in ids if token_id >= size]
    if not beyond:
        return ids, ()
    where = said.where if said.is_written else "transformers' default"
    listed = ", ".join(some(list(map(str, beyond)), 5))
    note = f"{said.entry} {listed} ({where}) is left out: of a vocabulary of {size} tokens it is never drawn"
    return tuple(token_id for token_id in ids if token_id < size), (note,)


def _check_padding(said: Said, size: int, name: str) -> None:
    """Refuse a padding token that the embedding has no row for. No text is padded here, but the model's code reads it.

    Of transformers' defaults that code is the judge: some count other tokens along.
    """
    value = said.value
    if said.is_written and value not in (None, -1) and not (type(value) is int and 0 <= value < size):
        raise _no_token(said, f"a token of the vocabulary, 0 to {size - 1}, or -1 or null for none", name)


def _no_token(said: Said, expected: str, name: str) -> BuildError:
    message = f"{name}: {said.entry} is {said.value!r:.100} in {said.where}, expected {expected}"
    return BuildError("config-invalid", message, fix=f"correct {said.entry} in {said.where}")


def limit(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence (prompt and answer) that the bundle serves: `wanted`, at most what the model can."""
    (name,) = _FACTS["positions"].names
    config = config.get_text_config()
    known = getattr(config, name, None)
    entry = f"the config's {config.attribute_map.get(name, name)}"
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        fix = "leave max_seq_len out, for the config's limit"
        raise BuildError("option-invalid", f"max_seq_len is {wanted!r}, expected a number of at least 1", fix=fix)
    if known is not None and (type(known) is not int or known < 1):
        message, fix = f"{entry} is {known!r}, expected a number of at least 1", "correct it in the config"
        raise BuildError("config-invalid", message, fix=fix)
    rope = getattr(config, "rope_parameters", None) or {}
    if known is not None and rope.get("rope_type") == "dynamic":
        known = int(known * rope["factor"])  # this rope stretches what the model was trained on
    if wanted is not None and known is not None and wanted > known:
        more = ", or change the config's rope parameters" if rope else ""
        raise BuildError(
            "option-invalid",
            f"max_seq_len is {wanted}, but {entry} is {known}",
            fix=f"build with max_seq_len of at most {known}{more}",
        )
    longest = wanted or known or 8192
    if longest > MAX_SEQ_LEN:
        whose = "max_seq_len is" if wanted else f"{entry} is"
        fix = f"build with max_seq_len of at most {MAX_SEQ_LEN}"
        raise BuildError("option-invalid", f"{whose} {longest}, expected at most {MAX_SEQ_LEN}", fix=fix)
    return longest
