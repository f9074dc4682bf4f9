"""Report of a failed role: its name, the reason, its last lines, and the path of its log."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.diagnostics.crash import how
from rlrun.local.supervisor import Running, last_lines
from rlrun.protocol.files.failures import read_error, volume_is_full
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import printable


def first_cause(failed: Sequence[Running]) -> Running:
    """First cause among roles that ended within one look: the one with an error report; else the first."""
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
    """Print the failure on stderr."""
    code = failed.process.returncode
    print(f"\nerror: {failed.spec.name} {how(code) if code is not None else 'still runs'}", file=sys.stderr)
    said = read_error(failed.spec.error_file.parent)
    if said is not None:
        first, *more = printable(str(said), lines=True).splitlines()
        print("\n".join([f"  {first}", *(f"  | {line}" for line in more)]), file=sys.stderr)
    elif volume_is_full(root):
        print(f"  the volume of {root} is full (No space left on device); make space", file=sys.stderr)
    else:
        print("  its last lines:", file=sys.stderr)
        for line in last_lines(failed.spec.log):
            print(f"  | {line}", file=sys.stderr)
    print(f"  its log: {failed.spec.log}", file=sys.stderr)
