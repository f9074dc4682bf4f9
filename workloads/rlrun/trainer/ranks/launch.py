"""Command line with which a launcher starts the trainer's group, or this machine's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlrun.config.models.roles import TrainerConfig
from rlrun.runtime.bootstrap import module_command


@dataclass(frozen=True)
class Nodes:
    """Machines of the group, and the number of this machine."""

    count: int = 1
    rank: int = 0
    """Rank of this machine; the machine of rank 0 has the store for the rendezvous."""
    master: str = "127.0.0.1"
    """Address of the machine of rank 0."""


def torchrun_command(
    config: TrainerConfig,
    *,
    config_file: Path,
    rendezvous_port: int,
    attempt: int,
    replay: Path | None = None,
    nodes: Nodes | None = None,
) -> list[str]:
    """Return the command line of torchrun with a static rendezvous and without restarts, because the launcher restarts the group.

    Args:
        config: configuration that defines the number of ranks.
        config_file: file `run.json` that each rank reads.
        rendezvous_port: free port of the first machine.
        attempt: number of the attempt, used as id of the rendezvous, so that ranks of two attempts never join.
        replay: folder of recorded batches to train on, without an orchestrator.
        nodes: machines of the group, one per replica. Default: all ranks on this machine.

    The launcher sets `RLRUN_ATTEMPT` and `RLRUN_API_KEY`. The exit code is the code of the first failed rank, whose message is in
    `error.json` of the role's log folder.
    """
    here = nodes or Nodes()
    ranks = config.ranks_per_replica if nodes else config.world_size
    command = module_command("rlrun.trainer.ranks.torchrun")
    command += ["--nnodes", str(here.count), "--node-rank", str(here.rank)]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", "0"]
    command += ["--rdzv-backend", "static", "--rdzv-id", str(attempt)]
    # A little longer than the ranks' own limit, so that they can report why they end.
    command += ["--shutdown-timeout", str(config.checkpoint.grace_period_seconds + 5)]
    command += ["--master-addr", here.master, "--master-port", str(rendezvous_port)]
    # torchrun's option `-m` would put the working directory first on the ranks' import path.
    command += ["--no-python", *module_command("rlrun.trainer", ["--config", str(config_file)], unbuffered=True)]
    return command + (["--replay", str(replay)] if replay is not None else [])
