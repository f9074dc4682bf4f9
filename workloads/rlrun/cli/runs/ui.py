"""`rlrun ui`: the web page of runs in folders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.runs.common import answered
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect.source import NotFoundError
from rlrun.runtime import exit_codes
from rlrun.runtime.extras import UI, explain_lacking

_PORT = 8765
_NEEDED = ("fastapi", "uvicorn")


def ui_parser() -> Parser:
    """The command line of `rlrun ui`."""
    p = Parser(
        "rlrun ui",
        "Serve a web page of runs on this machine: curves, why each waits or failed, rollouts, comparison. It only reads.",
    )
    p.add_argument(
        "folders", nargs="*", metavar="FOLDER", type=Path, default=[Path("runs")],
        help="a run's folder, or a folder with runs right below it (default: runs); nothing else is shown",
    )  # fmt: skip
    p.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen (default: 127.0.0.1); elsewhere a token is asked for",
    )
    p.add_argument(
        "--port",
        type=whole_number(0, 65535),
        default=_PORT,
        metavar="N",
        help=f"(default: {_PORT}); 0 takes a free one",
    )
    p.add_argument(
        "--token", action="store_true", help="ask for a token on 127.0.0.1, too: other users of this machine reach it"
    )
    return p


@answered("ui")
def run_ui(argv: Sequence[str]) -> int:
    """Run `rlrun ui`; returns the exit code."""
    options = ui_parser().parse_args(list(argv))
    folders: list[Path] = [folder.expanduser() for folder in options.folders]
    for folder in folders:
        if not folder.is_dir():
            raise NotFoundError(f"FOLDER: there is no folder {folder}; name a run's folder, or one with runs below it")
    if (missing := explain_lacking(_NEEDED, extra=UI)) is not None:
        print(f"rlrun ui: {missing}", file=sys.stderr)
        return exit_codes.UNAVAILABLE
    from rlrun.ui.server import Address, serve_page

    address = Address(options.host, options.port, options.token)
    try:
        serve_page(folders, address, lambda url: print(f"rlrun ui: {url}  (Ctrl-C ends it)", flush=True))
    except OSError as error:
        if error.filename is not None:
            raise
        where = f"{address.host}:{address.port}"
        print(
            f"rlrun ui: cannot listen on {where}: {str(error.strerror or error).partition(' (while')[0]}; name another --port or --host",
            file=sys.stderr,
        )
        return exit_codes.UNAVAILABLE
    return exit_codes.OK
