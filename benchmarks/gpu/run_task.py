"""Model and task of the complete run: a Qwen3 model with one token per character, and rewards that are dense from the start.

The prompt names a class of characters (digit, upper, lower), and the reward is the share of the sampled tokens in it. A
random model samples each class with its share of the vocabulary, but its hidden states hardly depend on the prompt: rewards
do not rise within 25 steps. So the model first learns some steps from random replies with more characters of the class.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrun.environments.protocol import Episode, Score, SingleTurnEnvironment, Split, Task
from rlrun.trainer.modeling.character_tokenizer import CHARACTERS, CHAT_TEMPLATE, SPECIAL_TOKENS

ENVIRONMENT = "benchmarks.gpu.run_task:character_class"
CLASSES = {"digit": "Nd", "upper": "Lu", "lower": "Ll"}
"""Unicode category of each class."""
_SHARES = {"Nd": 0.2, "Lu": 0.33, "Ll": 0.33}
"""Largest share of the vocabulary of a category; other letters fill the rest."""
_BASIC_PLANES = 0x20000


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `vocabulary` includes the special tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int


def vocabulary_characters(size: int) -> list[str]:
    """Return different characters: those of the tiny model first, then digits and letters of other scripts.

    Raises:
        ValueError: the size is smaller than the first part.
    """
    chosen = list(CHARACTERS)
    if size < len(chosen):
        raise ValueError(f"vocabulary: {size} characters are too few; use at least {len(chosen)}")
    room = {category: int(share * size) for category, share in _SHARES.items()}
    for category in map(unicodedata.category, chosen):
        room[category] = room.get(category, 0) - 1
    others: list[str] = []
    for character in _other_characters():
        category = unicodedata.category(character)
        if category == "Lo":
            others.append(character)
        elif room[category] > 0 and len(chosen) < size:
            room[category] -= 1
            chosen.append(character)
    return [*chosen, *others[: size - len(chosen)]]


def _other_characters() -> Iterator[str]:
    for code in range(0xA1, _BASIC_PLANES):
        character = chr(code)
        # A composed form could be split by a normalizer, and would then be two tokens.
        if (
            unicodedata.category(character) in (*_SHARES, "Lo")
            and unicodedata.normalize("NFKC", character) == character
        ):
            yield character


def make_tokenizer(size: int) -> Any:
    """Return a `PreTrainedTokenizerFast` with `size` tokens, one per character, and the tiny model's chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = (*SPECIAL_TOKENS, *vocabulary_characters(size - len(SPECIAL_TOKENS)))
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=list(SPECIAL_TOKENS[4:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@dataclass(frozen=True)
class WarmUp:
    """Supervised steps before the run, so that hidden states depend on the prompt's class."""

    steps: int
    lr: float
    """Learning rate of AdamW."""
    share: float = 0.15
    """Probability that a token of a reply is drawn from the class, not from the whole vocabulary."""
    replies: int = 96
    """Replies of a step."""
    tokens: int = 32
    """Tokens of a reply."""


def make_model(
    folder: Path,
    shape: Shape,
    *,
    dtype: str,
    seed: int,
    sharpen: float = 1.0,
    warm_up: WarmUp | None = None,
    device: str = "cpu",
) -> list[float]:
    """Write a model with its tokenizer, and return the losses of its warm-up (nats per token).

    Args:
        folder: new folder of the model.
        shape: sizes of the model.
        dtype: dtype of the weights, such as "bfloat16".
        seed: seed of the random weights, and of the replies of the warm-up.
        sharpen: factor of all logits. The last norm is scaled, because the head is tied to the embedding.
        warm_up: supervised steps. None: the weights stay random.
        device: device of the warm-up.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    tokenizer = make_tokenizer(shape.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        losses = [] if warm_up is None else train_supervised(model.to(device), tokenizer, warm_up)
    with torch.no_grad():
        model.model.norm.weight.mul_(sharpen)
    model.to("cpu", getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses


def train_supervised(model: Any, tokenizer: Any, warm_up: WarmUp) -> list[float]:
    """Train a model on random replies, and return the loss of each step (nats per token).

    Args:
        model: model in float32, on its device.
        tokenizer: tokenizer of `make_tokenizer`.
        warm_up: steps. Random numbers are those of torch's CPU generator.
    """
    import torch

    names = tokenizer.convert_ids_to_tokens(range(len(SPECIAL_TOKENS), len(tokenizer)))
    first = len(SPECIAL_TOKENS)
    members = {
        name: torch.tensor([first + i for i, token in enumerate(names) if unicodedata.category(token) == category])
        for name, category in CLASSES.items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_up.lr, betas=(0.9, 0.95), weight_decay=0.0)
    count, losses = warm_up.replies // len(CLASSES), []
    for step in range(warm_up.steps):
        # All numbers of a step have as many digits, so that all rows have one length. The class names have five letters each.
        low = (0, 10, 100, 1000)[step % 4]
        rows = []
        for name, members_of_class in members.items():
            for number in torch.randint(low, 2000 if low == 1000 else max(10, 10 * low), (count,)).tolist():
                message = [{"role": "user", "content": f"{name} {number}"}]
                prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
                own = members_of_class[torch.randint(len(members_of_class), (warm_up.tokens,))]
                other = torch.randint(first, len(tokenizer), (warm_up.tokens,))
                reply = torch.where(torch.rand(warm_up.tokens) < warm_up.share, own, other)
                rows.append(torch.cat([torch.tensor(prompt), reply]))
        ids = torch.stack(rows).to(model.device)
        logits = model(ids).logits[:, -warm_up.tokens - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, -warm_up.tokens :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class CharacterClass(SingleTurnEnvironment):
    """Write characters of the named class; the reward is their share of all `tokens` that the model may sample.

    Args:
        tokens: number of tokens of a full reply, so that a short reply has less reward.
        num_tasks: number of tasks of each split.
    """

    id = ENVIRONMENT

    def __init__(self, tokens: int, num_tasks: int) -> None:
        if tokens < 1 or num_tasks < 1:
            raise ValueError(f"tokens ({tokens}) and num_tasks ({num_tasks}) must be at least 1; use 32 and 1000")
        self._tokens, self._num_tasks = tokens, num_tasks

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks; those of training have even numbers, those of evaluation odd ones."""
        names = list(CLASSES)
        numbers = range(int(split == "eval"), 2 * self._num_tasks, 2)
        return [
            Task(f"{split}-{number}", [{"role": "user", "content": f"{names[index % 3]} {number}"}], names[index % 3])
            for index, number in enumerate(numbers)
        ]

    async def score(self, task: Task, episode: Episode) -> Score:
        """Return the share of the tokens in the class of the task."""
        category = CLASSES[task.answer or ""]
        right = sum(unicodedata.category(character) == category for character in episode.last_reply)
        return Score(reward=right / self._tokens, metrics={"characters": float(len(episode.last_reply))})


def character_class(tokens: int = 32, num_tasks: int = 1000) -> CharacterClass:
    """Return the environment; the function that a run's `environments` name."""
    return CharacterClass(tokens, num_tasks)
