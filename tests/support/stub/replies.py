"""Samples of the stub's engine: the right answer to `reverse-text` with the policy's accuracy, else any other letter. Pure."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

_ASKED = re.compile(r"<([^<>]+)>$")
"""The end of a prompt of `reverse-text`, without special tokens."""
OTHER_PROMPTS_LENGTH = 4
"""Number of letters in the answer to an unknown prompt."""


@dataclass(frozen=True)
class Vocabulary:
    """A character vocabulary."""

    ids: dict[str, int]
    """Token to id; single characters and `<eos>`."""
    texts: dict[int, str]
    """Id to character; special tokens are left out."""
    eos: int

    @classmethod
    def load(cls, model: Path) -> Vocabulary:
        """Return the vocabulary of a folder that `tests.support.stub.model` made.

        Raises:
            RoleError: the tokenizer is of another kind.
        """
        file = model / "tokenizer.json"
        try:
            ids = {str(text): int(id) for text, id in json.loads(file.read_text())["model"]["vocab"].items()}
            return cls(ids, {id: text for text, id in ids.items() if len(text) == 1}, ids["<eos>"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RoleError(f"{file} is not the tiny model's tokenizer: {error!r}", exit_codes.DATA) from None

    def answer(self, prompt: Sequence[int]) -> str | None:
        """Return the right answer to a prompt, or None if it is not a task of `reverse-text`."""
        found = _ASKED.search("".join(self.texts.get(token, "") for token in prompt))
        return found[1][::-1] if found else None


@dataclass(frozen=True)
class Sampled:
    """One token and the logarithm of the probability that it had."""

    token: int
    logprob: float


class Reply:
    """One continuation, token by token.

    Args:
        vocabulary: vocabulary of the model.
        prompt: token ids.
        rng: random numbers of this continuation.
        ignore_eos: whether to continue with letters after the answer.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], rng: Random, *, ignore_eos: bool = False) -> None:
        self._vocabulary, self._rng, self._ignore_eos = vocabulary, rng, ignore_eos
        self._answer = vocabulary.answer(prompt)
        self._length = OTHER_PROMPTS_LENGTH if self._answer is None else len(self._answer)
        self._position = 0

    def next(self, accuracy: float) -> Sampled:
        """Return the next token, under a policy of this accuracy; `<eos>` follows the answer with certainty."""
        position, self._position = self._position, self._position + 1
        if position >= self._length and not self._ignore_eos:
            return Sampled(self._vocabulary.eos, 0.0)
        right = self._answer[position] if self._answer is not None and position < self._length else None
        others = [letter for letter in string.ascii_lowercase if letter != right]
        draw = (
            self._rng.random()
        )  # drawn in any case, so that the same draws give a better answer under a better policy
        if right is not None and draw < accuracy:
            return Sampled(self._vocabulary.ids[right], math.log(accuracy))
        share = 1.0 if right is None else 1.0 - accuracy
        return Sampled(self._vocabulary.ids[self._rng.choice(others)], math.log(share / len(others)))
