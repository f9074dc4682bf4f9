"""Tiny Hugging Face Llama with about a million parameters and a character tokenizer, created in seconds for tests and first runs.

An optional supervised warm-up on an environment's demonstrations gives RL some successes to reinforce.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rlrun.config.models.language_models import TinyModelConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.diagnostics import heap
from rlrun.environments.demonstrations import (
    WARMUP_BATCH,
    collect_demonstrations,
    read_demonstrations,
)
from rlrun.protocol.files.durable import new_folder
from rlrun.protocol.files.failures import RoleError, storage_errors, write_error
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import DEMONSTRATIONS_VARIABLE
from rlrun.trainer.modeling.character_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, character_tokenizer

WARMUP_LR = 9e-4
WARMUP_DECAY = 0.25
"""Last fraction of the steps in which the learning rate falls to 0, so that the result depends less on the seed."""
_IGNORED = -100


def make_tokenizer() -> Any:
    """Create a `PreTrainedTokenizerFast` with one token per character and per role."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=character_tokenizer(),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=list(SPECIAL_TOKENS[4:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(folder: Path, config: TinyModelConfig, *, demonstrations: Path | None = None) -> None:
    """Create the model in `folder`, durable and complete. The same configuration results in the same bytes.

    Args:
        folder: folder of the model.
        config: options of the model.
        demonstrations: file with the conversations of the warm-up. Default: load the warm-up environment here.

    Raises:
        ValueError: the warm-up environment has no demonstrations, or their file is invalid.
        rlrun.environments.registry.EnvironmentLoadError: the environment does not exist, or its arguments are invalid.
    """
    with heap.without_collector():
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = make_tokenizer()
    architecture = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=max(config.hidden_size // 32, 2),
        num_key_value_heads=max(config.hidden_size // 64, 1),
        max_position_embeddings=config.max_length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums must not depend on the number of threads
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = LlamaForCausalLM(architecture)
            if config.warmup_environment is not None:
                _warm_up(model, tokenizer, config, _warmup_conversations(config, demonstrations))
    finally:
        torch.set_num_threads(threads)
    with new_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def _warmup_conversations(config: TinyModelConfig, file: Path | None) -> list[list[dict[str, Any]]]:
    if file is not None:
        return read_demonstrations(file)
    return collect_demonstrations(
        config.warmup_environment or "", config.warmup_args, config.warmup_steps * WARMUP_BATCH
    )


def _warm_up(model: Any, tokenizer: Any, config: TinyModelConfig, known: Sequence[list[dict[str, Any]]]) -> None:
    """Run supervised steps on the demonstrations, repeated cyclically."""
    wanted = config.warmup_steps * WARMUP_BATCH
    if wanted and not known:
        raise ValueError(f"model.tiny.warmupEnvironment {config.warmup_environment} has no tasks to learn from")
    conversations = [known[number % len(known)] for number in range(wanted)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARMUP_LR, weight_decay=0.0)
    for start in range(0, wanted, WARMUP_BATCH):
        left = (wanted - start) / wanted
        for parameters in optimizer.param_groups:
            parameters["lr"] = WARMUP_LR * min(1.0, left / WARMUP_DECAY)
        encoded = [
            encode_demonstration(tokenizer, messages) for messages in conversations[start : start + WARMUP_BATCH]
        ]
        ids, labels = _pad_sequences(encoded)
        logits = model(input_ids=ids).logits
        wanted_tokens = labels[:, 1:].flatten()
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), wanted_tokens, ignore_index=_IGNORED, reduction="none")
        losses = losses[wanted_tokens != _IGNORED]
        if config.warmup_accuracy is not None and float((-losses.detach()).exp().mean()) >= config.warmup_accuracy:
            return
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def encode_demonstration(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and labels for the assistant's characters and `<eos>`, -100 elsewhere."""
    ids: list[int] = tokenizer(render_template(messages), add_special_tokens=False).input_ids
    labels = [_IGNORED] * len(ids)
    assistant, eos = SPECIAL_TOKENS.index("<assistant>"), SPECIAL_TOKENS.index("<eos>")
    speaking = False
    for position, token in enumerate(ids):
        if speaking:
            labels[position] = token
        speaking = token == assistant or (speaking and token != eos)
    return ids, labels


def render_template(messages: Sequence[dict[str, Any]]) -> str:
    """Render the chat template without a template engine."""
    ends = {"assistant": "<eos>"}
    return "<bos>" + "".join(f"<{m['role']}>{m['content']}{ends.get(m['role'], '')}" for m in messages)


def _pad_sequences(encoded: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    longest = max(len(ids) for ids, _ in encoded)
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in encoded])
    labels = torch.tensor([marks + [_IGNORED] * (longest - len(marks)) for _, marks in encoded])
    return ids, labels


def main(argv: Sequence[str] | None = None) -> int:
    """Create the tiny model of a run and return the exit code: `python -m rlrun.trainer.modeling.tiny_model --config run.json`."""
    parser = argparse.ArgumentParser(prog="tiny_model", description="Create the tiny model of a run.")
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved configuration, run.json")
    options = parser.parse_args(argv)
    config = RunConfig.model_validate_json(options.config.read_text()).trainer
    if config.model.tiny is None:
        return exit_codes.OK
    folder = RunPaths(Path(config.output_dir)).model
    try:
        with storage_errors(folder, "make the tiny model"):
            file = os.environ.get(DEMONSTRATIONS_VARIABLE)
            make_tiny_model(folder, config.model.tiny, demonstrations=None if file is None else Path(file))
    except (RoleError, ValueError) as error:
        failure = error if isinstance(error, RoleError) else RoleError(f"model.tiny: {error}", exit_codes.CONFIGURATION)
        print(f"tiny_model: {failure}", file=sys.stderr)
        write_error(None, "trainer", failure)
        return failure.code
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
