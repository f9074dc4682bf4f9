"""`rlrun rollouts`: print the rollouts of a step with their rewards."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlrun.cli.runs.common import RUN_HELP, answered, api, runs_parser, the_run, write
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect import rollouts
from rlrun.runs import reading
from rlrun.runtime import exit_codes

_CHARACTERS = 2000
_SHOWN_ROLLOUTS = 8


def rollouts_parser() -> Parser:
    """Return the parser of `rlrun rollouts`."""
    text = "Print rollouts of a step: prompt, turns, tool calls, reward, advantage and the policy versions that sampled them."
    p = runs_parser("rollouts", text, output="json")
    p.add_argument("run", metavar="RUN", help=RUN_HELP)
    p.add_argument(
        "--step", type=whole_number(1), metavar="N", help="trained step (default: the newest step with a trace)"
    )
    p.add_argument(
        "--evaluation",
        type=whole_number(0),
        metavar="VERSION",
        help="show the evaluation rollouts of a policy version instead",
    )
    some = p.add_mutually_exclusive_group()
    some.add_argument("--worst", type=whole_number(1), metavar="N", help="the N rollouts with the lowest rewards")
    some.add_argument("--best", type=whole_number(1), metavar="N", help="the N rollouts with the highest rewards")
    p.add_argument("--environment", metavar="NAME", help="only rollouts of one environment")
    p.add_argument("--full", action="store_true", help=f"complete messages (default: {_CHARACTERS} characters of each)")
    return p


@answered("rollouts")
def run_rollouts(argv: Sequence[str]) -> int:
    """Run `rlrun rollouts` and return the exit code."""
    options = rollouts_parser().parse_args(list(argv))
    label, rows = reading.read_trace(the_run(options), api(options), options.step, options.evaluation)
    reading.check_environment(rows, options.environment, "--environment")
    found = rollouts.choose_rollouts(rows, worst=options.worst, best=options.best, environment=options.environment)
    if options.output == "json":
        write(found, "json")
        return exit_codes.OK
    if options.worst is None and options.best is None:
        found = found[:_SHOWN_ROLLOUTS]
    print(rollouts.summarize_step(label, rows, len(found)))
    for row in found:
        print("\n" + rollouts.rollout_text(row, most=0 if options.full else _CHARACTERS))
    if len(found) < len(rows) and options.worst is None and options.best is None:
        print(f"\n{len(rows) - len(found)} more: --worst N, --best N or -o json", file=sys.stderr)
    return exit_codes.OK
