"""`rlrun doctor`: checks of this machine, one line each, with a fix for each failed check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlrun.config.loading.parser import Parser
from rlrun.local.doctor import list_abilities, list_checks
from rlrun.local.machine_facts import gather_facts
from rlrun.runtime import exit_codes


def doctor_parser() -> Parser:
    """Return the parser of `rlrun doctor`."""
    p = Parser(
        prog="rlrun doctor",
        description="Check what this machine can run; exit code 69 if no run can start here. The command starts and changes nothing.",
    )
    p.add_argument(
        "--output-dir",
        metavar="DIR",
        type=Path,
        default=Path("runs"),
        help="folder for runs (default: runs)",
    )
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    return p


def run_doctor(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    options = doctor_parser().parse_args(list(argv))
    facts = gather_facts(options.output_dir)
    found = list_checks(facts)
    can = list_abilities(facts, found)
    if options.json:
        print(json.dumps({"checks": [asdict(check) for check in found], "can": can}, indent=2))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            print(f"{check.state:<5} {check.name:<{width}}  {check.said}")
            if check.fix:
                print(f"{'':<5} {'':<{width}}  -> {check.fix}")
        print("this machine can: " + "; ".join(can))
    return exit_codes.UNAVAILABLE if any(check.state == "fail" for check in found) else exit_codes.OK
