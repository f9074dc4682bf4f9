"""Programs of verl whose settings are converted. Other programs have the same keys, but Python code that can change the training."""

from __future__ import annotations

import re
from collections.abc import Sequence

PROGRAMS = frozenset(
    {
        "verl.trainer.main_ppo",
        "verl.trainer.main_ppo_sync",
        "verl.trainer.sft_trainer",
        "verl.trainer.sft_trainer_ray",
        "verl.trainer.fsdp_sft_trainer",
        "verl.experimental.fully_async_policy.fully_async_main",
        "verl.experimental.one_step_off_policy.main_ppo",
        "recipe.dapo.main_dapo",
        "recipe.dapo.src.main_dapo",
        "recipe.fully_async_policy.fully_async_main",
        "recipe.one_step_off_policy.main_ppo",
        "recipe.one_step_off_policy.async_main_ppo",
    }
)
CONFIGURATIONS = frozenset(
    {
        "ppo_trainer",
        "ppo_megatron_trainer",
        "dapo_trainer",
        "dapo_megatron_trainer",
        "sft_trainer",
        "sft_trainer_engine",
        "fully_async_ppo_trainer",
        "fully_async_ppo_megatron_trainer",
        "one_step_off_ppo_trainer",
        "one_step_off_ppo_megatron_trainer",
    }
)
"""Hydra files of these programs, which contain verl's defaults."""
_FILE = re.compile(r"(?:\./)?((?:verl|recipe)/[\w/.-]+)\.py")


def unknown_program(module: str, texts: Sequence[str]) -> str | None:
    """Return the program of verl that a command starts if it is not supported, otherwise None.

    Args:
        module: module of `python -m`, or the program.
        texts: all words of the command.
    """
    name = program_name(module, texts)
    return name if name.startswith(("verl.", "recipe.")) and name not in PROGRAMS else None


def program_name(module: str, texts: Sequence[str]) -> str:
    """Return the dotted name of the verl module that a command starts, or an empty text.

    Args:
        module: module of `python -m`, or the program.
        texts: all words of the command.
    """
    files = (_FILE.fullmatch(text) for text in texts)
    return module if "." in module else next((found[1].replace("/", ".") for found in files if found), "")
