"""Muon of verl and AReaL, whose updates have several scales and variants; `trainer.optimizer` implements one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlrun.convert.draft import Draft

_NAME = "trainer.optimizer.name"
_SCALE = 0.2
"""Factor of `sqrt(max(m, n))` in the update of an m x n matrix (Liu et al. 2025, arXiv:2502.16982)."""


@dataclass(frozen=True)
class MuonKeys:
    """Names and defaults of one trainer's Muon options."""

    block: str
    """Prefix of the keys."""
    optimizers: tuple[str, ...]
    """Keys that name the optimizer; the first one in the settings is used."""
    momentum: str
    fixed: Mapping[str, tuple[object, object]]
    """Options that RLRun does not have: (default in the other trainer, RLRun's fixed value)."""


VERL_FIXED: Mapping[str, tuple[object, object]] = {
    "muon_nesterov": (False, True),
    "muon_scale_mode": ("spectral", "spectral"),
    "muon_num_ns_steps": (5, 5),
    "muon_split_qkv": (True, True),
}
AREAL_FIXED: Mapping[str, tuple[object, object]] = {
    "muon_use_nesterov": (True, True),
    "muon_scale_mode": ("rms", "rms"),
    "muon_num_ns_steps": (5, 5),
}


def verl_muon(block: str) -> MuonKeys:
    """Return verl's keys below `block`, which ends with a dot."""
    return MuonKeys(block, ("optimizer", "name"), "muon_momentum", VERL_FIXED)


AREAL_MUON = MuonKeys("actor.optimizer.", ("type",), "muon_momentum", AREAL_FIXED)


def put_muon(draft: Draft, keys: MuonKeys) -> None:
    """Set the momentum of Muon, and refuse options whose updates differ from RLRun's."""
    name = draft.fields.get(_NAME)
    if name is None or name.value != "muon":
        return
    momentum = keys.block + keys.momentum
    if (value := draft.number(momentum)) is not None:
        draft.put("trainer.optimizer.momentum", value, momentum)
    wrong = [
        (key, theirs, ours)
        for key, (default, ours) in keys.fixed.items()
        if (theirs := _muon_value(draft, keys.block + key, default)) != ours
    ]
    if keys.fixed is VERL_FIXED:
        wrong += _update_scale(draft, keys.block)
        _note_coefficients(draft, keys.block)
    wrong += _second_rate(draft, keys.block)
    if wrong:
        _refuse_muon(draft, keys, wrong)


def _muon_value(draft: Draft, key: str, default: object) -> object:
    found = draft.get(key)
    return default if found is None else found


def _update_scale(draft: Draft, block: str) -> list[tuple[str, object, object]]:
    """Return the scale of verl's updates if it differs from RLRun's."""
    if draft.flag(block + "muon_match_adamw_update_rms"):
        betas = draft.get(block + "betas")
        first = float(betas[0]) if isinstance(betas, list) and betas else 0.9
        scale = math.sqrt((1 - first) / (1 + first))
    else:
        scale = draft.number(block + "muon_extra_scale_factor") or 1.0
    return [] if math.isclose(scale, _SCALE) else [("muon_extra_scale_factor", round(scale, 4), _SCALE)]


def _second_rate(draft: Draft, block: str) -> list[tuple[str, object, object]]:
    """Return AReaL's separate learning rate for vectors (AdamW) if it differs from Muon's."""
    own, rate = draft.number(block + "muon_backend_lr"), draft.number(block + "lr")
    return [] if own is None or own == rate else [("muon_backend_lr", own, rate)]


def _note_coefficients(draft: Draft, block: str) -> None:
    kind = _muon_value(draft, block + "muon_coefficient_type", "quintic")
    if kind != "simple":
        draft.notices.append(
            f"{block}muon_coefficient_type={kind}: RLRun orthogonalizes matrices with the coefficients of `simple`"
        )


def _refuse_muon(draft: Draft, keys: MuonKeys, wrong: list[tuple[str, object, object]]) -> None:
    """Refuse the optimizer, with the values that match RLRun's."""
    written = next((keys.block + key for key in keys.optimizers if draft.has(keys.block + key)), keys.block)
    theirs = ", ".join(f"{key} is {_show_value(value)}, in RLRun {_show_value(ours)}" for key, value, ours in wrong)
    fix = " ".join(f"{keys.block}{key}={_show_value(ours)}" for key, _, ours in wrong)
    if any(key == "muon_extra_scale_factor" for key, *_ in wrong) and draft.has(
        keys.block + "muon_match_adamw_update_rms"
    ):
        fix += f" {keys.block}muon_match_adamw_update_rms=false"
    draft.refused[written] = (
        f"Muon with different updates: {theirs}; choose a learning rate for RLRun's values, and add {fix}"
    )


def _show_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
