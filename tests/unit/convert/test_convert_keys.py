"""Every key of the newest releases of verl and AReaL has its own row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import AREAL, AREAL_SFT, VERL, VERL_SFT, Dialect, canonical_key, convert_settings
from rlrun.convert.readers.hydra import Setting
from rlrun.convert.tables.row import row_of

KEYS = Path(__file__).parent / "keys"
DIALECTS = {"verl": VERL, "verl_sft": VERL_SFT, "areal": AREAL, "areal_sft": AREAL_SFT}
OPEN_NAMES = (".env_vars.*", ".config.*")
"""Mappings whose keys are chosen by the user."""


def keys(name: str) -> Iterator[str]:
    """Return the keys of a list of lines `block: key key`."""
    for line in (KEYS / f"{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            block, _, names = line.partition(":")
            yield from (f"{block}.{one}" if block else one for one in names.split())


@pytest.mark.parametrize("name", DIALECTS)
def test_release_key_has_a_row(name: str) -> None:
    dialect = DIALECTS[name]
    found = list(keys(name))
    assert len(found) > 80
    assert [key for key in found if row_of(canonical_key(key, dialect.aliases), dialect.rows) is None] == []


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_row_never_drops_whole_block(dialect: Dialect) -> None:
    """A row that drops `block.*` would also drop a key of a later release that changes the objective."""
    wide = [row.key for row in dialect.rows if row.key.endswith(".*") and row.how != "refuse"]
    assert [key for key in wide if not key.endswith(OPEN_NAMES)] == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("areal", "actor.use_icepop"),
        ("areal", "teacher.temperature"),
        ("areal", "workflow"),
        ("areal", "reward_fn"),
        ("areal", "agent.path"),
        ("areal", "rollout.on_policy_distillation"),
        ("areal", "gconfig.image_size"),
        ("areal", "critic.loss"),
        ("areal_sft", "actor.optimizer.decay_steps"),
        ("areal_sft", "actor.enable_mtp_training"),
        ("verl", "actor_rollout_ref.actor.policy_loss.new_term"),
        ("verl", "actor_rollout_ref.actor.megatron.new_loss"),
        ("verl", "actor_rollout_ref.actor.megatron.override_transformer_config.mtp_num_layers"),
        ("verl", "algorithm.rollout_correction.kpop"),
        ("verl", "actor_rollout_ref.actor.optim.new_schedule"),
        ("verl", "reward.new_reward"),
        ("verl", "actor_rollout_ref.model.mtp.enable_train"),
        ("verl", "distillation.enabled"),
        ("verl", "trainer.foo"),
        ("verl_sft", "optim.new_schedule"),
        ("verl_sft", "model.mtp.enable_train"),
    ],
)
def test_unknown_objective_key_is_refused(name: str, key: str) -> None:
    of = {"verl": "actor_rollout_ref.model.path", "verl_sft": "model.path"}.get(name, "actor.path")
    given = {of: "Qwen/Qwen3-0.6B", key: True, "train_dataset.type": "sft" if name == "areal_sft" else "rl"}
    given |= {"data.train_files": "x.parquet"} if name.startswith("verl") else {"allocation_mode": "vllm:d1+fsdp:d1"}
    if name.startswith("verl"):
        del given["train_dataset.type"]
    found = convert_settings([Setting(*item, "f") for item in given.items()], Context("run", 100), ["f"])
    assert found.dialect == DIALECTS[name].name
    assert key in [fate.setting.key for fate in found.refused]
