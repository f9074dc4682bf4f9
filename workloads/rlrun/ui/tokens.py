"""Tokens of a rollout with log-probs, advantages and versions, from the packed batch of its step and the run's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlrun.runtime.extras import explain_import
from rlrun.ui.models import rollout_answers
from rlrun.ui.registry import OpenRun

if TYPE_CHECKING:
    from rlrun.protocol.files.batch import Sample

_BATCH_BYTES_MAX = 2 << 30
_TOKENIZER_BYTES_MAX = 128 << 20
_TOKENS_MAX = 20_000
"""Maximum number of tokens of a sequence in a response."""
_LETTER_TOKENS = 8
"""More tokens than one character can have; text that is still incomplete after that is shown as broken."""
HIDDEN = "•"
Spans = Callable[[str], Sequence[tuple[int, int]]]
"""Function from a text to the spans of secrets in it."""
Decode = Callable[[Sequence[int]], str]


def rollout_tokens(
    run: OpenRun, step: int, attempt: int, group: int, rollout: int, secrets: Spans
) -> rollout_answers.Tokens:
    """Return the tokens of a trained rollout, if the batch of its step is still on the volume.

    Raises:
        OutsideError: a file of the batch is a link to the outside.
    """
    refused = readable_batch(run, step, attempt)
    if refused is not None:
        return _no_tokens(refused)
    try:
        from rlrun.protocol.files.batch import BatchError, read_batch
    except ImportError as error:
        return _no_tokens(explain_import(error) or str(error))
    try:
        samples = [
            one
            for one in read_batch(run.paths.batch(step, attempt)).samples
            if (one.group, one.rollout) == (group, rollout)
        ]
    except BatchError as error:
        return _no_tokens(str(error))
    decode = load_decoder(run)
    found = [_sequence_tokens(sample, decode, secrets) for sample in samples]
    return rollout_answers.Tokens(
        sequences=found, decoded=decode is not None, why=None if found else "the batch does not contain this rollout"
    )


def readable_batch(run: OpenRun, step: int, attempt: int) -> str | None:
    """Return why the batch of a step cannot be read, or None.

    Raises:
        OutsideError: a file of the batch is a link to the outside.
    """
    folder = run.paths.batch(step, attempt)
    try:
        for name in ("batch.json", "samples.safetensors"):
            with run.fence.open(folder / name) as file:
                large = file.seek(0, 2) > _BATCH_BYTES_MAX
    except FileNotFoundError:
        return (
            f"the batch of step {step} is no longer on the volume: batches are kept only until a checkpoint covers them"
        )
    return f"the batch of step {step} has more than {_BATCH_BYTES_MAX >> 30} GiB" if large else None


def _no_tokens(why: str) -> rollout_answers.Tokens:
    return rollout_answers.Tokens(sequences=[], decoded=False, why=why)


def _sequence_tokens(sample: Sample, decode: Decode | None, secrets: Spans) -> rollout_answers.TokenSequence:
    ids = sample.input_ids[:_TOKENS_MAX].tolist()
    texts = [str(one) for one in ids] if decode is None else hide_secrets(token_pieces(ids, decode), secrets)
    return rollout_answers.TokenSequence(
        texts=texts,
        sampled=sample.loss_mask[:_TOKENS_MAX].tolist(),
        logprobs=[round(value, 4) for value in sample.logprobs[:_TOKENS_MAX].tolist()],
        advantages=[round(value, 4) for value in sample.advantages[:_TOKENS_MAX].tolist()],
        versions=sample.versions[:_TOKENS_MAX].tolist(),
        cut=len(sample) - len(ids),
    )


def token_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token; joined, the texts are the decoded sequence.

    Each token is decoded after the previous ones, because spaces may depend on them. A character of several tokens belongs to the last
    of them; the texts of the others are empty.
    """
    found, before, shown = [], 0, 0  # tokens before..shown are the context that was emitted last
    for at in range(len(ids)):
        known, text = decode(ids[before:shown]), decode(ids[before : at + 1])
        if text.endswith("\ufffd") and at + 1 - shown < _LETTER_TOKENS and at + 1 < len(ids):
            found.append("")
            continue
        found.append(text[len(known) :])
        before, shown = shown, at + 1
    return found


def hide_secrets(texts: Sequence[str], secrets: Spans) -> list[str]:
    """Return the texts of tokens; a text that overlaps a secret is replaced by a dot."""
    spans = secrets("".join(texts))
    found, begin = [], 0
    for text in texts:
        end = begin + len(text)
        found.append(HIDDEN if any(start < end and begin < stop for start, stop in spans) else text)
        begin = end
    return found


def load_decoder(run: OpenRun) -> Decode | None:
    """Return the tokenizer in the run's folder, or None if there is no readable one."""
    paths = run.paths
    published = [*reversed(paths.versions_on_disk()[-2:])]
    for folder in (paths.model, *(one.path for one in published)):
        if (found := _load_tokenizer(run, folder / "tokenizer.json")) is not None:
            return found
    return None


def _load_tokenizer(run: OpenRun, path: Path) -> Decode | None:
    try:
        with run.fence.open(path) as file:
            content = file.read(_TOKENIZER_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(content.decode())
    except Exception:  # a damaged file can raise any error
        return None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode
