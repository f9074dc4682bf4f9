"""Vocabulary size of the run's model, which limits the token ids of engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlrun.orchestrator.rollouts.chat_tokens import read_vocabulary_size


@pytest.mark.parametrize(
    ("document", "size"),
    [
        ({"vocab_size": 512}, 512),
        ({"vocab_size": None, "text_config": {"vocab_size": 640}}, 640),
        ({"thinker_config": {"vocab_size": 640}}, 640),
        ({"vocab_size": 32, "text_config": {"vocab_size": 640}}, 640),
        ({"vocab_size": "512"}, None),
        ({"vocab_size": 0}, None),
        ({"vocab_size": True}, None),
        ([], None),
    ],
)
def test_vocabulary_size_is_read_from_model_configuration(tmp_path: Path, document: Any, size: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert read_vocabulary_size(tmp_path) == size
