"""`sft run.yaml`, or `sft @ run.toml --data.path chats.jsonl --max-steps N`: supervised fine-tuning on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlrun.cli.common import arguments
from rlrun.cli.rl import RlConfig, start
from rlrun.config.roles import Task

_MANIFESTS = (".yaml", ".yml", ".json")


class SftConfig(RlConfig):
    """A local supervised run: the specification of a manifest, with the run's name and folder beside it."""

    name: str = "sft"
    """Name of the run."""
    task: Task = "SFT"
    """Always SFT here, unless a file says otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `sft`; returns the exit code."""
    words = arguments(argv)
    if words and not words[0].startswith("-") and words[0].endswith(_MANIFESTS):
        from rlrun.local.main import main as local

        return local(words)
    return start(words, SftConfig, prog="sft", usage="sft RUN.yaml | sft @ RUN.toml")


if __name__ == "__main__":
    sys.exit(main())
