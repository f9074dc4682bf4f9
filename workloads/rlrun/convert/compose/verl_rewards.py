"""Scales of verl's rewards by `data_source`, and the consequences for penalties and advantages."""

from __future__ import annotations

import re

from rlrun.convert.compose.shared import file_list
from rlrun.convert.draft import Draft

_SIGNED = re.compile(r"(?i)(?<![a-z])(dapo|aime)")
"""File names of data whose rows have the `data_source` math_dapo or aime..."""
_OVERLONG = "reward_model.overlong_buffer."
_INVARIANT = ("grpo", "reinforce_pp")
"""Advantages that are divided by a standard deviation of the rewards, so that a scale does not matter."""


def is_signed(draft: Draft) -> bool:
    """Return whether verl's rewards are -1 and 1 for rows whose rewards in the environment `dataset` are 0 and 1."""
    own = draft.has("custom_reward_function.path") or draft.flag("reward_model.enable")
    files = file_list(draft.get("data.train_files"))
    return not own and any(_SIGNED.search(file.rpartition("/")[2]) for file in files)


def put_overlong_penalty(draft: Draft) -> None:
    """Set the penalty of long answers, on the scale of RLRun's rewards."""
    enabled, length, factor = (_OVERLONG + name for name in ("enable", "len", "penalty_factor"))
    if not draft.flag(enabled):
        return
    answer = draft.fields["sampling.maxTokens"].value
    share = min(1.0, (draft.whole(length) or answer // 5) / answer)
    penalty = draft.number(factor)
    note = ""
    if is_signed(draft) and penalty is not None:
        penalty, note = penalty / 2, "half: these rows have rewards 0 and 1 in RLRun, -1 and 1 in verl"
        draft.notices.append(
            f"{factor}={draft.number(factor):g}: {penalty:g} in RLRun, because rows with data_source math_dapo and aime... have "
            "rewards -1 and 1 in verl, but 0 and 1 with args.reward: math"
        )
    elif not draft.has("custom_reward_function.path"):
        draft.notices.append(
            f"{factor}={penalty:g}: if data_source of the rows is math_dapo or aime..., verl's rewards are -1 and 1, and the "
            f"same penalty is algorithm.filters.overlongPenalty: {(penalty or 0.0) / 2:g}"
        )
    draft.put("algorithm.filters.overlongPenalty", penalty, enabled, factor, note=note)
    draft.put("algorithm.filters.overlongBuffer", round(share, 6), length, note=f"share of {answer} tokens")


def note_scores(draft: Draft) -> None:
    """Add a notice if verl's own scores differ from the reward `math`."""
    if draft.has("custom_reward_function.path") or draft.flag("reward_model.enable"):
        return
    draft.notices.append(
        "rewards: verl chooses a score by data_source of each row; RLRun compares all rows as mathematics: "
        "args.reward_by_source of the environment selects others (docs/environments.md)"
    )
    advantage = draft.fields.get("algorithm.advantage")
    options = advantage.value.get("options", {}) if advantage is not None else {}
    name = advantage.value["name"] if advantage is not None else draft.fields["algorithm.preset"].value
    if is_signed(draft) and (not str(name).startswith(("dapo", *_INVARIANT)) or options.get("std") == "none"):
        draft.notices.append(
            "rewards: rows with data_source math_dapo and aime... have rewards -1 and 1 in verl, 0 and 1 in RLRun: advantages are "
            "half as large, which matters with a KL term, an entropy bonus or gradient clipping"
        )
    metric = "algorithm.filter_groups.metric"
    if (
        draft.flag("algorithm.filter_groups.enable")
        and draft.flag(_OVERLONG + "enable")
        and draft.get(metric) in ("seq_reward", "seq_final_reward", "score")
    ):
        draft.notices.append(
            f"{metric}={draft.get(metric)}: RLRun compares groups by the environment's rewards, before the penalty of long answers"
        )
