"""Rewards that never return, raise, or are not a number, depending on the task."""

import asyncio

import verifiers.v1 as vf


class FaultyData(vf.TaskData):
    fault: str


class FaultyTask(vf.Task[FaultyData]):
    @vf.reward
    async def verdict(self, task: FaultyData) -> float:
        if task.fault == "hang":
            await asyncio.Event().wait()
        if task.fault == "raise":
            raise KeyError("no such row")
        return float("nan")


class Faulty(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self):
        for fault in ("hang", "raise", "nan"):
            yield FaultyTask(FaultyData(prompt="?", fault=fault), self.config.task)


__all__ = ["Faulty"]
