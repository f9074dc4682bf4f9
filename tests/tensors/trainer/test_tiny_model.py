"""Tiny model and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.cli.main import main as rlrun
from rlrun.config.models.language_models import TinyModelConfig
from rlrun.environments.bundled.small_tasks import ReverseText, ReverseTextArgs
from rlrun.environments.demonstrations import WARMUP_BATCH, collect_demonstrations, write_demonstrations
from rlrun.protocol.files.failures import ERROR_DIR_VARIABLE, RoleError, read_error
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.shared_model import model_source
from rlrun.trainer.modeling.tiny_model import encode_demonstration, main, make_tiny_model, make_tokenizer
from rlrun.trainer.ranks.group import Group

SMALL = {"hidden_size": 32, "layers": 1, "warmup_steps": 2}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "12*3\n= ?"},
    {"role": "assistant", "content": "calc(12*3)"},
    {"role": "tool", "content": "36"},
    {"role": "assistant", "content": "36"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder / "model", TinyModelConfig(**SMALL))
    return AutoTokenizer.from_pretrained(folder / "model")


def test_tiny_model_command_writes_loadable_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "model"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert rlrun(["tiny-model", str(folder), *words]) == exit_codes.OK
    assert capsys.readouterr().out == f"{folder}: tiny model of width 32, 1 layers\n"
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32


def test_tokenizer_restores_printable_text(tokenizer: Any) -> None:
    text = "".join(chr(code) for code in range(32, 127)) + "\n\n  a"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_longer_conversation_extends_tokens_of_shorter_one(tokenizer: Any) -> None:
    def ids(messages: list[dict[str, str]], prompt: bool) -> list[int]:
        encoded: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
        return encoded

    whole = ids(CONVERSATION, False)
    for turn, message in enumerate(CONVERSATION):
        if message["role"] == "assistant":
            prompt = ids(CONVERSATION[:turn], True)
            assert whole[: len(prompt)] == prompt
            assert whole[len(prompt) :][len(message["content"])] == tokenizer.eos_token_id


def test_only_replies_and_their_ends_carry_loss() -> None:
    tokenizer = make_tokenizer()
    ids, labels = encode_demonstration(tokenizer, CONVERSATION)
    assert ids == tokenizer.apply_chat_template(CONVERSATION)["input_ids"]
    learned = [label for label in labels if label >= 0]
    assert tokenizer.decode(learned) == "calc(12*3)<eos>36<eos>"
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))


def test_equal_configuration_gives_equal_files(tmp_path: Path) -> None:
    config = TinyModelConfig(**SMALL, warmup_environment="reverse-text", warmup_args={"length": 3})
    for name in ("one", "two"):
        make_tiny_model(tmp_path / name, config)
    file = tmp_path / "demonstrations.json"
    write_demonstrations(
        file, collect_demonstrations("reverse-text", {"length": 3}, config.warmup_steps * WARMUP_BATCH)
    )
    not_loaded = config.model_copy(update={"warmup_environment": "not_installed:make"})
    make_tiny_model(tmp_path / "from-file", not_loaded, demonstrations=file)
    make_tiny_model(tmp_path / "other", config.model_copy(update={"seed": 1}))
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        for other in ("two", "from-file"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / other / name).read_bytes(), (other, name)
    weights = "model.safetensors"
    assert (tmp_path / "one" / weights).read_bytes() != (tmp_path / "other" / weights).read_bytes()


def test_default_tiny_model_has_about_million_parameters(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", TinyModelConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1.5e6


def demonstrated_probability(folder: Path) -> float:
    """Return the mean probability of held-out `reverse-text` demonstrations of three letters under a model."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), make_tokenizer()
    environment = ReverseText(ReverseTextArgs(length=3))
    found = []
    for task in (environment.tasks("eval")[i] for i in range(64)):
        ids, labels = encode_demonstration(tokenizer, [*task.prompt, *environment.demonstration(task)])
        with torch.no_grad():
            probabilities = model(torch.tensor([ids])).logits[0].softmax(-1)
        found += [float(probabilities[j - 1, label]) for j, label in enumerate(labels) if label >= 0]
    return sum(found) / len(found)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_warm_up_reaches_the_accuracy_for_any_seed(seed: int, tmp_path: Path) -> None:
    config = TinyModelConfig(
        **SMALL | {"warmup_steps": 300},
        warmup_environment="reverse-text",
        warmup_args={"length": 3},
        warmup_accuracy=0.4,
        seed=seed,
    )
    make_tiny_model(tmp_path / "model", config)
    assert 0.33 < demonstrated_probability(tmp_path / "model") < 0.47


def test_invalid_warm_up_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"warmupEnvironment": "reverse-txt"}
    spec = RLRunSpec.model_validate({"model": {"tiny": tiny}, "environments": [{"id": "arithmetic"}]})
    (tmp_path / "private").mkdir()
    file = tmp_path / "run.json"
    file.write_text(
        resolve_spec(spec, name="x", uid="u", output_dir=str(tmp_path / "x")).model_dump_json(by_alias=False)
    )
    monkeypatch.setenv(ERROR_DIR_VARIABLE, str(tmp_path / "private"))
    assert main(["--config", str(file)]) == exit_codes.CONFIGURATION
    assert "did you mean reverse-text" in capsys.readouterr().err
    assert str(read_error(tmp_path / "private")).startswith("model.tiny: ")


def test_trainer_in_pod_runs_no_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solo: Group) -> None:
    """A trainer in a pod holds the run's key. On one machine the trainer creates the missing model."""
    spec = RLRunSpec.model_validate(
        {"model": {"tiny": SMALL | {"warmup_environment": "reverse-text"}}, "environments": [{"id": "reverse-text"}]}
    )
    config, paths = resolve_spec(spec, name="x", uid="u", output_dir=str(tmp_path)).trainer, RunPaths(tmp_path)
    monkeypatch.setenv("RLRUN_POD_NAME", "run-trainer-0")
    with pytest.raises(RoleError, match=r"model does not exist.*delete the pod run-trainer-0"):
        model_source(config, paths, solo)
    assert not paths.model.exists()
    monkeypatch.delenv("RLRUN_POD_NAME")
    assert model_source(config, paths, solo) == str(paths.model)
