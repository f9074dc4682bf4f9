"""Sampling of rollouts: seeds that survive a restart, stop texts, and arguments of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from orch_simulation import FakeEngine, make_config, simulate

from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator.main import load_chat
from rlrun.orchestrator.rollouts.engine_session import derived_seed
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.tiny_model import make_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '' if enable_thinking else 'q' }}{% endif %}"
)


@dataclass
class Listening(FakeEngine):
    """Engine that records its requests."""

    asked: list[tuple[tuple[int, ...], int, dict[str, Any]]] = field(default_factory=list)
    """Prompt, continuations, and sampling parameters."""

    async def generate(self, token_ids: Sequence[int], *, n: int, **more: Any) -> list[Completion]:  # type: ignore[override]
        self.asked.append((tuple(token_ids), n, dict(more["parameters"])))
        return await super().generate(token_ids, n=n, **more)


async def test_each_rollout_keeps_its_seed_after_restart(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = make_config(tmp_path, tokenizer_folder, max_steps=4, sampling={"max_tokens": 8, "seed": 5})
    killed, resumed = Listening(), Listening()
    await simulate(config, engines=[killed], until=lambda trainer: len(trainer.batches) >= 2)
    assert (await simulate(config, engines=[resumed], number=2)).code == exit_codes.OK
    members = {derived_seed(5, group, member, 0): (group, member) for group in range(64) for member in range(2)}
    assert len(members) == 128
    prompts: dict[int, tuple[int, ...]] = {}
    for engine in (killed, resumed):
        assert {n for _, n, _ in engine.asked} == {1}, "which members are missing must not matter"
        played = {members[own["seed"]] for _, _, own in engine.asked}
        assert {member for _, member in played} == {0, 1}
        for prompt, _, own in engine.asked:
            group, _ = members[own["seed"]]
            assert prompts.setdefault(group, prompt) == prompt, "another attempt gives a group's seeds to another task"
    assert len(set(prompts.values())) > 8


async def test_stop_texts_end_replies_and_trained_tokens(tmp_path: Path, tokenizer_folder: Path) -> None:
    tokenizer = make_tokenizer()
    engine = Listening()
    letter = tokenizer.decode([engine.letters[0]])
    config = make_config(tmp_path, tokenizer_folder, max_steps=2, sampling={"max_tokens": 8, "stop": [letter]})
    outcome = await simulate(config, engines=[engine])
    assert {tuple(own["stop"]) for _, _, own in engine.asked} == {(letter,)}
    assert all("seed" not in own for _, _, own in engine.asked)
    ended = 0
    for sample in [sample for batch in outcome.trainer.batches for sample in batch.samples]:
        tokens = sample.input_ids[sample.loss_mask].tolist()
        if engine.letters[0] in tokens:
            ended += 1
            assert tokens.index(engine.letters[0]) == len(tokens) - 1
    assert ended


async def test_environment_uses_own_chat_template_arguments(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    thinks = {"max_tokens": 8, "chat_template_arguments": {"enable_thinking": True}}
    environments: list[dict[str, Any]] = [
        {"id": "reverse-text", "group_size": 2},
        {"id": "reverse-text", "name": "thinks", "group_size": 2, "sampling": thinks},
    ]
    engine = Listening()
    evaluation = {"interval": 9, "num_tasks": 2, "sampling": {"chat_template_arguments": {"enable_thinking": True}}}
    config = make_config(tmp_path, tmp_path / "model", max_steps=2, environments=environments, evaluation=evaluation)
    outcome = await simulate(config, engines=[engine])
    written = {
        sample.environment: tokenizer.decode(sample.input_ids[~sample.loss_mask].tolist())
        for batch in outcome.trainer.batches
        for sample in batch.samples
    }
    assert written["reverse-text"].endswith("<assistant>q")
    assert written["thinks"].endswith("<assistant>")
    assert all(not own for _, _, own in engine.asked), "they are no parameters of the engine"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"sampling": {"chat_template_arguments": {"enable_thinkin": True}}}, r"environments\[0\].sampling"),
        ({"evaluation": {"sampling": {"chat_template_arguments": {"enable_thinkin": True}}}}, "evaluation.sampling"),
    ],
)
def test_unused_chat_template_argument_is_refused(tmp_path: Path, changes: dict[str, Any], place: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    told = rf"{place}.chatTemplateArguments: the model's chat template has no argument enable_thinkin; remove it"
    with pytest.raises(RoleError, match=told) as refused:
        load_chat(make_config(tmp_path, tmp_path, **changes))
    assert refused.value.code == exit_codes.CONFIGURATION
