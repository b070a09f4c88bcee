"""The plan by which transformers itself would split a model over ranks."""

from __future__ import annotations

from transformers import PreTrainedConfig

from precast.builder.source.model_class import model_class


def tp_plan(config: PreTrainedConfig) -> dict[str, str]:
    """Styles by patterns of names: `base_model_tp_plan` of the config and of its decoder's, and what the model's class
    adds for its head. Empty for a model that transformers has no plan for."""
    plans = [getattr(each, "base_model_tp_plan", None) for each in (config, config.get_text_config(decoder=True))]
    plans.append(getattr(model_class(config), "_tp_plan", None))
    return {entry: style for plan in plans if isinstance(plan, dict) for entry, style in plan.items()
            if isinstance(entry, str) and isinstance(style, str)}  # fmt: skip
