"""How a launcher starts the trainer's group on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from rlrun.config.roles import TrainerConfig


def torchrun_command(
    config: TrainerConfig, *, config_file: Path, rendezvous_port: int, attempt: int, replay: Path | None = None
) -> list[str]:
    """The command line of torchrun, all ranks on this machine, static rendezvous, no restarts (the launcher restarts the group).

    Args:
        config: says how many ranks.
        config_file: the `run.json` that each rank reads.
        rendezvous_port: a free port of this machine.
        attempt: the rendezvous' id, so that ranks of two attempts never meet.
        replay: train on the recorded batches of this folder, without an orchestrator.

    `RLRUN_ATTEMPT` and `RLRUN_API_KEY` are set by the launcher. The exit code is that of the first rank that failed, and
    `error.json` in the role's log folder holds its message.
    """
    command = [sys.executable, "-m", "rlrun.trainer.torchrun", "--nnodes", "1", "--node-rank", "0"]
    command += ["--nproc-per-node", str(config.world_size), "--max-restarts", "0"]
    command += ["--rdzv-backend", "static", "--rdzv-id", str(attempt)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(rendezvous_port)]
    command += ["-m", "rlrun.trainer", "--config", str(config_file)]
    return command + (["--replay", str(replay)] if replay is not None else [])
