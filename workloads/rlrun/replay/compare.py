"""Comparison of a repeated step with the values written by the run, quantity by quantity. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlrun.runtime.printable import printable

Verdict = Literal["equal", "within", "different", "unknown"]
_OF_BITS = "param_checksum"
_TIMES = ("time/", "perf/")
ABSOLUTE = 1e-5
"""Absolute differences below this are ignored if bits cannot be equal, because relative differences near 0 have no
meaning.
"""


@dataclass(frozen=True)
class Row:
    """Comparison of one quantity."""

    step: int
    name: str
    stored: float | None
    """Value written by the run, or None."""
    computed: float | None
    verdict: Verdict

    @property
    def text(self) -> str:
        """Text for the table."""
        match self.verdict:
            case "equal":
                return "equal"
            case "unknown":
                return "no stored value" if self.stored is None else "not comparable"
        difference = abs((self.stored or 0.0) - (self.computed or 0.0))
        return f"{'within the tolerance' if self.verdict == 'within' else 'different'}: by {difference:.3g}"


def compare_quantities(
    step: int, stored: Mapping[str, float] | None, computed: Mapping[str, float], *, tolerance: float | None
) -> list[Row]:
    """Compare the quantities of a step, loss and gradient first.

    Args:
        step: number of the step.
        stored: the step's line of `metrics.jsonl`, or None.
        computed: metrics of the repeated step.
        tolerance: relative tolerance. None: bits must be equal.
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
    if name == _OF_BITS:  # a checksum has no tolerance
        return Row(step, name, value, computed, "unknown")
    near = abs(value - computed) <= max(ABSOLUTE, tolerance * max(abs(value), abs(computed)))
    return Row(step, name, value, computed, "within" if near else "different")


def weights_verdict(found: Mapping[str, float], *, tolerance: float | None) -> Verdict:
    """Return the verdict of a comparison with a checkpoint.

    Args:
        found: result of `recompute.weights.count_changes`.
        tolerance: absolute tolerance for values of weights and moments. None: bits must be equal.
    """
    if found["different"] == 0:
        return "equal"
    return "within" if tolerance is not None and found["largest"] <= tolerance else "different"


def weights_text(found: Mapping[str, float], name: str) -> str:
    """Return one line about a comparison with a checkpoint."""
    total, different = int(found["tensors"]), int(found["different"])
    if not different:
        return f"{name}: all {total} tensors of weights and optimizer are equal, bit for bit"
    return f"{name}: {different} of {total} tensors differ, by {found['largest']:.3g} at most"


def rows_table(found: Sequence[Row]) -> list[str]:
    """Format rows as lines for a terminal."""
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
