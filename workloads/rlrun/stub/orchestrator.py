"""The real orchestrator in an image without torch: `python -m rlrun.stub.orchestrator --config run.json`.

It needs torch for one thing, the advantages of a batch. Those of `rlrun.stub.advantages` take the place of `rlrun.algorithms`.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from rlrun.stub.advantages import advantages


def without_torch() -> None:
    """Replace `rlrun.algorithms` before the orchestrator imports it."""
    replacement = ModuleType("rlrun.algorithms", "Advantages without torch.")
    vars(replacement)["advantages"] = advantages
    sys.modules["rlrun.algorithms"] = replacement
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would tell that torch is missing


def main() -> int:
    """Run the orchestrator; returns its exit code."""
    without_torch()
    from rlrun.orchestrator.main import main as orchestrate

    return orchestrate()


if __name__ == "__main__":
    sys.exit(main())
