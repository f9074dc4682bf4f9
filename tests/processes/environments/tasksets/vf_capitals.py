"""Single turn: name the capital; two weighted rewards, one metric."""

import verifiers.v1 as vf

CAPITALS = {"France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima", "Cuba": "Havana"}


class CapitalsConfig(vf.TasksetConfig):
    polite: bool = False


class CapitalData(vf.TaskData):
    answer: str


class CapitalTask(vf.Task[CapitalData]):
    @vf.reward(weight=0.75)
    async def right(self, task: CapitalData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Capitals(vf.Taskset[CapitalTask, CapitalsConfig]):
    def load(self):
        for country, capital in CAPITALS.items():
            please = ", please" if self.config.polite else ""
            yield CapitalTask(
                CapitalData(prompt=f"Capital of {country}{please}?", system_prompt="One word.", answer=capital),
                self.config.task,
            )


__all__ = ["Capitals"]
