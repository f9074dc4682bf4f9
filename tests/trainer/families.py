"""Matrix of families: `python -m tests.trainer.families FOLDER [FAMILY...]` tests each family in every layout that its
row allows.

The program needs about twenty minutes of two cores and prints the rows of the table in docs/parallelism.md.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rlrun.config.families import FAMILIES, Kind
from rlrun.local.preflight import free_port
from tests.trainer.family_models import layouts_of
from tests.trainer.layouts import fork_ranks, rank_main

KINDS = get_args(Kind)
ERRORS = ("logprob_error", "gradient_error", "published_error")


def worst(found: dict[str, Any]) -> dict[str, float]:
    """Return the largest errors of a family's layouts, and those of loss and gradient norm relative to one rank."""
    steps = [step for case in found.values() for step in (case, case.get("resumed")) if step]
    errors = {name: max(step.get(name, 0.0) for step in steps) for name in ERRORS}
    for name in ("loss", "grad_norm"):
        errors[name] = max(
            abs(step[name] - step["expected"][name]) / max(abs(step["expected"][name]), 1e-2) for step in steps
        )
    return errors


def try_layouts(kind: str, folder: Path) -> dict[str, Any]:
    """Return the largest errors of a family over all its layouts, and the failed layout if one failed."""
    found: dict[str, Any] = {}
    for ranks, layouts in layouts_of(kind).items():
        own = folder / kind / str(ranks)
        own.mkdir(parents=True, exist_ok=True)
        cases = [f"{kind}:{layout}" for layout in layouts]
        failed = fork_ranks(ranks, free_port(), partial(rank_main, own, cases))
        if (own / "found.json").exists():
            found |= json.loads((own / "found.json").read_text())
        if failed:
            return {"failed": next(case for case in cases if case not in found)}
    return worst(found)


def rows(table: dict[str, Any]) -> list[str]:
    """Return rows of the page's table: model type, supported fields, largest errors."""
    return [
        f"| `{kind}` | {' | '.join('yes' if by in FAMILIES[kind].by else 'no' for by in KINDS)} | "
        + " | ".join(f"{row[name]:.0e}".replace("e-0", "e-") for name in ERRORS)
        + " |"
        for kind, row in sorted(table.items())
    ]


def main(folder: Path, families: list[str]) -> int:
    table: dict[str, Any] = {}
    for kind in families or [*FAMILIES]:
        table[kind] = try_layouts(kind, folder)
        print(kind, table[kind], flush=True)
        (folder / "matrix.json").write_text(json.dumps(table, indent=1))
    if any("failed" in row for row in table.values()):
        return 1
    print("\n".join(rows(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
