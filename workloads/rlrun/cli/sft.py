"""`sft run.yaml`, or `sft @ run.toml --data.path chats.jsonl --max-steps N`: supervised fine-tuning on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.api.resolve import resolve_spec
from rlrun.api.run_manifest import Variation, take_variation
from rlrun.cli.command_options import call_with_own_options, command_arguments, report_problems, run_command_line
from rlrun.cli.rl import not_benched, print_local_help, run_bench, start_run, take_bench
from rlrun.cli.run_layers import SftConfig
from rlrun.config.loading.files import read_text
from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.local.judge import judge_manifest, report_and_stop
from rlrun.protocol.files.identity import UNCLAIMED
from rlrun.runtime import exit_codes

_MANIFESTS = (".yaml", ".yml", ".json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `sft` and return the exit code."""
    return run_command_line(lambda: call_with_own_options("sft", command_arguments(argv), run, shown="sft"))


def run(words: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    if words and not words[0].startswith("-") and words[0].endswith(_MANIFESTS):
        if "--help" in words or "-h" in words:
            return print_local_help()
        if "--bench" in words:
            return measure_step(words)
        from rlrun.local.local_command import main as local

        return local(words, task="SFT")
    return start_run(words, SftConfig, prog="sft", usage="sft RUN.yaml | sft @ RUN.toml")


def measure_step(words: Sequence[str]) -> int:
    """Measure the training step of a run of any task: `RUN.yaml --bench`, with options of the measurement. Returns the exit code."""
    try:
        rest, options = take_bench(words)
        rest, varied = take_variation(rest)
        manifests = [word for word in rest if not word.startswith("-")]
        if other := [word for word in rest if word not in manifests[:1]]:
            raise ConfigError(
                [Problem(COMMAND_LINE, other[0], "this option cannot be combined with --bench; remove it")]
            )
        if not manifests:
            raise ConfigError([Problem(COMMAND_LINE, "--bench", "needs a manifest: write RUN.yaml --bench")])
        manifest = Path(manifests[0])
        text = read_text(manifest)
    except ConfigError as error:
        return report_problems(error)
    assert options is not None
    judged = judge_manifest(
        text, str(manifest), here=True, leave_out=not_benched, variation=Variation(varied, os.environ)
    )
    code = report_and_stop(judged)
    if code is not None or judged.run is None:
        return code or exit_codes.CONFIGURATION
    found = judged.run
    return run_bench(
        resolve_spec(found.spec, name=found.metadata.name, uid=UNCLAIMED, output_dir="runs").trainer, options
    )


if __name__ == "__main__":
    sys.exit(main())
