"""Scales of verl's rewards: its own scores by `data_source`, and what follows for penalties and advantages."""

from __future__ import annotations

import re

from rlrun.convert.compose.shared import file_list
from rlrun.convert.draft import Draft

_SIGNED = re.compile(r"(?i)(?<![a-z])(dapo|aime)")
"""Files whose rows have the `data_source` math_dapo or aime..., in their names."""
_OVERLONG = "reward_model.overlong_buffer."
_INVARIANT = ("grpo", "reinforce_pp")
"""Advantages that are divided by a standard deviation of the rewards, so that a scale does not matter."""


def is_signed(draft: Draft) -> bool:
    """Return true if verl's rewards are -1 and 1 where those of environment `dataset` are 0 and 1."""
    own = draft.has("custom_reward_function.path") or draft.flag("reward_model.enable")
    files = file_list(draft.get("data.train_files"))
    return not own and any(_SIGNED.search(file.rpartition("/")[2]) for file in files)


def put_overlong_penalty(draft: Draft) -> None:
    """Set the penalty of long answers, on the scale of the rewards here."""
    enabled, length, factor = (_OVERLONG + name for name in ("enable", "len", "penalty_factor"))
    if not draft.flag(enabled):
        return
    answer = draft.fields["sampling.maxTokens"].value
    share = min(1.0, (draft.whole(length) or answer // 5) / answer)
    penalty = draft.number(factor)
    note = ""
    if is_signed(draft) and penalty is not None:
        penalty, note = penalty / 2, "half: rewards are 0 and 1 here, -1 and 1 for these rows in verl"
        draft.notices.append(
            f"{factor}={draft.number(factor):g}: {penalty:g} here, because verl's rewards of rows with data_source math_dapo "
            "and aime... are -1 and 1, those of args.reward: math 0 and 1"
        )
    elif not draft.has("custom_reward_function.path"):
        draft.notices.append(
            f"{factor}={penalty:g}: if data_source of the rows is math_dapo or aime..., verl's rewards are -1 and 1, and the "
            f"same penalty is algorithm.filters.overlongPenalty: {(penalty or 0.0) / 2:g}"
        )
    draft.put("algorithm.filters.overlongPenalty", penalty, enabled, factor, note=note)
    draft.put("algorithm.filters.overlongBuffer", round(share, 6), length, note=f"share of {answer} tokens")


def note_scores(draft: Draft) -> None:
    """Note where verl's own scores are other ones than those of the reward `math`."""
    if draft.has("custom_reward_function.path") or draft.flag("reward_model.enable"):
        return
    draft.notices.append(
        "rewards: verl chooses its own score by data_source of each row; all rows are compared as mathematics here: "
        "args.reward_by_source of the environment names others (docs/environments.md)"
    )
    advantage = draft.fields.get("algorithm.advantage")
    options = advantage.value.get("options", {}) if advantage is not None else {}
    name = advantage.value["name"] if advantage is not None else draft.fields["algorithm.preset"].value
    if is_signed(draft) and (not str(name).startswith(("dapo", *_INVARIANT)) or options.get("std") == "none"):
        draft.notices.append(
            "rewards: verl's are -1 and 1 for rows with data_source math_dapo and aime..., 0 and 1 here: advantages are half as "
            "large, which matters beside a KL term, an entropy bonus or the clipping of gradients"
        )
    metric = "algorithm.filter_groups.metric"
    if (
        draft.flag("algorithm.filter_groups.enable")
        and draft.flag(_OVERLONG + "enable")
        and draft.get(metric) in ("seq_reward", "seq_final_reward", "score")
    ):
        draft.notices.append(
            f"{metric}={draft.get(metric)}: groups are compared by the environment's rewards here, before the penalty of long answers"
        )
