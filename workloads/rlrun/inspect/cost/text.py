"""Tables and JSON documents of cost accounts."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.inspect.cost.account import USES, Account, by_namespace, sum_uses
from rlrun.inspect.screen import align_columns
from rlrun.inspect.snapshot import CostRow
from rlrun.runtime.json_types import Json

_HEADS = ("TRAINED", "FOR ROLLOUTS", "FOR TRAINER", "STARTUP", "REPEATED", "STOPPING", "OTHER")
"""Column titles of `USES`."""
NO_GPUS = "* no GPUs: hours of the machine"


def cost_table(accounts: Sequence[Account], *, wide: bool) -> str:
    """Return a table with a line per run, and per namespace with several runs. `wide` adds a line per attempt and role."""
    head = ("RUN", "HOURS", "BUDGET", *_HEADS, *(("TOKENS/HOUR", "SAMPLES/HOUR") if wide else ()))
    rows = [head]
    several = len({one.where for one in accounts if one.place == "cluster"}) > 1
    for one in (*accounts, *by_namespace(accounts)):
        name = one.where if one.place == "folder" else f"{one.where}/{one.name}" if several else one.name
        rates = (_rate_text(one.tokens, one), _rate_text(one.samples, one)) if wide else ()
        rows.append(
            (name + ("" if one.gpus else " *"), f"{one.hours:.2f}", _budget_text(one), *_use_shares(one.uses()), *rates)
        )
        if wide:
            rows += [
                (f"  {_name_row(row)}", f"{_show_seconds(row) / 3600:.2f}", "", *_use_shares(sum_uses((row,))), "", "")
                for row in one.rows
            ]
    told = "" if all(one.gpus for one in accounts) else f"\n{NO_GPUS}"
    return align_columns(rows) + told


def cost_document(one: Account) -> Json:
    """Return the JSON document of an account."""
    unit = "gpuSeconds" if one.gpus else "machineSeconds"
    found: Json = {"name": one.name, "where": one.where, "place": one.place}
    found |= {"gpuHours" if one.gpus else "machineHours": round(one.hours, 4), unit: one.uses()}
    if one.budget is not None:
        found["budget"] = {"gpuHours": one.budget}
    trained = {what: count for what, count in (("tokens", one.tokens), ("samples", one.samples)) if count}
    if trained and one.seconds:
        rates = {what: round(count / one.hours, 1) for what, count in trained.items()}
        found |= {"trained": trained, "perGpuHour" if one.gpus else "perMachineHour": rates}
    found["attempts"] = [{"attempt": row.attempt, "role": row.role, unit: dict(row.seconds)} for row in one.rows]
    return found


def _name_row(row: CostRow) -> str:
    return f"attempt {row.attempt}, {row.role}" if row.attempt else f"earlier attempts, {row.role}"


def _show_seconds(row: CostRow) -> int:
    return sum(seconds for _, seconds in row.seconds)


def _use_shares(uses: dict[str, int]) -> list[str]:
    """Return the share of each use; uses that this release does not know are added to `other`."""
    whole = sum(uses.values())
    known = {use: uses.get(use, 0) for use in USES}
    known["other"] += sum(seconds for use, seconds in uses.items() if use not in USES)
    return [f"{100 * seconds / whole:.0f} %" if seconds else "–" for seconds in known.values()]


def _budget_text(one: Account) -> str:
    return "–" if one.budget is None else f"{one.budget:g} ({100 * one.hours / one.budget:.0f} %)"


def _rate_text(count: int | None, one: Account) -> str:
    return "–" if not count or not one.seconds else f"{count / one.hours:,.0f}"
