"""The engine behind the stub's server, in the place of vLLM's engine client."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from loguru import logger

from rlrun.inference.weights.handover import UNKNOWN_VERSION
from tests.support.stub.policy import WEIGHTS, Policy, read_adapter, read_policy
from tests.support.stub.replies import Reply, Sampled, Vocabulary
from tests.support.stub.script import FAULTS_FOLDER, REQUESTS_FILE, InferenceScript, claim, end

_REMEMBERED_PROMPTS = 100_000
EVERYTHING = {"weights", "kv_cache"}
"""Parts of an engine in the memory of its GPU, with vLLM's names."""
SLOW_FACTOR = 10.0
"""Factor on a slow engine's time per token."""


@dataclass(frozen=True)
class AdapterRequest:
    """Stand-in for vLLM's LoRARequest."""

    name: str
    number: int
    path: str


@dataclass
class Choice:
    """One growing continuation."""

    reply: Reply
    tokens: list[Sampled] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """Version that sampled each token."""
    finish_reason: str | None = None

    def spans(self) -> list[dict[str, Any]]:
        """Return the versions as runs of tokens, `end` exclusive."""
        spans: list[dict[str, Any]] = []
        for position, label in enumerate(self.labels):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": label, "start": position, "end": position + 1})
        return spans


class StubEngine:
    """Samples from its policy, or from an adapter that a request names; satisfies `lora_adapters.LoRAEngine`.

    Args:
        model: folder of its first model.
        seed: seed of all sampling; the same requests in the same order get the same answers.
        script: durations and faults.
        run_folder: folder for records of past faults.
        sleep: function that waits.
    """

    def __init__(
        self,
        model: Path,
        *,
        seed: int,
        script: InferenceScript,
        run_folder: Path,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        logger.info(f"loads the model {model}")
        self.vocabulary = Vocabulary.load(model)
        self._policy: Policy | None = read_policy(model / WEIGHTS)
        self.memory = set(EVERYTHING)
        """Parts that it has not released."""
        self._seed, self._script, self._run_folder, self._sleep = seed, script, run_folder, sleep
        self._adapters: dict[int, Policy] = {}
        self.registry: dict[str, AdapterRequest] = {}
        """Adapters that requests can name."""
        self._used: Counter[str] = Counter()
        self._label = UNKNOWN_VERSION
        self._going = asyncio.Event()
        self._going.set()
        self._hanging = False
        self._slow_until = self._broken_until = 0.0
        self._asked: Counter[tuple[int, ...]] = Counter()
        self.running = 0
        """Number of continuations that are being sampled."""

    @property
    def errored(self) -> bool:
        """Whether it is beyond repair, which never happens."""
        return False

    async def pause_generation(self, *, mode: Any = "abort", clear_cache: bool = True) -> None:
        """Sample no token until resumed; requests in flight stay."""
        self._going.clear()

    async def resume_generation(self) -> None:
        """Continue, unless it hangs."""
        if not self._hanging:
            self._going.set()

    async def update_weight_version(self, new_version: str) -> None:
        """Set the label of tokens sampled from now on."""
        self._label = new_version

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Do nothing: the stub has no cache."""
        return True

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        """Drop everything; at `level` 2 the policy too."""
        self._going.clear()
        self.memory = set()
        if level > 1:
            self._policy = None

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Restore the requested parts."""
        self.memory |= set(tags or EVERYTHING)
        if self.memory == EVERYTHING and not self._hanging:
            self._going.set()
        return self.memory == EVERYTHING

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        """Run `load_version`, or `check_health`, which a hanging engine never answers."""
        if method == "load_version":
            if "weights" not in self.memory:
                raise RuntimeError("weights were loaded into an engine that sleeps")
            await self._reload(Path((kwargs or {})["weights_path"]))
        elif self._hanging:
            await asyncio.Event().wait()
        return [None]

    async def add_lora(self, lora_request: AdapterRequest) -> bool:
        """Add one adapter."""
        policy = await asyncio.to_thread(read_adapter, Path(lora_request.path))
        await self._update(policy)
        self._adapters[lora_request.number] = policy
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter."""
        return self._adapters.pop(lora_id, None) is not None

    def in_use(self) -> set[str]:
        """Return adapters of requests in flight."""
        return {name for name, count in self._used.items() if count > 0}

    async def _reload(self, folder: Path) -> None:
        policy = await asyncio.to_thread(read_policy, folder / WEIGHTS)
        await self._update(policy)
        self._policy = policy
        logger.info(f"holds version {policy.step}")

    async def _update(self, policy: Policy) -> None:
        """Simulate a hand-over of this policy: its duration, and the faults of the script."""
        await self._sleep(self._script.update_seconds)
        for number, fault in enumerate(self._script.faults):
            if fault.version != policy.step or not claim(self._run_folder, number, fault.times):
                continue
            logger.warning(f"script: {fault.action} at version {policy.step}")
            match fault.action:
                case "slow_update":
                    await self._sleep(fault.seconds)
                case "fail_update":
                    raise RuntimeError("the script lets this update break")
                case "hang":
                    self._hanging = True
                case "slow":
                    self._slow_until = time.monotonic() + fault.seconds
                case "answer_500":
                    self._broken_until = time.monotonic() + fault.seconds
                case _:
                    end(fault.action, fault.code)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        max_tokens: int,
        stop: Sequence[int],
        ignore_eos: bool,
        seed: int | None,
        adapter: str | None = None,
    ) -> list[Choice]:
        """Sample `n` continuations of a prompt in parallel, one token each at a time; a hand-over in between shows in
        their versions.

        With `adapter`, the name of one in the registry, all tokens are of that policy.
        """
        if time.monotonic() < self._broken_until:
            raise RuntimeError("the script lets requests fail")
        fixed = self._adapters[self.registry[adapter].number] if adapter is not None else None
        stops = {*stop} if ignore_eos else {*stop, self.vocabulary.eos}
        key = tuple(prompt)
        if self._script.record_requests:
            self._record(key, n)
        self._asked[key] += 1
        if len(self._asked) > _REMEMBERED_PROMPTS:
            self._asked.clear()
        # As in vLLM, a request with a seed has the same answers each time, and its n-th answer uses the n-th next seed.
        text = f"{self._seed}/{seed}/{self._asked[key]}/{key}"
        sources = [f"{text}/{index}" if seed is None else f"{key}/{seed + index}" for index in range(n)]
        choices = [Choice(Reply(self.vocabulary, prompt, Random(source), ignore_eos=ignore_eos)) for source in sources]
        self.running += n
        self._used[adapter or ""] += 1
        try:
            while growing := [choice for choice in choices if choice.finish_reason is None]:
                slow = SLOW_FACTOR if time.monotonic() < self._slow_until else 1.0
                await self._sleep(self._script.token_seconds * slow)
                await self._going.wait()
                for choice in growing:
                    policy = fixed or self._policy
                    if policy is None or self.memory != EVERYTHING:
                        raise RuntimeError("an engine that sleeps was asked for tokens")
                    self._sample(choice, policy, stops, max_tokens)
        finally:
            self.running -= n
            self._used[adapter or ""] -= 1
        return choices

    def _record(self, prompt: tuple[int, ...], n: int) -> None:
        path = self._run_folder / FAULTS_FOLDER / REQUESTS_FILE
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"prompt": prompt, "n": n, "version": self._label}) + "\n")

    def _sample(self, choice: Choice, policy: Policy, stops: set[int], max_tokens: int) -> None:
        sampled = choice.reply.next(policy.accuracy)
        choice.tokens.append(sampled)
        choice.labels.append(self._label)
        if sampled.token in stops:
            choice.finish_reason = "stop"
        elif len(choice.tokens) >= max_tokens:
            choice.finish_reason = "length"
