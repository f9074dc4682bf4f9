"""A reward model behind vLLM's endpoints for sequence classification: `/classify`, `/pooling` or `/score`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from rlrun.environments.protocol import Message
from rlrun.environments.rewards.served import ServedArgs, ServedError, Server, fill_template


class RewardModelError(ServedError):
    """The reward model could not be asked, or gave no score."""


class RewardModelArgs(ServedArgs):
    """Arguments of the reward `reward-model`; `base_url` is the server's root, without a path of its API."""

    endpoint: Literal["classify", "pooling", "score"] = "classify"
    """`classify` and `pooling` get one input, `score` gets the question and the reply as a pair."""
    input: Literal["messages", "text"] = "messages"
    """`messages`: the whole conversation, which the server puts into the model's chat template. `text`: `template` filled in."""
    template: str = "{question}\n\n{reply}"
    """With `input: text`: the text, with `{question}` and `{reply}`."""
    label: int | None = Field(default=None, ge=0)
    """Index of the number that is the score; only a model of one label needs none."""
    scale: float = Field(default=1.0, gt=0)
    """The score is divided by this."""
    body: dict[str, object] = Field(default_factory=dict)
    """More fields of each request, such as `use_activation: false` for scores without a sigmoid or softmax."""


class RewardModel:
    """Scores conversations.

    Args:
        args: which model, and how it is asked.
    """

    def __init__(self, args: RewardModelArgs) -> None:
        self._args, self._server = args, Server(args, "the reward model", RewardModelError)
        self.close = self._server.close

    async def score(self, *, prompt: Sequence[Message], question: str, reply: str) -> float:
        """A reply's score.

        Args:
            prompt: the conversation before the reply.
            question: the same as a text.
            reply: of the policy.

        Raises:
            RewardModelError: there was no score before the deadline, or the server refuses the request.
        """
        args = self._args
        body: dict[str, object] = {"model": args.model, **args.body}
        if args.endpoint == "score":
            body |= {"text_1": question, "text_2": reply}
        elif args.input == "messages":
            body["messages"] = [*prompt, {"role": "assistant", "content": reply}]
        else:
            body["input"] = fill_template(args.template, {"question": question, "reply": reply})
        return await self._server.ask(args.endpoint, body, self._parsed) / args.scale

    def _parsed(self, document: object) -> float:
        numbers = _read_numbers(document, self._args.endpoint)
        if self._args.label is None and len(numbers) != 1:
            raise RewardModelError(
                f"the reward model gives {len(numbers)} numbers for one reply; say with label which is the score"
            )
        index = self._args.label or 0
        if index >= len(numbers):
            raise RewardModelError(f"the reward model gives {len(numbers)} numbers, so label {index} is none of them")
        return numbers[index]


def _read_numbers(document: Any, endpoint: str) -> list[float]:
    """The numbers of an answer's one item. Raises RewardModelError: it has another form."""
    try:
        found = {"classify": "probs", "pooling": "data", "score": "score"}[endpoint]
        value = document["data"][0][found]
        if isinstance(value, list) and value and isinstance(value[0], list):
            value = value[-1]  # a vector for each token: that of the last one is of all
        return [float(number) for number in (value if isinstance(value, list) else [value])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RewardModelError(
            f"the answer of the reward model is none of /{endpoint}: {str(document)[:200]}"
        ) from error
