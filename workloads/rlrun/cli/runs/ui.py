"""`rlrun ui`: serve the web page for runs in folders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.runs.common import answered
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect.source import NotFoundError
from rlrun.runtime import exit_codes
from rlrun.runtime.extras import UI, explain_lacking

_FOLDERS_PORT = 8765
_NEEDED = ("fastapi", "uvicorn")


def ui_parser() -> Parser:
    """Return the parser of `rlrun ui`."""
    p = Parser(
        "rlrun ui",
        "Serve a read-only web page for runs on this machine: curves, reasons for waiting and failures, rollouts, comparison.",
    )
    p.add_argument(
        "folders", nargs="*", metavar="FOLDER", type=Path, default=[Path("runs")],
        help="folder of a run, or folder that directly contains runs (default: runs); other folders are not shown",
    )  # fmt: skip
    p.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1); other addresses require a token",
    )
    p.add_argument(
        "--port",
        type=whole_number(0, 65535),
        default=_FOLDERS_PORT,
        metavar="N",
        help=f"port (default: {_FOLDERS_PORT}); 0 selects a free port",
    )
    p.add_argument(
        "--token",
        action="store_true",
        help="require a token also on 127.0.0.1, which other users of this machine can reach",
    )
    return p


@answered("ui")
def run_ui(argv: Sequence[str]) -> int:
    """Run `rlrun ui` and return the exit code."""
    options = ui_parser().parse_args(list(argv))
    folders: list[Path] = [folder.expanduser() for folder in options.folders]
    for folder in folders:
        if not folder.is_dir():
            raise NotFoundError(f"FOLDER: there is no folder {folder}; set the folder of a run, or a folder with runs")
    if (missing := explain_lacking(_NEEDED, extra=UI)) is not None:
        print(f"rlrun ui: {missing}", file=sys.stderr)
        return exit_codes.UNAVAILABLE
    from rlrun.ui.server import Address, serve_page

    address = Address(options.host, options.port, options.token)
    try:
        serve_page(folders, address, lambda url: print(f"rlrun ui: {url}  (Ctrl-C stops it)", flush=True))
    except OSError as error:
        if error.filename is not None:
            raise
        where = f"{address.host}:{address.port}"
        print(
            f"rlrun ui: cannot listen on {where}: {str(error.strerror or error).partition(' (while')[0]}; set another --port or --host",
            file=sys.stderr,
        )
        return exit_codes.UNAVAILABLE
    return exit_codes.OK
