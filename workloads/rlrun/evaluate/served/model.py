"""Client of one episode for a served model: messages in, a message out, and the server's token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlrun.config.models.rollout import CompleteSampling
from rlrun.environments.chat_server import chat_body
from rlrun.environments.protocol import Message, Reply, Tool
from rlrun.evaluate.served.servers import Servers
from rlrun.orchestrator.rollouts.engine_session import derived_seed
from rlrun.orchestrator.types import Rollout


@dataclass(frozen=True)
class ServedRollout(Rollout):
    """Episode answered by a server, without tokens and therefore unusable for training."""

    prompt_tokens: int = 0
    """Tokens of the last prompt, counted by the server; 0 if not reported."""
    completion_tokens: int = 0
    """Tokens of all replies, counted by the server; 0 if not reported."""

    @property
    def tokens(self) -> int:
        """Number of all tokens, prompts included."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return self.completion_tokens


class ServedModel:
    """`ModelClient` of one episode.

    Args:
        servers: servers of the model.
        name: name of the model at the servers.
        sampling: sampling parameters.
        sample: number of the task's sample, from which its seed is derived.
    """

    def __init__(self, servers: Servers, name: str, sampling: CompleteSampling, sample: int) -> None:
        self._servers, self._name, self._sampling = servers, name, sampling
        self._seed = sampling.seed_of(sample)
        self.replies: list[Reply] = []
        self.waiting = False
        """Whether a request is running. It stays true if the episode is canceled during the request."""
        self.tools: tuple[Tool, ...] = ()
        """Tools offered most recently."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        """Sample the next message; see `ModelClient.complete`.

        Raises:
            RefusedError: the servers do not answer this question.
            RoleError: the servers would not answer any question.
        """
        sampling = self._sampling
        self.tools = tuple(tools or ()) or self.tools
        own = sampling.engine_parameters(self._next_seed())
        longest = sampling.max_tokens if max_tokens is None else min(max_tokens, sampling.max_tokens)
        fields = own | {
            "max_tokens": longest,
            "temperature": sampling.temperature,
            "stop": [*sampling.stop, *stop],
            "tools": list(tools or ()),
            "chat_template_kwargs": dict(sampling.chat_template_arguments),
        }
        self.waiting = True
        reply = await self._servers.ask(chat_body(self._name, messages, **fields))
        self.waiting = False
        self.replies.append(reply)
        return reply

    def _next_seed(self) -> int | None:
        number = len(self.replies)
        return self._seed if self._seed is None or not number else derived_seed(self._seed, number)
