"""Verifiers tasksets from end to end with a scripted policy, without any socket, including loopback."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from rlrun.environments import EnvironmentLoadError, EpisodeError, load_environment, run_episode
from rlrun.environments.stage import InProcessStage
from tests.support.waiting import UNREACHED_SECONDS

pytestmark = pytest.mark.usefixtures("tasksets", "no_network")


def format_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def all_tasks(env: Any) -> list[Any]:
    return [*env.tasks("train"), *env.tasks("eval")]


async def test_single_turn_uses_weighted_rewards_of_taskset(scripted: Any) -> None:
    env = load_environment("verifiers:vf-capitals", {"taskset": {"polite": True}})
    task = next(t for t in all_tasks(env) if t.answer == "Rome")
    assert task.prompt[-1]["content"] == "Capital of Italy, please?"
    for said, reward in (("Rome", 1.0), ("Milan", 0.25), ("It might well be Rome, I think.", 0.0)):
        model = scripted([said])
        episode, score = await run_episode(env, task, model, timeout_seconds=UNREACHED_SECONDS)
        assert score.reward == pytest.approx(reward)
        assert score.metrics == {"characters": len(said), "reward_right": said == "Rome", "reward_short": reward > 0}
        assert episode.messages == [*task.prompt, {"role": "assistant", "content": said}]
        assert model.seen == [task.prompt]


async def test_splits_share_no_task_and_are_reproducible(scripted: Any) -> None:
    first, second = (
        load_environment("verifiers:vf-capitals", {}),
        load_environment("verifiers:vf-capitals", {"eval_share": 0.5}),
    )
    assert [t.id for t in first.tasks("train")] == [
        t.id for t in load_environment("verifiers:vf_capitals", {}).tasks("train")
    ]
    for env, held_out in ((first, 1), (second, 3)):
        train, evaluation = ({t.answer for t in env.tasks(split)} for split in ("train", "eval"))
        assert len(evaluation) == held_out
        assert not train & evaluation
        assert len(train) + len(evaluation) == 6


@pytest.mark.parametrize(
    ("id", "args", "single"),
    [
        ("vf-capitals", {}, True),
        ("vf-guess", {"limit": 20}, False),  # Its environment plays the user.
        ("vf-guess", {"limit": 20, "max_turns": 1}, True),
        ("vf-shop", {}, False),  # The policy can call tools.
    ],
)
def test_single_turn_flag_matches_taskset(id: str, args: dict[str, Any], single: bool) -> None:
    assert InProcessStage(load_environment(f"verifiers:{id}", args)).single_turn is single


async def test_multi_turn_environment_replies_until_game_ends(scripted: Any) -> None:
    env = load_environment("verifiers:vf-guess", {"limit": 20})
    task = next(t for t in all_tasks(env) if t.info["index"] == 5)
    episode, score = await run_episode(env, task, scripted(["8", " 20 ", "15"]), timeout_seconds=UNREACHED_SECONDS)
    assert [m["content"] for m in episode.messages] == ["Guess my number.", "8", "higher", " 20 ", "lower", "15"]
    assert episode.replies == 3
    assert score.reward == pytest.approx(1 / 3)
    assert score.metrics["distance"] == 0.0


async def test_turn_limit_ends_conversation_and_scores_it(scripted: Any) -> None:
    for args, replies in (({}, 4), ({"max_turns": 2}, 2)):
        env = load_environment("verifiers:vf-guess", {"limit": 20, **args})
        episode, score = await run_episode(
            env, env.tasks("train")[0], scripted(lambda _: "0"), timeout_seconds=UNREACHED_SECONDS
        )
        assert episode.replies == replies
        assert episode.info["truncated"]
        assert score.reward == 0.0


async def test_tools_run_in_process_with_state_for_rewards(scripted: Any) -> None:
    env = load_environment("verifiers:vf-shop", {})
    task = next(t for t in all_tasks(env) if "fig" in t.prompt[0]["content"])
    replies = [
        "I look it up. " + format_call("prices_of", fruit="fig"),
        format_call("buy", fruit="apple") + format_call("nosuch"),
        format_call("buy", fruit="fig", count=2),
        "Done.",
    ]
    model = scripted(replies)
    episode, score = await run_episode(env, task, model, timeout_seconds=UNREACHED_SECONDS)
    user, *rest = episode.messages
    assert user == {"role": "user", "content": "Buy 2 of fig."}
    assert len(model.offered) == 4
    for tools in model.offered:
        assert [(tool["type"], tool["function"]["name"]) for tool in tools] == [
            ("function", "prices_of"),
            ("function", "buy"),
        ]
        assert tools[1]["function"]["description"] == "Put fruit into the basket."
        assert tools[1]["function"]["parameters"]["required"] == ["fruit"]
    said = [m for m in rest if m["role"] == "assistant"]
    assert [m["content"] for m in said] == ["I look it up.", "", "", "Done."]
    calls = [call for m in said for call in m.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["prices_of", "buy", "nosuch", "buy"]
    answers = [m for m in rest if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in answers] == [call["id"] for call in calls]
    assert len({call["id"] for call in calls}) == 4
    results = [m["content"] for m in rest if m["role"] == "tool"]
    assert results[0] == "five", "@intercept rewrites what the model sees"
    assert "no apple today" in results[1]
    assert results[2] == "error: no function 'nosuch'; available functions: prices_of, buy"
    assert results[3] == "2 fig"
    assert score.reward == 1.0
    assert model.seen[-1] == episode.messages[:-1]


async def test_stop_hook_ends_episode_before_next_reply(scripted: Any) -> None:
    env = load_environment("verifiers:vf-shop", {})
    task = next(t for t in all_tasks(env) if "fig" in t.prompt[0]["content"])
    episode, score = await run_episode(
        env, task, scripted([format_call("buy", fruit="fig", count=10)]), timeout_seconds=UNREACHED_SECONDS
    )
    assert episode.info["stop_condition"] == "enough"
    assert score.reward == 0.0


async def test_concurrent_episodes_do_not_share_state(scripted: Any) -> None:
    env = load_environment("verifiers:vf-shop", {})

    async def play(task: Any, count: int) -> float:
        fruit = task.prompt[-1]["content"].split()[-1].strip(".")
        script = [
            format_call("buy", fruit=fruit),
            format_call("prices_of", fruit=fruit),
            format_call("buy", fruit=fruit, count=count),
            "ok",
        ]
        _, score = await run_episode(env, task, scripted(script), timeout_seconds=UNREACHED_SECONDS)
        return score.reward

    plays = [play(task, count) for task in all_tasks(env) for count in (1, 2, 1)]
    assert await asyncio.gather(*plays) == [1.0, 0.0, 1.0] * 3


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("hang", "environment", "scoring took too long"),
        ("raise", "environment", "no such row"),
        ("nan", "reward", "nan"),
    ],
)
async def test_faulty_reward_is_error_with_environment_name(scripted: Any, fault: str, kind: str, says: str) -> None:
    env = load_environment("verifiers:vf-faulty", {"scoring_timeout_seconds": 0.2 if fault == "hang" else 60})
    task = next(t for t in all_tasks(env) if t.info["index"] == ["hang", "raise", "nan"].index(fault))
    with pytest.raises(EpisodeError, match=says) as caught:
        await run_episode(env, task, scripted(["x"]), timeout_seconds=UNREACHED_SECONDS)
    assert caught.value.kind == kind
    assert caught.value.env_id == "verifiers:vf-faulty"


async def test_failing_model_client_is_a_model_error(scripted: Any) -> None:
    env = load_environment("verifiers:vf-capitals", {})
    with pytest.raises(EpisodeError, match="engine gone") as caught:
        await run_episode(
            env, env.tasks("train")[0], scripted([ConnectionError("engine gone")]), timeout_seconds=UNREACHED_SECONDS
        )
    assert caught.value.kind == "model"


@pytest.mark.parametrize(
    ("id", "args", "says"),
    [
        ("verifiers:no-such-taskset", {}, "cannot load the taskset 'no-such-taskset'"),
        ("verifiers:no-such-taskset", {}, "; `rlrun env install SOURCE` installs one and prints the fields to set$"),
        ("verifiers:vf-guess", {}, "set the argument 'limit'"),
        ("verifiers:vf-boxed", {}, "need a container"),
        ("verifiers:vf-capitals", {"taskset": {"polit": True}}, "polit"),
        ("verifiers:vf-capitals", {"max_turn": 3}, "did you mean max_turns"),
        ("verifiers:vf-capitals", {"env": {"id": "user-sim"}}, "has 2 agents"),
    ],
)
def test_unsupported_taskset_is_refused_with_reason(id: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=says) as caught:
        load_environment(id, args)
    assert id in str(caught.value)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="verifiers")
