"""Which class of models a config stands for: transformers', or one of code that comes with the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

CAUSAL = "AutoModelForCausalLM"
"""The entry of a config's `auto_map` that names the model's own causal language model."""


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
                 (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING))  # fmt: skip
    if own_code(config) is None:
        for factory, mapping in factories:
            if type(config) in mapping:
                return factory.from_config(config, **options)
    # transformers' factories would register a model's own code, for all builds to come
    found = model_class(config)
    assert found is not None, "open_source refuses configs without a model"
    return found._from_config(config, **options)


def needs_code(code: Any, config_class: type | None, architectures: Iterable[str] | None) -> bool:
    """Whether a config with this `auto_map` needs code from its repository.

    Models that transformers took over often still name the code that they came with: what counts is whether
    transformers has the architecture itself.
    """
    if not code:
        return False
    known = {each.__name__ for each in known_classes(config_class)}
    named = set(architectures or ())
    return not named or not named <= known


def known_classes(config_class: Any) -> tuple[type[PreTrainedModel], ...]:
    """What transformers' factories have for configs of this class, the default first; nothing for None."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if config_class in mapping:
            known: Any = mapping[config_class]
            return tuple(known) if isinstance(known, (list, tuple)) else (known,)
    return ()


def _class_for_part(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The causal language model that is made of this part of a config alone, and so saves it as its own."""
    whole = model_type_to_module_name(config.model_type)
    known = known_classes(CONFIG_MAPPING[whole]) if whole in CONFIG_MAPPING else ()
    return next((each for each in known if each.config_class is type(config)), None)
