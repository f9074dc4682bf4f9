"""Program `rlrun-operator`: reads settings and credentials, then runs the operator until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlrun.config.loading.parser import Parser
from rlrun.runtime import extras
from rlrun_operator.runtime import log_setup
from rlrun_operator.settings import OperatorSettings, SettingsError, from_environment

if TYPE_CHECKING:
    from rlrun_operator.kube.connection import Connection

LOST_LEADERSHIP = 1
PROBLEM = 2
UNEXPECTED = 3
COLLECT_AFTER = (50_000, 20, 50)
"""Thresholds of the garbage collector: container allocations before a young collection, then collections per older generation."""
log = logging.getLogger("rlrun_operator")


def build_parser() -> Parser:
    """Return the parser of the command line; the settings come from the environment, which the Deployment sets."""
    parser = Parser(
        "rlrun-operator",
        "Run the RLRun operator until SIGTERM. Its settings are environment variables RLRUN_*, which the Helm chart "
        "rlrun-operator sets; its cluster is the one of its pod or of KUBECONFIG.",
    )
    parser.add_argument(
        "--check", action="store_true", help="check the resource, the rights and that an operator leads; then exit"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the operator. Exit codes: 0 stopped, 1 another operator leads, 2 setup problem, 3 unexpected error, 64 wrong command line."""
    check = build_parser().parse_args(argv).check
    try:
        _run_operator(check=check)
    except ModuleNotFoundError as error:
        message = extras.explain_import(error, operator=True)
        if message is None:
            raise
        sys.exit(_print_line(message))


def _run_operator(*, check: bool) -> None:
    try:
        settings = from_environment(os.environ)
    except SettingsError as error:
        sys.exit(_print_line(error))
    log_setup.set_up(settings.log_level, settings.log_format)

    # Imported late: kopf takes most of a second, and wrong settings should be reported at once.
    from rlrun_operator.decide.state_machine import decide
    from rlrun_operator.kube.connection import ConnectionSetupError, load_credentials
    from rlrun_operator.manager import LeadershipLostError, Operator
    from rlrun_operator.reconcile import watch

    watch.quiet_kopf(debug=settings.log_level == "debug")
    try:
        connection = load_credentials()
    except ConnectionSetupError as error:
        sys.exit(_print_line(error))

    if check:
        sys.exit(asyncio.run(_check_installation(settings, connection)))
    # Parsed JSON has many containers and no cycles: with the default thresholds the collector would traverse all of it repeatedly and
    # use more CPU than the rest of the operator.
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)

    async def run() -> None:
        where = ", ".join(settings.namespaces) or "all namespaces"
        log.info("rlrun-operator %s serves %s on %s", settings.pod_name, where, connection.server)
        await Operator(settings, connection, decide).run()

    try:
        asyncio.run(run())
    except LeadershipLostError as error:
        log.error("%s", error)
        sys.exit(LOST_LEADERSHIP)
    except OSError as error:
        log.error("cannot serve port %d (RLRUN_HTTP_PORT): %s", settings.http_port, error)
        sys.exit(PROBLEM)
    except Exception as error:
        log.error("ended by an unexpected error: %s", log_setup.describe_exception(error))
        sys.exit(UNEXPECTED)
    log.info("stopped")


async def _check_installation(settings: OperatorSettings, connection: Connection) -> int:
    """Print the faults of the installation and return the exit code."""
    from rlrun_operator.kube.client import Client, UnavailableError
    from rlrun_operator.runtime.preflight import find_faults

    async with connection.session() as session:
        try:
            found = await find_faults(Client(session, connection.server), settings)
        except UnavailableError as error:
            found = [f"the API server {connection.server} cannot be used: {error}"]
    for fault in found:
        _print_line(fault)
    if not found:
        where = ", ".join(settings.namespaces) or "all namespaces"
        print(f"rlrun-operator: RLRun is installed, the rights are complete, and an operator serves {where}")
    return PROBLEM if found else 0


def _print_line(error: Exception | str) -> int:
    print(f"rlrun-operator: {error}", file=sys.stderr)
    return PROBLEM
