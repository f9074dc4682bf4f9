"""Bounds of data's age behind the policy and of work in flight. Pure functions of counts and versions.

Group sizes and batch sizes are counted in rollouts, versions as in the architecture: step `n` trains version `n-1` into `n`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.orchestrator.types import FinishedGroup


def dispatch_capacity(
    *,
    concurrency: int,
    running: int,
    max_async_level: int,
    version: int,
    batch_size: int,
    accepted: int,
    surplus: int = 0,
) -> int:
    """Rollouts that may be dispatched now: `min(C - running, (k + version + 1)·B + S - (accepted + running))` (AReaL, Fu et al. 2025).

    Because at most `(k + v + 1)` batches' worth is ever started at version `v`, rollouts for step `n` start only at version `n-1-k`.

    Args:
        concurrency: C, most rollouts in flight.
        running: rollouts in flight.
        max_async_level: k.
        version: newest policy version that an engine holds.
        batch_size: B, rollouts per step.
        accepted: rollouts in batches and in the buffer, counted from step 1; after a resume at step `s` this is `s·B` and what was found.
        surplus: S, rollouts that are started so that the slowest need not be waited for; they are cancelled when that batch is made.
    """
    allowed = (max_async_level + version + 1) * batch_size + surplus
    return min(concurrency - running, allowed - (accepted + running))


def is_fed(step: int, *, version: int, max_async_level: int) -> bool:
    """True if the batch of `step` may be made while `version` is the newest: not more than k steps ahead of the trainer."""
    return step <= version + 1 + max_async_level


def oldest_version(step: int, max_off_policy_steps: int) -> int:
    """The oldest dispatch version that a group trained in `step` may have; negative: any."""
    return step - 1 - max_off_policy_steps


def too_old(dispatch_version: int, *, step: int, max_off_policy_steps: int) -> bool:
    """True if a group dispatched at this version can no longer be trained in `step` or any later one."""
    return dispatch_version < oldest_version(step, max_off_policy_steps)


def accepted_at_step(step: int, batch_size: int) -> int:
    """Rollouts accepted up to and including `step`: where accounting starts after a resume, and again after each batch."""
    return step * batch_size


def newest_seen(step: int, max_async_level: int) -> int:
    """The newest batch that is certain to be made when groups for `step` are dispatched: the one that trains version `step-1-k`."""
    return step - 1 - max_async_level


def split_by_age(
    groups: Sequence[FinishedGroup], *, step: int, max_off_policy_steps: int
) -> tuple[list[FinishedGroup], list[FinishedGroup]]:
    """Groups that may be trained in `step`, and those that no later step may train either."""
    usable: list[FinishedGroup] = []
    expired: list[FinishedGroup] = []
    for group in groups:
        old = too_old(group.dispatch_version, step=step, max_off_policy_steps=max_off_policy_steps)
        (expired if old else usable).append(group)
    return usable, expired
