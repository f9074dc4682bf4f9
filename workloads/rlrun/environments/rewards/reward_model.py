"""Reward model on a vLLM server with one of its endpoints for sequence classification: `/classify`, `/pooling` or `/score`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from rlrun.environments.protocol import Message
from rlrun.environments.rewards.served import ServedArgs, ServedError, Server, fill_template


class RewardModelError(ServedError):
    """Error for a reward model that could not be reached or returned no score."""


class RewardModelArgs(ServedArgs):
    """Arguments of the reward `reward-model`; `base_url` is the server's root, without a path of its API."""

    endpoint: Literal["classify", "pooling", "score"] = "classify"
    """Endpoint of the server. `classify` and `pooling` get one input, `score` gets the question and the reply as a pair."""
    input: Literal["messages", "text"] = "messages"
    """`messages`: the whole conversation, to which the server applies the model's chat template. `text`: the filled `template`."""
    template: str = "{question}\n\n{reply}"
    """Text for `input: text`, with `{question}` and `{reply}`."""
    label: int | None = Field(default=None, ge=0)
    """Index of the score in the returned numbers. Only a model with one label works without it."""
    scale: float = Field(default=1.0, gt=0)
    """Divisor of the score."""
    body: dict[str, object] = Field(default_factory=dict)
    """Additional fields of each request, such as `use_activation: false` for scores without a sigmoid or softmax."""


class RewardModel:
    """Scorer of conversations with a reward model.

    Args:
        args: model and server.
    """

    def __init__(self, args: RewardModelArgs) -> None:
        self._args, self._server = args, Server(args, "the reward model", RewardModelError)
        self.close = self._server.close

    async def score(self, *, prompt: Sequence[Message], question: str, reply: str) -> float:
        """Return the score of a reply.

        Args:
            prompt: conversation before the reply.
            question: the same conversation as a text.
            reply: reply of the policy.

        Raises:
            RewardModelError: there was no score before the deadline, or the server rejected the request.
        """
        args = self._args
        body: dict[str, object] = {"model": args.model, **args.body}
        if args.endpoint == "score":
            body |= {"text_1": question, "text_2": reply}
        elif args.input == "messages":
            body["messages"] = [*prompt, {"role": "assistant", "content": reply}]
        else:
            body["input"] = fill_template(args.template, {"question": question, "reply": reply})
        return await self._server.request_answer(args.endpoint, body, self._parse_score) / args.scale

    def _parse_score(self, document: object) -> float:
        numbers = _read_numbers(document, self._args.endpoint)
        if self._args.label is None and len(numbers) != 1:
            raise RewardModelError(
                f"the reward model returned {len(numbers)} numbers for one reply; set label to the index of the score"
            )
        index = self._args.label or 0
        if index >= len(numbers):
            raise RewardModelError(f"the reward model returned {len(numbers)} numbers, so label {index} does not exist")
        return numbers[index]


def _read_numbers(document: Any, endpoint: str) -> list[float]:
    """Return the numbers of the only item of an answer. Raises RewardModelError if the answer has another format."""
    try:
        found = {"classify": "probs", "pooling": "data", "score": "score"}[endpoint]
        value = document["data"][0][found]
        if isinstance(value, list) and value and isinstance(value[0], list):
            value = value[-1]  # one vector per token: the vector of the last token is the score of the whole text
        return [float(number) for number in (value if isinstance(value, list) else [value])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RewardModelError(
            f"the reward model did not return an answer of /{endpoint}: {str(document)[:200]}"
        ) from error
