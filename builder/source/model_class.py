"""Which class of models a config stands for: transformers', or one of code that comes with the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)  # fmt: skip

from precast.builder.replaced import replaced
from precast.builder.source.other_names import republished
from precast.ir.errors import BuildError, some

CAUSAL = "AutoModelForCausalLM"
"""The entry of a config's `auto_map` that names the model's own causal language model."""


class Unmade(torch.nn.Module):
    """A part of a multimodal model that no text goes through, in the place of one that can't be made here."""


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of the decoder, or of a model with a decoder in it, that a config stands for; None: there is none.

    It comes from the model's own code where that is needed (`own_code`), else from transformers, or from whoever
    registered it with `AutoModelForCausalLM`.
    """
    code = own_code(config)
    if code is not None:
        found: type[PreTrainedModel] = get_class_from_dynamic_module(code, str(config.name_or_path))
        found.register_for_auto_class(CAUSAL)  # its checkpoints take the code along
        return found
    known = known_classes(type(config))
    return known[0] if known else _class_for_part(config)


def own_code(config: PreTrainedConfig) -> str | None:
    """The causal language model that comes with the model's files, `file.Class`; None where transformers has it."""
    code = getattr(config, "auto_map", None) or {}
    needed = needs_code(code, type(config), config.architectures)
    return code.get(CAUSAL) if needed else None


def from_config(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model of the class that `config` stands for (`model_class`), with the options of transformers' own
    `from_config`. Raises what transformers and the model's code raise."""
    factories = ((AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
                 (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING))  # fmt: skip
    with _only_needed(config):
        if own_code(config) is None:
            for factory, mapping in factories:
                if type(config) in mapping:
                    return factory.from_config(config, **options)
        # transformers' factories would register a model's own code, for all builds to come
        found = model_class(config)
        assert found is not None, "open_source refuses configs without a model"
        return found._from_config(config, **options)


def _only_needed(config: PreTrainedConfig) -> contextlib.AbstractContextManager[None]:
    """Makes a multimodal model without those parts beside its decoder that want packages which aren't installed."""
    made = AutoModel.from_config
    decoder = type(config.get_text_config())

    def from_config(config: PreTrainedConfig, **options: Any) -> torch.nn.Module:
        try:
            return made(config, **options)
        except ImportError:
            if isinstance(config, decoder):
                raise
            return Unmade()

    return replaced((AutoModel, "from_config", from_config))


def needs_code(code: Any, config_class: type | None, architectures: Iterable[str] | None) -> bool:
    """Whether a config with this `auto_map` needs code from its repository.

    Models that transformers took over often still name the code that they came with: what counts is whether
    transformers has the architecture itself, for models of this type. Its spelling may be another: PhiMoE, Phimoe.
    """
    if not code:
        return False
    known = {_spelt(each.__name__) for each in known_classes(config_class)}
    named = set(map(_spelt, architectures or ()))
    return not named or not named <= known


def model_types(architectures: Any) -> list[str]:
    """The types of models for which transformers' factories have one of these architectures, its namesake first."""
    named = set(map(_spelt, architectures)) if isinstance(architectures, (list, tuple)) else set()
    found = [model_type for model_type, names in _named() if not named.isdisjoint(names)]
    return sorted(found, key=lambda model_type: not any(name.startswith(_spelt(model_type)) for name in named))


def check_architectures(config: PreTrainedConfig, found: type[PreTrainedModel], name: str) -> None:
    """Raise BuildError (`model-unsupported`) if a config names architectures, but not the decoder of its model type:
    the checkpoint is a classifier's, a reward model's, an embedding model's, and has no head that predicts tokens."""
    named = config.architectures
    if not named or own_code(config) is not None:
        return
    package = type(config).__module__.split(".")[-2:-1]
    known = {_spelt(found.__name__)}
    known |= {each for model, names in _named() if [model_type_to_module_name(model)] == package for each in names}
    if known.isdisjoint(map(_spelt, named)):
        raise BuildError(
            "model-unsupported",
            f"{name}: the config's architecture is {', '.join(some(list(map(str, named))))}, expected the decoder "
            f"that transformers has for {config.model_type}, {found.__name__}",
            fix=republished(named)
            or "build the checkpoint of a causal language model; if this is one, correct architectures in the config",
        )


def _named() -> list[tuple[str, set[str]]]:
    """Types of models, each with the names of what transformers' factories have for it."""
    both = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    pairs = [pair for mapping in both for pair in mapping.items()]
    return [(model, set(map(_spelt, [names] if isinstance(names, str) else names))) for model, names in pairs]


def _spelt(name: Any) -> str:
    return str(name).replace("_", "").lower()


def known_classes(config_class: Any) -> tuple[type[PreTrainedModel], ...]:
    """What transformers' factories have for configs of this class, the default first; nothing for None."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if config_class in mapping:
            known: Any = mapping[config_class]
            return tuple(known) if isinstance(known, (list, tuple)) else (known,)
    return ()


def _class_for_part(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The causal language model that is made of this part of a config alone, and so saves it as its own."""
    whole = model_type_to_module_name(config.model_type)
    known = known_classes(CONFIG_MAPPING[whole]) if whole in CONFIG_MAPPING else ()
    return next((each for each in known if each.config_class is type(config)), None)
