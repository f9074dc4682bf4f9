"""Maker of the model folder of a stub run: `python -m tests.support.stub.model --config run.json`. It has the tiny
model's tokenizer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlrun.config.models.language_models import TinyModelConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.failures import RoleError, storage_errors, write_error
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.modeling.character_tokenizer import CHARACTERS, CHAT_TEMPLATE, SPECIAL_TOKENS, character_tokenizer
from rlrun.trainer.ranks.launch import read_config
from tests.support.stub.policy import Policy, write_model
from tests.support.stub.script import PolicyScript, load_script


def tokenizer_files() -> dict[str, bytes]:
    """Return the tokenizer's files as transformers writes them."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    config: dict[str, Any] = {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": list(SPECIAL_TOKENS[4:]),
    }
    config |= {f"{token[1:-1]}_token": token for token in SPECIAL_TOKENS[:4]}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
    }


def make_model(folder: Path, tiny: TinyModelConfig, script: PolicyScript) -> None:
    """Write the model to `folder`, durably and completely. The same configuration gives the same bytes."""
    config = {
        "architectures": ["RlrunStub"],
        "model_type": "llama",
        "vocab_size": len(SPECIAL_TOKENS) + len(CHARACTERS),
        "hidden_size": tiny.hidden_size,
        "num_hidden_layers": tiny.layers,
        "max_position_embeddings": tiny.max_length,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    files = tokenizer_files() | {"config.json": json.dumps(config, indent=2).encode()}
    write_model(folder, Policy(0, script.first), files, complete=False)


def ensure_model(config: TrainerConfig, script: PolicyScript) -> Path:
    """Return the folder of the run's model; make a tiny model at the first call.

    Raises:
        RoleError: the volume refuses to write.
    """
    paths, model = RunPaths(Path(config.output_dir)), config.model
    if model.tiny is not None and not (paths.model / "config.json").exists():
        with storage_errors(paths.root, "make the tiny model"):
            make_model(paths.model, model.tiny, script)
    return Path(model.source(paths.model))


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model of the run; return the exit code."""
    parser = argparse.ArgumentParser(prog="tiny_model", description="Create the tiny model of a run.")
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved configuration, run.json")
    options = parser.parse_args(argv)
    try:
        config = read_config(options.config)
        ensure_model(config, load_script(Path(config.output_dir)).policy)
    except RoleError as error:
        print(f"tiny_model: {error}", file=sys.stderr)
        write_error(None, "trainer", error)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
