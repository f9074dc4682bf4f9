"""Comparison of a step with what the run wrote of it: quantity by quantity. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlrun.runtime.printable import printable

Verdict = Literal["equal", "within", "different", "unknown"]
_OF_BITS = "param_checksum"
_TIMES = ("time/", "perf/")
ABSOLUTE = 1e-5
"""Differences below this are none where bits cannot be equal: next to 0 a relative one says nothing."""


@dataclass(frozen=True)
class Row:
    """One quantity."""

    step: int
    name: str
    stored: float | None
    """None: the run has written none."""
    computed: float | None
    verdict: Verdict

    @property
    def text(self) -> str:
        """Words for the table."""
        match self.verdict:
            case "equal":
                return "equal"
            case "unknown":
                return "nothing to compare with" if self.stored is None else "not comparable"
        difference = abs((self.stored or 0.0) - (self.computed or 0.0))
        return f"{'within the tolerance' if self.verdict == 'within' else 'different'}: by {difference:.3g}"


def compare_quantities(
    step: int, stored: Mapping[str, float] | None, computed: Mapping[str, float], *, tolerance: float | None
) -> list[Row]:
    """Quantities of a step, loss and gradient first.

    Args:
        step: its number.
        stored: the step's line of `metrics.jsonl`; None: there is none.
        computed: the step's metrics.
        tolerance: relative; None: bits have to be equal.
    """
    names = [name for name in computed if name != "step" and not name.startswith(_TIMES)]
    first = ("loss", "grad_norm", _OF_BITS)
    ordered = [*(name for name in first if name in names), *sorted(name for name in names if name not in first)]
    known = stored or {}
    return [_compare_quantity(step, name, known.get(name), computed[name], tolerance) for name in ordered]


def _compare_quantity(step: int, name: str, stored: object, computed: float, tolerance: float | None) -> Row:
    if isinstance(stored, bool) or not isinstance(stored, int | float):
        return Row(step, name, None, computed, "unknown")
    value = float(stored)
    if value == computed:
        return Row(step, name, value, computed, "equal")
    if tolerance is None:
        return Row(step, name, value, computed, "different")
    if name == _OF_BITS:  # numbers that differ at all have other bits
        return Row(step, name, value, computed, "unknown")
    near = abs(value - computed) <= max(ABSOLUTE, tolerance * max(abs(value), abs(computed)))
    return Row(step, name, value, computed, "within" if near else "different")


def weights_verdict(found: Mapping[str, float], *, tolerance: float | None) -> Verdict:
    """Verdict on a comparison with a checkpoint.

    Args:
        found: as `recompute.weights.count_changes` gives it.
        tolerance: absolute for values of weights and moments; None: bits have to be equal.
    """
    if found["different"] == 0:
        return "equal"
    return "within" if tolerance is not None and found["largest"] <= tolerance else "different"


def weights_text(found: Mapping[str, float], name: str) -> str:
    """One line on a comparison with a checkpoint."""
    total, different = int(found["tensors"]), int(found["different"])
    if not different:
        return f"{name}: all {total} tensors of weights and optimizer are equal, bit for bit"
    return f"{name}: {different} of {total} tensors differ, by {found['largest']:.3g} at most"


def rows_table(found: Sequence[Row]) -> list[str]:
    """Rows for a terminal."""
    lines = [(printable(r.name), _show_number(r.stored), _show_number(r.computed), r.text) for r in found]
    widths = [max(len(line[column]) for line in [("", "stored", "computed", ""), *lines]) for column in range(3)]
    head = ("", "stored", "computed", "")
    return [
        f"  {name:<{widths[0]}}  {stored:>{widths[1]}}  {computed:>{widths[2]}}  {text}".rstrip()
        for name, stored, computed, text in [head, *lines]
    ]


def _show_number(value: float | None) -> str:
    return (
        "-" if value is None else repr(int(value)) if float(value).is_integer() and abs(value) < 1e16 else repr(value)
    )
