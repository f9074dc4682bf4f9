"""Custom rewards: functions by import path, weights, routes, whole groups, and mistakes found before a run starts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlrun.environments import EnvironmentLoadError, Episode, EpisodeError, Score, load_environment, run_episode
from rlrun.environments.stage import InProcessStage, Played, TaskRef
from tests.support.waiting import UNREACHED_SECONDS

MODULE = '''
import os
import signal
from collections import Counter


def length(completion, row, scale=1.0):
    """A plain function of completion and row."""
    return scale * len(completion) + row["bonus"]


async def right(completion, ground_truth):
    return completion.strip() == ground_truth


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # only a main thread may
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right, "pred": solution_str, "level": extra_info.get("level", 0)}


def able(completion, ability):
    return {"math": 1, "code": 2}[ability]


def fails(completion, row):
    raise KeyError("no such thing")


def leaves(completion):
    raise SystemExit(3)


def dies(completion):
    os._exit(1)


def computes(completion):
    while True:
        pass


def nan(completion):
    return float("nan")


def nothing(completion):
    pass


def unscored(completion):
    return {"acc": 1.0}


def rarity(completions, row):
    """Pays for what few others of the group say."""
    counts = Counter(completions)
    return [1 / counts[completion] for completion in completions]


async def one_too_few(completions):
    return [0.0] * (len(completions) - 1)


def positional(completion, /):
    return 0


def strange(completion, ground_turth):
    return 0


def deaf(row):
    return 0


def both(completion, completions):
    return 0


NUMBER = 3
'''


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from rlrun.custom import imported

    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_rewards", None)
    imported.cache_clear()


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., Any]:
    def make(rows: list[dict[str, Any]] | None = None, **args: Any) -> Any:
        given = rows or [{}]
        for split, offset in (("train", 0), ("test", len(given))):
            lines = [
                {"uid": f"row-{i}", "prompt": f"{i}?", "reward_model": {"ground_truth": str(i)}, "bonus": 10} | changes
                for i, changes in enumerate(given, offset)
            ]
            (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return load_environment("dataset", {"path": str(tmp_path), "train_split": "train", "eval_split": "test"} | args)

    return make


@pytest.fixture
def score(scripted: Any) -> Callable[..., Any]:
    async def play(environment: Any, reply: str, index: int = 0) -> Score:
        task = environment.tasks("train")[index]
        return (await run_episode(environment, task, scripted([reply]), timeout_seconds=UNREACHED_SECONDS))[1]

    return play


async def test_reward_function_gets_completion_and_row(dataset: Any, score: Any) -> None:
    assert await score(dataset(reward="own_rewards:length"), "abcd") == Score(14.0)
    assert (await score(dataset(reward="own_rewards:length", reward_args={"scale": 2}), "abcd")).reward == 18.0
    assert (await score(dataset(reward="own_rewards:right"), " 0 ")).reward == 1.0


async def test_function_with_verl_signature_is_called(dataset: Any, score: Any) -> None:
    rows = [{"data_source": "a/b", "extra_info": {"level": 5}}, {"data_source": "a/b"}]
    environment = dataset(rows, reward="own_rewards:compute_score")
    assert await score(environment, "0") == Score(1.0, {"acc": 1.0, "level": 5.0})


async def test_weighted_rewards_are_summed_and_each_is_reported(dataset: Any, score: Any) -> None:
    rewards = ["exact", {"name": "own_rewards:length", "weight": 0.1}, {"name": "own_rewards:length", "weight": 0}]
    found = await score(dataset(reward=rewards), "0")
    assert found.reward == pytest.approx(1 + 1.1)
    assert found.metrics == {"reward_exact": 1.0, "reward_length": 11.0, "reward_length_2": 11.0}


async def test_data_source_selects_the_reward(dataset: Any, score: Any) -> None:
    rows = [{"data_source": "gsm8k"}, {"data_source": "other", "ability": "code"}]
    environment = dataset(rows, reward_by_source={"gsm8k": "exact", "*": "own_rewards:able"})
    assert (await score(environment, "0", 0)).reward == 1.0
    assert (await score(environment, "0", 1)).reward == 2.0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", r"reward own_rewards:fails: raised KeyError: 'no such thing' \(own_rewards.py, line 27\)"),
        ("leaves", r"reward own_rewards:leaves: raised SystemExit\(3\)"),
        ("dies", "the process that computed reward own_rewards:dies ended"),
        ("computes", "reward own_rewards:computes did not finish within 1 seconds"),
        ("nan", "reward own_rewards:nan: the reward must be a finite number, not nan"),
        ("nothing", "the reward must be a finite number, not None"),
        ("unscored", "the returned dictionary has no 'score', only 'acc'"),
    ],
)
async def test_failing_reward_function_is_error_with_row_uid(name: str, says: str, dataset: Any, score: Any) -> None:
    environment = dataset(reward={"name": f"own_rewards:{name}", "timeout_seconds": 1 if name == "computes" else 60})
    with pytest.raises(EpisodeError, match=says) as caught:
        await score(environment, "0")
    assert (caught.value.kind, caught.value.task_id) == ("reward", "row-0")


MISTAKES = [
    ({"reward": "no_such_module:f"}, "reward no_such_module:f: cannot import no_such_module"),
    ({"reward": "own_rewards:lenght"}, "reward own_rewards:lenght: module own_rewards has no lenght"),
    ({"reward": "own_rewards:NUMBER"}, "NUMBER is a int, not a function"),
    ({"reward": "own_rewards.length"}, "argument 'reward.0.name' = 'own_rewards.length': Value error, unknown reward"),
    ({"reward": "exakt"}, "unknown reward 'exakt' (did you mean exact?); known: code, exact"),
    ({"reward": []}, "the list is empty"),
    ({"reward": [{"name": "exact", "wieght": 1}]}, "no argument 'reward.0.wieght'"),
    ({"reward": [{"name": "exact", "weight": float("nan")}]}, "argument 'reward.0.weight' = nan"),
    ({"reward": [{"name": "exact", "weight": float("inf")}]}, "argument 'reward.0.weight' = inf"),
    ({"reward": [{"name": "exact", "processes": 3}]}, "processes applies only to functions"),
    ({"reward": ["exact", "math"], "reward_args": {"processes": 3}}, "set args in each entry of reward"),
    ({"reward": "own_rewards:positional"}, "completion is a positional-only parameter"),
    ({"reward": "own_rewards:strange"}, "the parameter 'ground_turth' has no value (did you mean ground_truth?)"),
    ({"reward": "own_rewards:deaf"}, "its parameters are (row); exactly one must be the parameter for the reply"),
    ({"reward": "own_rewards:both"}, "its parameters are (completion, completions); exactly one"),
    ({"reward": "own_rewards:length", "reward_args": {"scael": 2}}, "no parameter 'scael' (did you mean scale?)"),
    (
        {"reward": "own_rewards:length", "reward_args": {"row": 2}},
        "args has 'row', which is filled from the row or the reply",
    ),
    ({"reward": "own_rewards:able"}, "train split: train.jsonl line 1: the column 'ability' is missing"),
    (
        {"reward_by_source": {"gsm8k": "exact"}},
        "train.jsonl line 1: the column 'data_source' is missing; reward_by_source",
    ),
    ({"reward_by_source": {"a": "exact"}, "reward": "exact"}, "reward_by_source replaces reward"),
    ({"reward": {"name": "reward-model", "args": {"base_url": "x", "model": "m"}}}, "reward 'reward-model': base_url"),
]


@pytest.mark.parametrize(("args", "says"), MISTAKES, ids=lambda value: "" if isinstance(value, dict) else value[:40])
def test_reward_mistake_is_found_at_load(args: dict[str, Any], says: str, dataset: Any) -> None:
    with pytest.raises(EnvironmentLoadError, match=re.escape(says)):
        dataset(**args)


def test_data_source_without_reward_is_reported_with_rows(dataset: Any) -> None:
    rows = [{"data_source": "gsm8k"}, *[{"data_source": "mahts"}] * 5]
    with pytest.raises(EnvironmentLoadError) as caught:
        dataset(rows, reward_by_source={"gsm8k": "exact", "maths": "math"})
    assert "line 2, train.jsonl line 3, train.jsonl line 4 and 2 more: data_source 'mahts' has no reward" in str(
        caught.value
    )
    assert "(did you mean maths?): reward_by_source has 'gsm8k', 'maths'" in str(caught.value)


def test_missing_reward_module_differs_from_mistake(dataset: Any) -> None:
    """The run's image may have the module: the cause shows it, as for a custom environment."""
    with pytest.raises(EnvironmentLoadError) as missing:
        dataset(reward="needs_more:f")
    with pytest.raises(EnvironmentLoadError) as wrong:
        dataset(reward="own_rewards:nowhere")
    assert isinstance(missing.value.__cause__, ImportError)
    assert wrong.value.__cause__ is None


# ---- groups


async def compare_replies(environment: Any, replies: list[str], scores: list[Score] | None = None) -> list[Score]:
    stage, task = InProcessStage(environment), TaskRef("train", 0)
    assert stage.compares
    group = [
        Played("row-0", Episode([{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}], 1), score)
        for reply, score in zip(replies, scores or [Score(0.0)] * len(replies), strict=True)
    ]
    return await stage.compare(task, group, timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS)


async def test_group_reward_function_gets_all_completions(dataset: Any, score: Any) -> None:
    environment = dataset(reward=["exact", {"name": "own_rewards:rarity", "weight": 2}])
    alone = await score(environment, "0")
    assert alone == Score(1.0, {"reward_exact": 1.0})
    found = await compare_replies(environment, ["0", "b", "0"], [alone, Score(0.0), alone])
    assert [one.reward for one in found] == [2.0, 2.0, 2.0]
    assert [one.metrics["reward_rarity"] for one in found] == [0.5, 1.0, 0.5]


async def test_failing_group_reward_is_error_with_row_uid(dataset: Any) -> None:
    with pytest.raises(EpisodeError, match="a list of 2 rewards, one for each completion, not list of 1") as caught:
        await compare_replies(dataset(reward="own_rewards:one_too_few"), ["a", "b"])
    assert (caught.value.kind, caught.value.task_id) == ("reward", "row-0")


def test_environment_without_group_reward_compares_nothing(dataset: Any) -> None:
    assert not InProcessStage(dataset(reward="exact")).compares
