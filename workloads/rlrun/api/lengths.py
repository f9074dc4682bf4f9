"""Rules between the lengths of prompts, samples and micro-batches, in tokens."""

from __future__ import annotations

from rlrun.api.run_fields import RunFields
from rlrun.config.rule import Rule

_TOO_LONG = "self.environments.map(e, has(e.sampling) && e.sampling.maxTokens >= self.seqLen)"
_TOO_LONG_TOKENS = (
    "self.environments.map(e, has(e.sampling) && e.sampling.maxTokens >= self.seqLen, e.sampling.maxTokens)[0]"
)

LENGTH_RULES = (
    Rule(
        "!has(self.inference.maxModelLen) || self.inference.maxModelLen >= self.seqLen",
        "inference.maxModelLen ({self.inference.maxModelLen}) must be at least seqLen ({self.seqLen}); "
        "raise maxModelLen or remove it",
        ".inference.maxModelLen",
    ),
    Rule(
        "!has(self.trainer.microBatchTokens) || self.trainer.microBatchTokens >= self.seqLen",
        "trainer.microBatchTokens ({self.trainer.microBatchTokens}) must be at least seqLen ({self.seqLen}): "
        "a micro-batch must hold at least one sample; raise microBatchTokens or remove it",
        ".trainer.microBatchTokens",
    ),
    Rule(
        "!has(self.model.tiny) || self.model.tiny.maxLength >= self.seqLen",
        "model.tiny.maxLength ({self.model.tiny.maxLength}) must be at least seqLen ({self.seqLen}); raise maxLength or lower seqLen",
        ".model.tiny.maxLength",
    ),
    Rule(
        "self.sampling.maxTokens < self.seqLen || self.environments.all(e, has(e.sampling))",
        "sampling.maxTokens ({self.sampling.maxTokens}) must be less than seqLen ({self.seqLen}), "
        "which also includes the prompt; lower maxTokens or raise seqLen",
        ".sampling.maxTokens",
    ),
    Rule(
        f"!{_TOO_LONG}.exists(long, long)",
        f"environments[{{{_TOO_LONG}.indexOf(true)}}].sampling.maxTokens "
        f"({{{_TOO_LONG_TOKENS}}}) must be less than seqLen "
        "({self.seqLen}), which also includes the prompt; lower maxTokens or raise seqLen",
        ".environments",
    ),
)
"""Admission rules of the whole specification."""


def check_samples(spec: RunFields) -> None:
    """Check that engine, micro-batch and model can hold a sample of `seqLen` tokens.

    Raises:
        ValueError: The message has field, value and fix.
    """
    engine_len = spec.inference.max_model_len
    if engine_len is not None and engine_len < spec.seq_len:
        raise ValueError(
            f"inference.maxModelLen ({engine_len}) must be at least seqLen ({spec.seq_len}); raise maxModelLen or remove it"
        )
    row = spec.trainer.micro_batch_tokens
    if row is not None and row < spec.seq_len:
        raise ValueError(
            f"trainer.microBatchTokens ({row}) must be at least seqLen ({spec.seq_len}): a micro-batch must hold at least one sample; "
            "raise microBatchTokens or remove it"
        )
    tiny = spec.model.tiny
    if tiny is not None and tiny.max_length < spec.seq_len:
        raise ValueError(
            f"model.tiny.maxLength ({tiny.max_length}) must be at least seqLen ({spec.seq_len}); raise maxLength or lower seqLen"
        )


def check_replies(spec: RunFields) -> None:
    """Check that `seqLen` exceeds the longest reply, in training and in evaluation, so that a prompt fits too.

    Raises:
        ValueError: The message has field, value and fix.
    """
    for i, environment in enumerate(spec.environments):
        sampling = environment.sampling or spec.sampling
        if sampling.max_tokens >= spec.seq_len:
            path = f"environments[{i}].sampling" if environment.sampling else "sampling"
            raise ValueError(
                f"{path}.maxTokens ({sampling.max_tokens}) must be less than seqLen ({spec.seq_len}), "
                "which also includes the prompt; lower maxTokens or raise seqLen"
            )
        if spec.evaluation is not None and spec.evaluation.sampling is not None:
            try:
                spec.evaluation.sampling.check(sampling, seq_len=spec.seq_len)
            except ValueError as error:
                raise ValueError(f"evaluation.sampling, for environments[{i}]: {error}") from None
