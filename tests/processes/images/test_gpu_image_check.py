"""The checks of a GPU image as a program, in a Python without packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tools.gpu_image_check import checks_of

ROOT = Path(__file__).parents[3]


def test_image_without_packages_fails_each_check_and_reports_all(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "tools/gpu_image_check.py")]
    done = subprocess.run([*command, "inference"], capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    results = json.loads(done.stdout.splitlines()[-1])["checks"]
    assert results.keys() == checks_of("inference").keys()
    assert {name for name, result in results.items() if result["passed"]} <= {"InfiniBand", "nvcc"}
    assert subprocess.run([*command, "operator"], capture_output=True).returncode == 2
