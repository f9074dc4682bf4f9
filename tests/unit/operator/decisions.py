"""Typed test decisions, built from and read as lists of writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlrun_operator.state import (
    Annotate,
    Apply,
    CheckSecret,
    Create,
    Decision,
    Delete,
    Disown,
    DryRun,
    Grow,
    Manifest,
    Scale,
    in_order,
)

W = TypeVar("W")


@dataclass(frozen=True)
class TypedDecision(Decision):
    """Decision whose writes can be read by type."""

    def _writes_of(self, kind: type[W]) -> tuple[W, ...]:
        return tuple(write for write in self.writes if isinstance(write, kind))

    @property
    def grow(self) -> Grow | None:
        return next(iter(self._writes_of(Grow)), None)

    @property
    def ask(self) -> Manifest | None:
        return next((check.manifest for check in self._writes_of(CheckSecret)), None)

    @property
    def dry_run(self) -> tuple[Manifest, ...]:
        return tuple(each.manifest for each in self._writes_of(DryRun))

    @property
    def create(self) -> tuple[Manifest, ...]:
        return tuple(each.manifest for each in self._writes_of(Create))

    @property
    def apply(self) -> tuple[Apply, ...]:
        return tuple(each for each in self._writes_of(Apply) if not each.repairs)

    @property
    def repair(self) -> tuple[Apply, ...]:
        return tuple(each for each in self._writes_of(Apply) if each.repairs)

    @property
    def annotate(self) -> tuple[Annotate, ...]:
        return self._writes_of(Annotate)

    @property
    def scale(self) -> tuple[Scale, ...]:
        return self._writes_of(Scale)

    @property
    def delete(self) -> tuple[Delete, ...]:
        return self._writes_of(Delete)

    @property
    def disown(self) -> Disown | None:
        return next(iter(self._writes_of(Disown)), None)


def typed_decision(decision: Decision) -> TypedDecision:
    return TypedDecision(**vars(decision))


def scripted_decision(
    *,
    dry_run: Sequence[Manifest] = (),
    create: Sequence[Manifest] = (),
    apply: Sequence[Apply] = (),
    repair: Sequence[Apply] = (),
    ask: Manifest | None = None,
    annotate: Sequence[Annotate] = (),
    scale: Sequence[Scale] = (),
    delete: Sequence[Delete] = (),
    grow: Grow | None = None,
    disown: Disown | None = None,
    **fields: Any,
) -> Decision:
    """Return a decision with these writes, in order; `fields` are fields of the decision."""
    writes = [
        *annotate,
        *scale,
        *delete,
        *([] if grow is None else [grow]),
        *([] if disown is None else [disown]),
        *([] if ask is None else [CheckSecret(ask)]),
        *(DryRun(each) for each in dry_run),
        *(Create(each) for each in create),
        *apply,
        *(Apply(each.manifest, each.expect_absent, each.replaces, each.known, repairs=True) for each in repair),
    ]
    return Decision(writes=in_order(writes), **fields)
