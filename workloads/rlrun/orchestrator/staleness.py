"""Limits for the age of data behind the policy and for the work in flight. Pure functions of counts and versions.

Group sizes and batch sizes are numbers of rollouts. Step `n` trains version `n-1` into version `n`.
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
    """Return the number of rollouts that may start now: `min(C - running, (k + version + 1)·B + S - (accepted +
    running))` (AReaL, Fu et al. 2025).

    At version `v` at most `(k + v + 1)` batches' worth of rollouts is ever started, so rollouts for step `n` start only
    at version `n-1-k`.

    Args:
        concurrency: C, limit of rollouts in flight.
        running: number of rollouts in flight.
        max_async_level: k.
        version: newest policy version that an engine holds.
        batch_size: B, rollouts per step.
        accepted: rollouts in batches and in the buffer since step 1. After a resume at step `s` this is `s·B` plus
            the recovered rollouts.
        surplus: S, extra rollouts, so that a batch does not wait for the slowest. They are canceled when the batch
            is made.
    """
    allowed = (max_async_level + version + 1) * batch_size + surplus
    return min(concurrency - running, allowed - (accepted + running))


def is_fed(step: int, *, version: int, max_async_level: int) -> bool:
    """Return whether the batch of `step` may be made with `version` as the newest: at most k steps ahead of the
    trainer.
    """
    return step <= version + 1 + max_async_level


def oldest_version(step: int, max_off_policy_steps: int) -> int:
    """Return the oldest dispatch version of a group that `step` may train. Negative: any version."""
    return step - 1 - max_off_policy_steps


def too_old(dispatch_version: int, *, step: int, max_off_policy_steps: int) -> bool:
    """Return whether a group with this dispatch version is too old for `step` and all later steps."""
    return dispatch_version < oldest_version(step, max_off_policy_steps)


def accepted_at_step(step: int, batch_size: int) -> int:
    """Return the number of rollouts accepted up to and including `step`, from which the count continues after a resume
    and after each batch.
    """
    return step * batch_size


def newest_seen(step: int, max_async_level: int) -> int:
    """Return the newest batch that certainly exists when groups for `step` are dispatched: the batch that trains
    version `step-1-k`.
    """
    return step - 1 - max_async_level


def split_by_age(
    groups: Sequence[FinishedGroup], *, step: int, max_off_policy_steps: int
) -> tuple[list[FinishedGroup], list[FinishedGroup]]:
    """Split groups into those that `step` may train and those that are too old for this and each later step."""
    usable: list[FinishedGroup] = []
    expired: list[FinishedGroup] = []
    for group in groups:
        old = too_old(group.dispatch_version, step=step, max_off_policy_steps=max_off_policy_steps)
        (expired if old else usable).append(group)
    return usable, expired
