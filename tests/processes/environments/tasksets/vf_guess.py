"""Multi-turn game: guess a number; the environment replies "higher" or "lower" until the guess is right."""

import itertools

import verifiers.v1 as vf


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def quick(self, trace: vf.Trace) -> float:
        return 1.0 / trace.num_turns if trace.info.get("found") else 0.0


class Guess(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count(10):
            yield GuessTask(GuessData(prompt="Guess my number.", number=number), self.config.task)


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guess = int(segment.last_reply)
                if guess == task.data.number:
                    interaction.trace.info["found"] = True
                    break
                segment = await interaction.turn("higher" if guess < task.data.number else "lower")

    async def finalize(self, task, episode):
        episode.traces[0].record_metric("distance", 0.0)


__all__ = ["Guess", "GuessEnv"]
