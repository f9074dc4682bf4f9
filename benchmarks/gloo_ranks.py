"""Memory of real ranks on gloo, 2 and 4: bytes read and allocated while a model is loaded, and gradients between
micro-batches.

    python -m benchmarks.gloo_ranks [--write]

Small models, by the programs whose figures tests limit (`tests/trainer/test_loading_memory.py`,
`tests/trainer/test_gradient_memory.py`); the largest figure of all ranks counts. For many ranks and large models see
`benchmarks.ranks`. `--write` writes the tables to benchmarks/results/gloo_ranks.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results_page import run_page
from rlrun.local.preflight import free_port

RESULTS = Path(__file__).parent / "results" / "gloo_ranks.md"
RANKS = (2, 4)
KIB = 1024
_HEAD = """# Bytes of ranks on gloo

`python -m benchmarks.gloo_ranks`; small models in float32, KiB, the largest of all ranks. `reduce` and `local`: `gradientAccumulation`;
copies: `parallelism.dpReplicate`. Of many ranks and large models: [ranks](ranks.md).
"""


def measured(program: str, ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Return figures of each case, one for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        place = folder if program == "loading_memory" else str(file)
        command = [sys.executable, "-m", f"tests.trainer.{program}", place, str(ranks), str(free_port())]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        return dict(json.loads(file.read_text()))


def loading(ranks: int) -> Iterator[tuple[str, ...]]:
    """Return rows of the table of loading."""
    for kind, each in measured("loading_memory", ranks).items():
        copies = 2 if kind.endswith("-hybrid") else 1
        sizes = (max(one[name] for one in each) for name in ("whole", "shard", "read", "peak", "largest"))
        yield (kind, str(ranks), str(copies), *(f"{size / KIB:,.0f}" for size in sizes))


def gradients(ranks: int) -> Iterator[tuple[str, ...]]:
    """Return rows of the table of gradients."""
    for case, each in measured("gradient_memory", ranks).items():
        model, _, mode = case.partition("-")
        copies = 2 if model in ("replicas", "hybrid") else 1
        name = "critic" if model == "critic" else "policy" + (", bfloat16" if mode == "bfloat16" else "")
        sizes = (max(one["whole"] for one in each), max(one["shard"] for one in each))
        held = max(size for one in each for size in one["gradients"])
        sums = "local" if mode == "local" else "reduce"
        yield (name, sums, str(ranks), str(copies), *(f"{size / KIB:,.1f}" for size in (*sizes, held)))


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return Markdown."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def page() -> str:
    """Return both tables as Markdown."""
    return "\n".join(
        [
            _HEAD,
            "## Loading\n",
            table(
                ("files of", "ranks", "copies", "model", "a rank's part", "read", "peak alive", "largest tensor"),
                [row for ranks in RANKS for row in loading(ranks)],
            ),
            "## Gradients between micro-batches\n",
            table(
                ("model", "sums", "ranks", "copies", "whole gradient", "a rank's part", "held"),
                [row for ranks in RANKS for row in gradients(ranks)],
            ),
        ]
    )


if __name__ == "__main__":
    run_page(__doc__, RESULTS, page)
