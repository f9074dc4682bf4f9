"""The numeric tests with the kernels of other processors: `python -m tests.capabilities [--only NAME...] [FILE...]`.

torch, oneDNN and MKL choose kernels by the processor's vector instructions, and kernels sum in different orders. Each
combination is one pytest with the variables that choose the kernels; the processes that it starts inherit them. Prints
a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOWEST = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""MKL_ENABLE_INSTRUCTIONS has no effect on AMD processors; MKL_CBWR has."""
PERMUTED = "tests.support.permuted_sums"
_COMPARES = re.compile(
    r"assert_close|allclose|torch\.equal|array_equal|approx\(|parameter_checksum|find_fault|EXACT|_error\b"
)


@dataclass(frozen=True)
class Combination:
    """Kernels and threads of one pytest."""

    kernels: str
    threads: int
    variables: Mapping[str, str]
    options: Sequence[str] = ()

    @property
    def name(self) -> str:
        return f"{self.kernels}-{self.threads}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a combination. More threads than cores need MKL_DYNAMIC, and must not spin while they
        wait for each other."""
        threads = {"OMP_NUM_THREADS": str(self.threads), "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}
        return os.environ | threads | self.variables


COMBINATIONS = [
    *(Combination("lowest", threads, LOWEST) for threads in (1, 2, 4)),
    *(Combination("avx2", threads, AVX2) for threads in (1, 2, 4)),
    Combination("own", 1, {}),
    *(Combination(f"permuted{seed}", 1, {"PERMUTED_SUMS": str(seed)}, ("-p", PERMUTED)) for seed in (1, 2)),
]


@dataclass
class Outcome:
    """Result of one pytest."""

    combination: Combination
    capability: str
    summary: str
    cpu_seconds: float
    failures: list[str] = field(default_factory=list)


def numeric_files(folder: Path) -> list[str]:
    """Return test files that compare numbers of tensors or arrays."""
    found = [file for file in sorted(folder.rglob("test_*.py")) if _COMPARES.search(file.read_text())]
    return [str(file.relative_to(ROOT)) for file in found]


def reported(combination: Combination) -> str:
    """Return capability and threads as torch reports them: a misspelled variable has no effect and no error."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=combination.environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def run(combination: Combination, files: Sequence[str]) -> Outcome:
    """Run pytest with a combination; its output is printed at once."""
    capability = reported(combination)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    failures, summary = [], ""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", "-q", f"-ocache_dir={cache}", *combination.options, *files]
        with subprocess.Popen(
            command, cwd=ROOT, env=combination.environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"[{combination.name}] {line}", end="", flush=True)
                summary = line.strip() or summary
                if line.startswith(("FAILED ", "ERROR ")):
                    failures.append(line.split()[1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    verdict = summary if process.returncode == 0 else f"FAILED ({process.returncode}): {summary}"
    return Outcome(combination, capability, verdict, used, failures)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return Markdown: one row for each combination, then the failed tests."""
    head = ["| combination | torch reports | CPU seconds | result |", "|---|---|---|---|"]
    rows = [
        f"| {one.combination.name} | {one.capability} | {one.cpu_seconds:.0f} | {one.summary} |" for one in outcomes
    ]
    failed = [f"- {one.combination.name}: `{name}`" for one in outcomes for name in one.failures]
    return "\n".join([*head, *rows, *(["", *failed] if failed else [])])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the wanted combinations; return 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.capabilities", description="numeric tests, other kernels")
    names = [one.name for one in COMBINATIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("files", nargs="*", help="default: the files of tests/tensors that compare numbers")
    chosen = parser.parse_args(argv)
    files = chosen.files or numeric_files(ROOT / "tests/tensors")
    outcomes = [run(one, files) for one in COMBINATIONS if one.name in chosen.only]
    print(table(outcomes), flush=True)
    return int(any(one.summary.startswith("FAILED") for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
