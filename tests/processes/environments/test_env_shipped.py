"""Shipped environments: prompts, rewards and reproducible tasks."""

from __future__ import annotations

import os
import string
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlrun.environments import (
    Demonstrates,
    Environment,
    EnvironmentLoadError,
    Episode,
    Reply,
    Task,
    load_environment,
    run_episode,
)
from rlrun.environments.bundled import dataset
from rlrun.environments.bundled.small_tasks import position_score
from rlrun.environments.splits import split_of
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from tests.support.programs import run_program
from tests.support.waiting import UNREACHED_SECONDS

SMALL: dict[str, dict[str, Any]] = {
    "reverse-text": {},
    "arithmetic": {"max_operand": 12, "operations": "+-*", "terms": 3},
    "calculator": {},
}

GENERATED = list(SMALL)
FINGERPRINT = """
import hashlib, json, sys
from dataclasses import asdict
from rlrun.environments import load_environment
loaded = [load_environment(id, {}) for id in ("reverse-text", "arithmetic", "calculator")]
tasks = [asdict(env.tasks(s)[i]) for env in loaded for s in ("train", "eval") for i in range(50)]
print(hashlib.sha256(json.dumps(tasks, sort_keys=True).encode()).hexdigest())
assert "torch" not in sys.modules and "vllm" not in sys.modules and "verifiers" not in sys.modules
"""


def test_tasks_are_equal_in_each_process() -> None:
    def fingerprint(hash_seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = run_program([sys.executable, "-c", FINGERPRINT], env=env, check=True)
        return run.stdout

    assert fingerprint("1") == fingerprint("271828")


@pytest.mark.parametrize("id", GENERATED)
def test_tasks_are_a_lazy_random_access_sequence(id: str) -> None:
    env = load_environment(id, {"num_tasks": 10**9, "seed": 3})
    tasks = env.tasks("train")
    assert len(tasks) == 10**9
    assert tasks[-1] == tasks[10**9 - 1]
    assert tasks[5] == load_environment(id, {"num_tasks": 10**9, "seed": 3}).tasks("train")[5]
    assert list(tasks[4:6]) == [tasks[4], tasks[5]]
    assert [t.id for t in islice(tasks, 3)] == [tasks[i].id for i in range(3)]
    assert [tasks[i].prompt for i in range(20)] != [
        load_environment(id, {}).tasks("train")[i].prompt for i in range(20)
    ]
    with pytest.raises(IndexError):
        tasks[10**9]


@pytest.mark.parametrize("id", GENERATED)
def test_train_and_eval_share_no_problem(id: str) -> None:
    train, evaluation = (
        {
            t.prompt[-1]["content"]
            for s in (0, 1)
            for t in load_environment(id, {"num_tasks": 1500, "seed": s}).tasks(split)
        }
        for split in ("train", "eval")
    )
    assert len(train) > 100
    assert len(evaluation) >= 10
    assert not train & evaluation


@given(st.text(alphabet="abcdef", min_size=4, max_size=4))
def test_split_depends_only_on_problem(problem: str) -> None:
    assert split_of(problem) == split_of(str(problem))
    assert split_of(problem) in ("train", "eval")


@pytest.mark.parametrize("id", GENERATED)
def test_ids_are_unique_and_text_fits_character_tokenizer(id: str) -> None:
    env = load_environment(id, {**SMALL[id], "num_tasks": 300})
    assert isinstance(env, Environment)
    assert isinstance(env, Demonstrates)
    tasks = list(env.tasks("train")) + list(env.tasks("eval"))
    assert len({t.id for t in tasks}) == len(tasks)
    for task in tasks:
        for message in [*task.prompt, *env.demonstration(task)]:
            assert set(message["content"]) <= set(string.ascii_letters + string.digits + string.punctuation + " \n")


@pytest.mark.parametrize("id", GENERATED)
async def test_demonstration_gets_full_reward(id: str, scripted: Any) -> None:
    env = load_environment(id, SMALL[id])
    assert isinstance(env, Demonstrates)
    for task in islice(env.tasks("eval"), 20):
        ideal = env.demonstration(task)
        model = scripted([m["content"] for m in ideal if m["role"] == "assistant"])
        episode, score = await run_episode(env, task, model, timeout_seconds=UNREACHED_SECONDS)
        assert score.reward == 1.0
        assert episode.messages == [*task.prompt, *ideal]


async def reward_of(env: Environment, task: Task, said: str, scripted: Any) -> float:
    _, score = await run_episode(env, task, scripted([said]), timeout_seconds=UNREACHED_SECONDS)
    return score.reward


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("dcba", 1.0),
        ("dcbx", 0.75),
        ("abcd", 0.0),
        ("dc", 0.5),
        ("", 0.0),
        ("dcbadcba", 0.5),
        (" dcba\n", 1.0),
        ("xdcba", 0.0),
        ("dcbaa", 0.8),
        ("DCBA", 0.0),
        ("d" * 400, 0.0025),
    ],
)
async def test_reverse_text_rewards_each_right_position(said: str, reward: float, scripted: Any) -> None:
    task = Task(id="t", prompt=[{"role": "user", "content": "<abcd>"}], answer="dcba")
    assert await reward_of(load_environment("reverse-text", {}), task, said, scripted) == pytest.approx(reward)


@given(st.text(max_size=30), st.text(alphabet="abc", min_size=1, max_size=8))
def test_position_score_is_full_only_for_answer(said: str, answer: str) -> None:
    score = position_score(said, answer)
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (said.strip() == answer)
    assert position_score(answer + "a", answer) < 1.0


def test_reverse_text_prompt_matches_answer() -> None:
    for task in islice(load_environment("reverse-text", {"length": 6, "letters": "xyz"}).tasks("train"), 20):
        text = task.prompt[0]["content"]
        assert (text[0], text[-1], len(text)) == ("<", ">", 8)
        assert set(text[1:-1]) <= set("xyz")
        assert task.answer == text[1:-1][::-1]


@pytest.mark.parametrize(
    ("said", "exact", "partial"),
    [
        ("-12", 1.0, 1.0),
        ("12", 0.0, 0.0),
        ("-13", 0.0, 2 / 3),
        ("-12=", 0.0, 0.75),
        ("-12\n", 1.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
async def test_arithmetic_rewards_right_number(said: str, exact: float, partial: float, scripted: Any) -> None:
    task = Task(id="t", prompt=[{"role": "user", "content": "3-15="}], answer="-12")
    assert await reward_of(load_environment("arithmetic", {}), task, said, scripted) == exact
    assert await reward_of(
        load_environment("arithmetic", {"partial_credit": True}), task, said, scripted
    ) == pytest.approx(partial)


def test_arithmetic_answers_are_right() -> None:
    right = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for task in islice(load_environment("arithmetic", {"operations": "+-*", "max_operand": 30}).tasks("train"), 200):
        problem = task.prompt[0]["content"]
        sign = next(c for c in problem if c in right)
        left, _, operand = problem.removesuffix("=").partition(sign)
        assert task.answer == str(right[sign](int(left), int(operand)))


CALC = Task(id="t", prompt=[{"role": "user", "content": "12*34-5="}], answer="403", info={"expression": "12*34-5"})


@pytest.mark.parametrize(
    ("script", "reward", "heard"),
    [
        (["calc(12*34-5)", "403"], 1.0, ["403"]),
        (["403"], 1.0, []),
        (["I use calc(12*34)", "calc(408-5)", "403"], 1.0, ["408", "403"]),
        (["calc(12*(34)-5) please", " 403 "], 1.0, ["403"]),
        (["calc(12*34", "404"], 0.0, ["408"]),
        (["calc(12*34-5)", "the answer is 403"], 0.0, ["403"]),
        (["calc(x)", "calc(1/0)", "calc(9**9**9)", "403"], 1.0, None),
        (["calc()", "403"], 1.0, ["error: empty expression"]),
        (["calc(1)"] * 4, 0.0, ["1", "1", "1"]),
        ([Reply("403", "length", truncated=True)], 1.0, []),
        ([Reply("calc(12*34-5)", "length", truncated=True)], 0.0, []),
    ],
)
async def test_calculator_conversation_is_scored(
    script: list[Any], reward: float, heard: list[str] | None, scripted: Any
) -> None:
    model = scripted(script)
    episode, score = await run_episode(
        load_environment("calculator", {}), CALC, model, timeout_seconds=UNREACHED_SECONDS
    )
    assert score.reward == reward
    assert episode.replies == len(model.seen) == len(script)
    answers = [m["content"] for m in episode.messages[1:] if m["role"] == "user"]
    if heard is None:
        assert all(answer.startswith("error: ") for answer in answers)
        assert score.metrics["call_errors"] == len(answers) == 3
    else:
        assert answers == heard
    assert episode.messages[-1]["role"] == "assistant"


async def test_calculator_turns_and_credit_are_arguments(scripted: Any) -> None:
    env = load_environment("calculator", {"max_turns": 2, "call_credit": 0.25, "instructions": False})
    episode, score = await run_episode(
        env, CALC, scripted(["calc(12*34-5)", "calc(403)", "403"]), timeout_seconds=UNREACHED_SECONDS
    )
    assert (episode.replies, score.reward) == (2, 0.25)
    _, wrong = await run_episode(env, CALC, scripted(["calc(12*34)", "408"]), timeout_seconds=UNREACHED_SECONDS)
    assert wrong.reward == 0.0
    assert [m["role"] for m in env.tasks("train")[0].prompt] == ["user"]
    assert [m["role"] for m in load_environment("calculator", {}).tasks("train")[0].prompt] == ["system", "user"]


async def test_stored_episode_gets_same_score(scripted: Any) -> None:
    env = load_environment("calculator", {})
    episode, score = await run_episode(env, CALC, scripted(["calc(12*34-5)", "403"]), timeout_seconds=UNREACHED_SECONDS)
    assert await env.score(CALC, Episode(**vars(episode))) == score


def test_arguments_with_empty_split_are_refused() -> None:
    with pytest.raises(EnvironmentLoadError, match="split is empty"):
        load_environment("reverse-text", {"length": 1, "letters": "ab"})


@pytest.mark.parametrize(
    ("id", "args", "asked"),
    [
        ("gsm8k", {}, ("openai/gsm8k", None)),
        ("gsm8k", {"revision": "v1"}, ("openai/gsm8k", "v1")),
        ("dataset", {"name": "org/rows", "revision": "5d1c0b7"}, ("org/rows", "5d1c0b7")),
    ],
)
def test_hub_data_set_is_downloaded_with_revision(
    id: str, args: dict[str, Any], asked: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str | None]] = []

    def download(name: str, field: str, revision: str | None = None) -> Path:
        seen.append((name, revision))
        raise RoleError("far enough", exit_codes.UNAVAILABLE)

    monkeypatch.setattr(dataset, "download_set", download)
    with pytest.raises(EnvironmentLoadError, match="far enough"):
        load_environment(id, args)
    assert seen == [asked]


def test_revision_without_hub_name_is_refused() -> None:
    with pytest.raises(EnvironmentLoadError, match=r"revision \(v1\) needs name"):
        load_environment("dataset", {"path": "/data/rows.jsonl", "revision": "v1"})
