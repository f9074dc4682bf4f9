"""Lookup of environments by id, and its error messages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlrun.environments import Environment, EnvironmentLoadError, known_environments, load_environment

OWN = """
from rlrun.environments import Episode, Score, Task

class Echo:
    id = "echo"
    def __init__(self, word): self.word = word
    def tasks(self, split): return [Task(split, [{"role": "user", "content": self.word}])]
    async def run(self, task, model): return Episode([*task.prompt, (await model.complete(task.prompt)).message], 1)
    async def score(self, task, episode): return Score(1.0)

def make(word, loud=False): return Echo(word.upper() if loud else word)
def flexible(**options): return Echo(options["word"])
def wrong(): return object()
def broken(): raise RuntimeError("the data set is missing")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_envs.py").write_text(OWN)
    (tmp_path / "own_bad_import.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_envs", "own_bad_import"):
        sys.modules.pop(name, None)


def test_each_shipped_environment_is_described_and_loads(tmp_path: Path) -> None:
    assert set(known_environments()) == {"reverse-text", "arithmetic", "calculator", "gsm8k", "dataset"}
    data = tmp_path / "data.jsonl"
    rows = [{"uid": i, "prompt": f"{i}?", "reward_model": {"ground_truth": "1"}} for i in range(30)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"gsm8k": {"source": "bundled"}, "dataset": {"path": str(data)}}
    for id, description in known_environments().items():
        assert len(description) > 30
        environment = load_environment(id, args.get(id, {}))
        assert isinstance(environment, Environment)
        assert environment.id == id


@pytest.mark.usefixtures("own")
def test_custom_function_is_called_with_arguments() -> None:
    assert (
        load_environment("own_envs:make", {"word": "hi", "loud": True}).tasks("train")[0].prompt[0]["content"] == "HI"
    )
    assert load_environment("own_envs:flexible", {"word": "hi"}).id == "echo"


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("id", "args", "says"),
    [
        ("reverse-txt", {}, ["unknown environment 'reverse-txt'", "did you mean reverse-text?", "calculator"]),
        ("nonsense", {}, ["'nonsense'", "reverse-text, arithmetic, calculator", "package.module:function"]),
        ("reverse-text", {"lenght": 3}, ["no argument 'lenght'", "did you mean length?", "letters: str = 'abcdef'"]),
        ("reverse-text", {"length": "many"}, ["'length' = 'many'", "integer"]),
        ("reverse-text", {"length": 0}, ["'length' = 0", "greater than or equal to 1"]),
        ("reverse-text", {"letters": "a<"}, ["'letters'", "['<']"]),
        ("reverse-text", {"letters": "aba"}, ["contains a character twice"]),
        ("arithmetic", {"operations": "+/"}, ["'operations' = '+/'", "use some of '+', '-' and '*'"]),
        ("calculator", {"max_turns": 1, "sed": 1}, ["'max_turns' = 1", "no argument 'sed'", "did you mean seed?"]),
        ("no_such_pkg.mod:make", {}, ["importing 'no_such_pkg.mod' failed", "Install the package"]),
        ("own_bad_import:make", {}, ["a_package_that_is_not_there"]),
        ("own_envs:mak", {}, ["no function 'mak'", "did you mean make?"]),
        ("own_envs:make", {"wrod": "hi"}, ["no argument 'wrod'", "did you mean word?", "loud=False"]),
        ("own_envs:make", {}, ["make() raised TypeError", "word"]),
        ("own_envs:wrong", {}, ["returned object, which lacks id, tasks, run, score"]),
        ("own_envs:broken", {}, ["the data set is missing"]),
    ],
)
def test_load_error_names_cause_and_valid_values(id: str, args: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(EnvironmentLoadError) as caught:
        load_environment(id, args)
    for part in [id, *says]:
        assert part in str(caught.value)


def test_missing_verifiers_is_reported_with_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rlrun.environments.adapters.verifiers_adapter", raising=False)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(EnvironmentLoadError, match=r"pip install .*\[orchestrator\]'"):
        load_environment("verifiers:gsm8k", {})
