"""What is said when a role fails: which one, why, its last lines, and where its log is."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.local.supervisor import Running, last_lines
from rlrun.protocol import exit_codes
from rlrun.protocol.failures import read_error, volume_is_full


def first_cause(failed: Sequence[Running]) -> Running:
    """Of roles that ended within one look, the one that said why; else the first."""
    return next((running for running in failed if read_error(running.spec.error_file.parent) is not None), failed[0])


def exit_code(failed: Running, root: Path) -> int:
    """The exit code of a run that a role's failure ended."""
    said, code = read_error(failed.spec.error_file.parent), failed.process.returncode
    if said is not None:
        return said.code or exit_codes.FAILURE
    if volume_is_full(root):
        return exit_codes.STORAGE
    return code if code is not None and 0 < code < 128 else exit_codes.FAILURE


def explain(failed: Running, root: Path) -> None:
    """Tell a person on stderr."""
    code = failed.process.returncode
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"ended with exit code {code}"
    )
    print(f"\nerror: {failed.spec.name} {how}", file=sys.stderr)
    said = read_error(failed.spec.error_file.parent)
    if said is not None:
        print(f"  {said}", file=sys.stderr)
    elif volume_is_full(root):
        print(f"  the volume of {root} is full (No space left on device); make space", file=sys.stderr)
    else:
        print("  its last lines:", file=sys.stderr)
        for line in last_lines(failed.spec.log):
            print(f"  | {line}", file=sys.stderr)
    print(f"  its log: {failed.spec.log}", file=sys.stderr)
