"""Registers a kind of model with transformers."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def register_model(config_class: type[Any], model_class: type[Any]) -> None:
    """Let transformers' auto classes find a language model, and its `Trainer` know what it is.

    With label smoothing, `Trainer` shifts the labels only for models in its table of names. Others
    would learn to repeat the last token.
    """
    kind = config_class.model_type
    AutoConfig.register(kind, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] = model_class.__name__
