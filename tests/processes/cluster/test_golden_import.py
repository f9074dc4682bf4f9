"""Labels of the golden root's layers during containerd's garbage collection."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program

SCRIPT = Path(__file__).parents[2] / "cluster" / "native" / "golden_import.py"
# The layers are files in its folder; the file `collected` disappears when its label is set.
CTR = """#!/bin/sh
cd "$(dirname "$0")/layers"
case "$3 $4" in
"snapshots ls")
    echo "KEY PARENT KIND"
    for layer in *; do echo "$layer parent Committed"; done
    echo "half  Active"
    ;;
"snapshots label")
    [ "$5" != collected ] || rm collected
    [ "$5" != broken ] || { echo "ctr: disk is broken" >&2; exit 1; }
    [ -e "$5" ] || { echo "ctr: snapshot $5 does not exist: not found" >&2; exit 1; }
    echo "$6" > "$5"
    ;;
*) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


def label(folder: Path, *layers: str) -> subprocess.CompletedProcess[str]:
    (folder / "layers").mkdir()
    for layer in layers:
        (folder / "layers" / layer).touch()
    (folder / "ctr").write_text(CTR)
    (folder / "ctr").chmod(0o755)
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r})['label_layers']('golden')"
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    return run_program([sys.executable, "-c", code], env=path)


def test_layer_collected_during_import_gets_no_label(tmp_path: Path) -> None:
    result = label(tmp_path, "a", "collected", "z")
    assert (result.returncode, result.stderr) == (0, "")
    assert {layer.name: layer.read_text() for layer in (tmp_path / "layers").iterdir()} == dict.fromkeys(
        "az", "containerd.io/gc.root=golden\n"
    )


@pytest.mark.parametrize("layers", [("a", "broken"), ("broken", "z")])
def test_failed_label_fails_the_import(tmp_path: Path, layers: tuple[str, ...]) -> None:
    result = label(tmp_path, *layers)
    assert result.returncode != 0
    assert "ctr cannot label the layer broken: ctr: disk is broken" in result.stderr
