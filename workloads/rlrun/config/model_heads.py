"""Recognition of models without the head of a causal language model, by the classes in their `config.json`. Pure.

transformers selects the trained class by `model_type` and vLLM the served one by `architectures`, so the files of another head load: a
tied head equals the embedding, which an embedding model has too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TEXT_MODEL = "Qwen/Qwen3-8B"
"""Example of a supported text model in messages."""
_OTHER_HEADS = re.compile(
    r"For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|MaskedLM|NextSentencePrediction|PreTraining|"
    r"TextEncoding|ImageClassification|AudioClassification|AudioFrameClassification|CTC|XVector)$|RewardModel$|EncoderModel$"
)
"""Ends of the names of classes without a causal language model's head."""
_BASE = re.compile(r"(?<!Head)Model$")
"""End of the names of base classes, whose output are hidden states. `GPT2LMHeadModel` has a head."""
_CAUSAL, _IMAGES = "ForCausalLM", "ForConditionalGeneration"


def head_refusal(config: Mapping[str, object], shown: str, *, is_language: bool) -> str | None:
    """Return why a model is not a causal language model, with a fix, or None.

    Args:
        config: content of the model's `config.json`.
        shown: folder or name of the model for messages.
        is_language: whether transformers has a causal language model of this type.
    """
    kind = str(config.get("model_type") or "")
    if config.get("is_encoder_decoder") is True:
        return (
            f"{shown} has an encoder and a decoder ({kind}, is_encoder_decoder in config.json), and the trainer supports models with "
            f"only a decoder; use one, such as {TEXT_MODEL}"
        )
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return None
    name = str(classes[0])
    if all(_OTHER_HEADS.search(str(one)) for one in classes):
        return (
            f"{shown} is not a causal language model ({name}, architectures in config.json); use the language model that it was "
            f"made from, or another one, such as {TEXT_MODEL}"
        )
    if not all(_BASE.search(str(one)) for one in classes):
        return None
    twin = causal_class(name, has_images=bool(config.get("vision_config"))) if is_language else None
    subject = f"{shown} is a model without a head, such as an embedding model ({name}, architectures in config.json)"
    if twin is None:
        return f"{subject}; use the language model that it was made from, or another one, such as {TEXT_MODEL}"
    tied = config.get("tie_word_embeddings") is True
    return (
        f"{subject}; use a language model, such as {TEXT_MODEL}, or train it as {twin}"
        f'{"" if tied else ", if its files have a head"}: set architectures in config.json to ["{twin}"]'
    )


def causal_class(base: str, *, has_images: bool = False) -> str | None:
    """Return the name of the causal class with the decoder of class `base`, or None for a name that does not end like a base class."""
    if not _BASE.search(base):
        return None
    return base.removesuffix("Model").removesuffix("Text") + (_IMAGES if has_images else _CAUSAL)
