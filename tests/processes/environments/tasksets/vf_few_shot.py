"""Few-shot prompt: an earlier conversation with a tool call."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)


class FewShot(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 4):
            prompt = [
                vf.SystemMessage(content="Add one."),
                vf.UserMessage(content="1?"),
                vf.AssistantMessage(tool_calls=[vf.ToolCall(id="c", name="add", arguments='{"a": 1}')]),
                vf.ToolMessage(tool_call_id="c", name="add", content="2"),
                vf.UserMessage(content=f"{number}?"),
            ]
            yield SumTask(SumData(prompt=prompt, answer=str(number + 1)), self.config.task)


__all__ = ["FewShot"]
