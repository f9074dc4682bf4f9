"""Tokenizer of the orchestrator: equal to AutoTokenizer's, without torch for a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens, load_tokenizer
from rlrun.trainer.modeling.tiny_model import make_tokenizer

MESSAGES = [{"role": "system", "content": "Reverse it."}, {"role": "user", "content": "<ab cd> 12\n~"}]
CONFIG = {"model_type": "llama"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write tokenizer and configuration of a tiny model, like the trainer."""
    make_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_loaded_tokenizer_equals_auto_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert type(ours) is type(theirs)
    text = ours.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = ours(text, add_special_tokens=False).input_ids
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    for name in ("all_special_ids", "eos_token_id", "pad_token_id", "bos_token_id", "unk_token_id", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_padded_embedding_extends_the_token_limit(folder: Path) -> None:
    chat = ChatTokens.load(folder)
    assert chat.token_limit == chat.vocabulary
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 4096}))
    assert ChatTokens.load(folder).token_limit == 4096


def test_orchestrator_of_tiny_model_does_not_import_torch(folder: Path) -> None:
    program = (
        "import sys; from rlrun.orchestrator import main; from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens; "
        f"ChatTokens.load({str(folder)!r}); print(sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a.B", None]}}),
        ("config.json", {"model_type": "deepseek_v3"}),
    ],
)
def test_tokenizer_with_custom_class_uses_auto_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, change: dict[str, object]
) -> None:
    import transformers

    asked: list[str] = []
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda source, **_: asked.append(source) or make_tokenizer()
    )
    document = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(document | change))
    load_tokenizer(folder)
    load_tokenizer("some/hub-name")
    assert asked == [str(folder), "some/hub-name"]
