"""The matrix of families: `python -m tests.trainer.families FOLDER [FAMILY...]` tries each in every layout that its row allows.

Needs about ten minutes of two cores. Prints the table of docs/models.md, from `FOLDER/matrix.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rlrun.config.families import FAMILIES
from rlrun.local.preflight import free_port
from tests.trainer.family_models import layouts_of
from tests.trainer.layouts import RANKS, fork_ranks, rank_main

ERRORS = ("logprob_error", "gradient_error", "published_error")


def worst(found: dict[str, Any]) -> dict[str, float]:
    """Largest errors of a family's layouts, and of loss and gradient norm relative to one rank's."""
    steps = [step for case in found.values() for step in (case, case.get("resumed")) if step]
    errors = {name: max(step.get(name, 0.0) for step in steps) for name in ERRORS}
    for name in ("loss", "grad_norm"):
        errors[name] = max(abs(step[name] - step["expected"][name]) / max(abs(step["expected"][name]), 1e-2) for step in steps)
    return errors


def main(folder: Path, families: list[str]) -> int:
    table: dict[str, Any] = {}
    for kind in families or [*FAMILIES]:
        own = folder / kind
        own.mkdir(parents=True, exist_ok=True)
        cases = [f"{kind}:{layout}" for layout in layouts_of(kind)]
        failed = fork_ranks(RANKS, free_port(), lambda own=own, cases=cases: rank_main(own, cases))  # type: ignore[misc]
        found = json.loads((own / "found.json").read_text()) if (own / "found.json").exists() else {}
        table[kind] = worst(found) if not failed else {"failed_after": list(found)}
        print(kind, table[kind], flush=True)
        (folder / "matrix.json").write_text(json.dumps(table, indent=1))
    return int(any("failed_after" in row for row in table.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
