"""`reverse-text` as a taskset of verifiers 0.4."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData, vf.State]):
    @vf.reward
    async def right(self, task: ReverseData, trace: vf.Trace) -> float:
        reply = trace.last_reply
        return sum(a == b for a, b in zip(reply, task.answer, strict=False)) / len(task.answer)


class Reverse(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ReverseTask]:
        rng = random.Random(0)
        for _ in range(4000):
            text = "".join(rng.choice("abcdef") for _ in range(4))
            yield ReverseTask(ReverseData(prompt=f"<{text}>", answer=text[::-1]), self.config.task)


__all__ = ["Reverse"]
