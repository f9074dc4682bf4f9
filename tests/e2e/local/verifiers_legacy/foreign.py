"""Environments of verifiers 0.1 of many kinds, by name; as a program, it loads and plays each and prints the results."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"say {i}", "answer": str(i)} for i in range(4)]
PICTURE = [{"type": "image_url", "image_url": {"url": "data:,"}}]


def text(message: Any) -> str:
    return str(message["content"] if isinstance(message, dict) else message.content)


def right(completion: Any, answer: str) -> float:
    return float(text(completion[-1]) == answer)


async def right_later(completion: Any, answer: str, **_: Any) -> float:
    return right(completion, answer)


def best_of_group(completions: list[Any]) -> list[float]:
    return [1.0 for _ in completions]


def by_info(info: dict[str, Any]) -> float:
    return float(info["worth"])


def parsed(completion: Any, answer: str, parser: vf.Parser) -> float:
    return float(parser.parse_answer(completion) == answer)


def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: one.
        b: other.
    """
    return str(a + b)


class Own(vf.Rubric):
    """Rubric that scores without functions."""

    async def score_rollout(self, state: Any) -> None:
        state["reward"], state["metrics"] = 0.5, {}


class Ends(vf.MultiTurnEnv):
    """Environment with its own end, state and cleanup."""

    async def setup_state(self, state: Any) -> None:
        state["asked"] = 0

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        state["asked"] += 1
        answer = [{"role": "user", "content": f"again {state['asked']}"}]
        if state["asked"] == 2:
            state["final_env_response"] = answer
        return answer

    @vf.stop
    async def has_said_it(self, state: Any) -> bool:
        return bool(state["trajectory"]) and text(state["trajectory"][-1]["completion"][-1]) == state["answer"]


class Stateful(vf.StatefulToolEnv):
    async def setup_state(self, state: Any, **_: Any) -> None:
        state["base"] = 40

    def update_tool_args(self, tool_name: str, tool_args: Any, messages: Any, state: Any, **_: Any) -> Any:
        return {**tool_args, "a": state["base"]}


def stateful() -> vf.Environment:
    env = Stateful(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([lambda completion: 1.0]), tools=[])
    env.add_tool(add, args_to_skip=["a"])
    return env


def single(**more: Any) -> vf.Environment:
    return vf.SingleTurnEnv(**{"dataset": Dataset.from_list(ROWS), "rubric": vf.Rubric([right])} | more)


def prompted(content: Any) -> Dataset:
    return Dataset.from_list([{"prompt": [{"role": "user", "content": content}], "answer": "1"}] * 2)


XML = vf.XMLParser(["think", "answer"], answer_field="answer")
SHOT = [{"role": "user", "content": "say 9"}, {"role": "assistant", "content": "9"}]
INFO = [row | {"info": {"worth": 0.75}} for row in ROWS]
KINDS = {
    "single": lambda: single(),
    "system": lambda: single(system_prompt="Be brief."),
    "few_shot": lambda: single(few_shot=SHOT),
    "later": lambda: single(rubric=vf.Rubric([right_later, right], weights=[0.5, 0.0])),
    "info": lambda: single(dataset=Dataset.from_list(INFO), rubric=vf.Rubric([by_info])),
    "task_column": lambda: single(dataset=Dataset.from_list([row | {"task": "t"} for row in ROWS])),
    "xml": lambda: single(parser=XML, rubric=vf.Rubric([parsed, XML.get_format_reward_func()], [1.0, 0.0], XML)),
    "builder": lambda: single(dataset=lambda: Dataset.from_list(ROWS), eval_dataset=Dataset.from_list(ROWS[:1])),
    "rubrics": lambda: single(rubric=vf.RubricGroup([vf.Rubric([right]), vf.Rubric([right_later])])),
    "own_rubric": lambda: single(rubric=Own()),
    "stop_words": lambda: single(sampling_args={"max_tokens": 7, "stop": ["."]}),
    "ends": lambda: Ends(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([right])),
    "tools": lambda: vf.ToolEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([right]), tools=[add]),
    "stateful": stateful,
    "group": lambda: vf.EnvGroup([single(sampling_args={"max_tokens": 7}), stateful()], env_names=["a", "b"]),
    "group_reward": lambda: single(rubric=vf.Rubric([right, best_of_group])),
    "group_reward_within": lambda: vf.EnvGroup(
        [single(), single(rubric=vf.RubricGroup([vf.Rubric([best_of_group])]))], env_names=["a", "b"]
    ),
    "no_weight": lambda: single(rubric=vf.Rubric([right], weights=[0.0])),
    "no_rubric": lambda: vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS)),
    "completion": lambda: single(
        message_type="completion", dataset=Dataset.from_list([{"prompt": f"say {i}", "answer": "1"} for i in range(3)])
    ),
    "unscored": lambda: single(score_rollouts=False),
    "temperature": lambda: single(sampling_args={"temperature": 0.1}),
    "picture": lambda: single(dataset=prompted(PICTURE)),
    "eval_only": lambda: vf.SingleTurnEnv(eval_dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([right])),
    "no_builder": lambda: single(dataset=lambda: Dataset.from_list(ROWS).select_columns(["nothing"])),
    "alone": lambda: single(dataset=Dataset.from_list(ROWS[:1])),
    "judge": lambda: single(rubric=vf.JudgeRubric()),
}


def load_environment(kind: str) -> vf.Environment:
    return KINDS[kind]()


class Model:
    """Model client that calls its offered tool once and otherwise answers with the requested number."""

    def __init__(self, says: str = "{}") -> None:
        self.says = says
        self.seen: list[Any] = []

    async def complete(self, messages: Any, *, max_tokens: Any = None, stop: Any = (), tools: Any = None) -> Any:
        from rlrun.environments import Reply

        self.seen.append({"messages": len(messages), "max_tokens": max_tokens, "stop": list(stop)})
        if tools and messages[-1]["role"] != "tool":
            known = tools[0]["function"]["parameters"]["properties"]
            call = {"name": "add", "arguments": json.dumps(dict.fromkeys(known, 2))}
            return Reply("", tool_calls=({"id": "call_0", "type": "function", "function": call},), content="")
        if messages[-1]["role"] == "tool":
            return Reply(messages[-1]["content"])
        number = next(m["content"] for m in reversed(messages) if m["content"].startswith("say"))[4:]
        return Reply("x" if len(self.seen) == 1 and messages[-1]["content"] == "say 1" else self.says.format(number))


async def play(kind: str) -> dict[str, Any]:
    from rlrun.environments import EnvironmentLoadError, EpisodeError, load_environment, run_episode

    try:
        env = load_environment("verifiers:foreign", {"args": {"kind": kind}})
    except EnvironmentLoadError as error:
        return {"refused": str(error)}
    plays = []
    for task in sorted([*env.tasks("train"), *env.tasks("eval")], key=lambda task: task.id):
        model = Model("<think>t</think><answer>{}</answer>" if kind == "xml" else "{}")
        try:
            episode, score = await run_episode(env, task, model, timeout_seconds=60)
        except EpisodeError as error:
            return {"failed": str(error)}
        roles = "".join(message["role"][0] for message in episode.messages)
        plays.append({"reward": score.reward, "roles": roles, "asked": model.seen, "eval": task.id[:4] == "eval"})
    return {"plays": plays}


if __name__ == "__main__":
    print(json.dumps({kind: asyncio.run(play(kind)) for kind in KINDS}))
