"""`rlrun ui` and `ui-team`: servers of the web page for runs.

- `ui` serves runs in folders.
- `ui-team` serves runs in a cluster to users with individual rights. The operator's chart starts it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.run_options import one_line_errors
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


@one_line_errors("ui")
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
    from rlrun.ui.page_server import Address, serve_page

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


_TEAM_PORT = 8080


def ui_team_parser() -> Parser:
    """Return the parser of `rlrun ui-team`."""
    p = Parser(
        "rlrun ui-team",
        "Serve the web page for runs in a cluster. Users log in with tokens and see the runs that they are allowed to get. The operator's "
        "chart starts this command in a pod (ui.enabled). The service account must be able to review tokens and rights, and list runs.",
    )
    p.add_argument(
        "--namespace", action="append", default=[], metavar="NAME", help="namespace to show; may be repeated (default: all namespaces)"
    )  # fmt: skip
    p.add_argument(
        "--audience", action="append", default=[], metavar="NAME", help="audience of tokens; may be repeated (default: API server)"
    )  # fmt: skip
    p.add_argument(
        "--claim", action="append", default=[], metavar="NAMESPACE/CLAIM=FOLDER", help="claim with runs, and its read-only mount"
    )  # fmt: skip
    p.add_argument("--root-path", default="", metavar="PATH", help="path of the page behind an ingress, such as /rlrun")
    p.add_argument(
        "--trusted-proxy", action="append", default=[], metavar="NETWORK",
        help="trusted proxies, such as 10.244.0.0/16, whose X-Forwarded-For contains the user's address; may be repeated (default: none)",
    )  # fmt: skip
    p.add_argument("--host", default="::", metavar="ADDRESS", help="address to listen on (default: ::, all addresses)")
    p.add_argument(
        "--port",
        type=whole_number(0, 65535),
        default=_TEAM_PORT,
        metavar="N",
        help=f"port (default: {_TEAM_PORT}); 0 selects a free port",
    )
    p.add_argument(
        "--api-server",
        metavar="URL",
        help="URL of the API server (default: from the pod's variables KUBERNETES_SERVICE_HOST and _PORT)",
    )
    p.add_argument(
        "--account",
        type=Path,
        metavar="FOLDER",
        help="folder with `token` and `ca.crt` (default: the pod's service account)",
    )
    return p


@one_line_errors("ui-team")
def run_ui_team(argv: Sequence[str]) -> int:
    """Run `rlrun ui-team` and return the exit code."""
    options = ui_team_parser().parse_args(list(argv))
    if (missing := explain_lacking(_NEEDED, extra=UI)) is not None:
        print(f"rlrun ui-team: {missing}", file=sys.stderr)
        return exit_codes.UNAVAILABLE
    from rlrun.ui.team.cluster_api import CREDENTIALS
    from rlrun.ui.team.gate import parse_networks
    from rlrun.ui.team.team_server import Settings, api_url, claims_of, serve_team

    url = options.api_server or api_url(os.environ)
    if url is None:
        return _print_refusal("--api-server: this process does not run in a pod; set the URL of the API server")
    if options.root_path and not options.root_path.startswith("/"):
        return _print_refusal(f"--root-path: {options.root_path} does not start with /")
    try:
        trusted = parse_networks(options.trusted_proxy)
    except ValueError as error:
        return _print_refusal(f"--trusted-proxy: {error}")
    try:
        settings = Settings(
            host=options.host,
            port=options.port,
            namespaces=tuple(options.namespace),
            audiences=tuple(options.audience),
            prefix=options.root_path.rstrip("/"),
            claims=claims_of(options.claim),
            trusted=trusted,
        )
    except ValueError as error:
        return _print_refusal(f"--claim: {error}")
    try:
        serve_team(
            settings, url, lambda place: print(f"rlrun ui-team: {place}", flush=True), options.account or CREDENTIALS
        )
    except ValueError as error:
        return _print_refusal(f"--api-server: {error}")
    return exit_codes.OK


def _print_refusal(text: str) -> int:
    print(f"rlrun ui-team: {text}", file=sys.stderr)
    return exit_codes.USAGE
