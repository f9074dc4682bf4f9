"""`rlrun env install SOURCE`: install an environment into a separate Python, and print the lines of a manifest that use it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.config.loading.parser import Parser
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import printable

HUB_VARIABLE = "RLRUN_ENVIRONMENT_HUB"


def install_parser() -> Parser:
    """Return the parser of `rlrun env install`."""
    p = Parser(
        prog="rlrun env install",
        description="Install an environment's package and its dependencies into a separate Python. pip installs them with its usual "
        "configuration (PIP_INDEX_URL, PIP_FIND_LINKS, ...).",
    )
    p.add_argument(
        "source",
        metavar="SOURCE",
        help="a wheel, a folder, a requirement such as word-chain==1.2, or owner/name@version from a hub",
    )
    p.add_argument(
        "--into", metavar="DIR", help="new folder for that Python (default: ~/.local/share/rlrun/environments/NAME); in a "
        "cluster a folder on the run's volume",
    )  # fmt: skip
    p.add_argument(
        "--hub",
        metavar="URL",
        help=f"package index of the hub, with {{owner}}: https://HUB/{{owner}}/simple/ (default: {HUB_VARIABLE})",
    )
    p.add_argument(
        "--with",
        metavar="REQUIREMENT",
        action="append",
        default=[],
        dest="beside",
        help="additional package, such as verifiers==0.1.14; may be repeated",
    )
    p.add_argument(
        "--python", metavar="FILE", default=sys.executable, help="interpreter that creates it (default: this one)"
    )
    p.add_argument("--replace", action="store_true", help="replace an existing folder")
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    return p


def run_install(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    options = install_parser().parse_args(list(argv))
    from rlrun.environments.installation import InstallError, install_environment, source_of

    def say(line: str) -> None:
        print(printable(line), file=sys.stderr)

    try:
        source = source_of(options.source, options.hub or os.environ.get(HUB_VARIABLE) or None)
        folder = Path(options.into).expanduser() if options.into else _default_folder(source.name)
        found = install_environment(
            source, folder.absolute(), python=options.python, beside=options.beside, replace=options.replace, say=say
        )
    except InstallError as error:
        print(f"rlrun env install: {printable(str(error))}", file=sys.stderr)
        return exit_codes.CONFIGURATION
    if options.json:
        entry = {"id": found.id, "python": str(found.python)}
        print(
            json.dumps(
                {"name": found.name, "version": found.version, "verifiers": found.verifiers, "environment": entry}
            )
        )
        return exit_codes.OK
    beside = (
        f" with verifiers {found.verifiers}"
        if found.verifiers
        else " without verifiers; write its function into the id"
    )
    print(f"installed {found.name} {found.version}{beside}\n\nenvironments:")
    print(f"  - id: {found.id}\n    python: {found.python}")
    if found.verifiers:
        print(f"\nrlrun env try {found.id} --python {found.python}")
    return exit_codes.OK


def _default_folder(name: str) -> Path:
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "rlrun" / "environments" / re.sub(r"[-_.]+", "-", name).lower()
