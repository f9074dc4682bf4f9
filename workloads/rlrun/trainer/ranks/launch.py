"""Start of the trainer's group by a launcher: all of it on one machine, or this machine's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlrun.config.models.roles import TrainerConfig
from rlrun.runtime.bootstrap import module_command


@dataclass(frozen=True)
class Nodes:
    """The machines of the group, and which one this is."""

    count: int = 1
    rank: int = 0
    """Rank of this machine; the one of rank 0 holds the store at which all meet."""
    master: str = "127.0.0.1"
    """Address of that machine."""


def torchrun_command(
    config: TrainerConfig,
    *,
    config_file: Path,
    rendezvous_port: int,
    attempt: int,
    replay: Path | None = None,
    nodes: Nodes | None = None,
) -> list[str]:
    """The command line of torchrun: static rendezvous, no restarts (the launcher restarts the group).

    Args:
        config: says how many ranks.
        config_file: the `run.json` that each rank reads.
        rendezvous_port: a free port of the first machine.
        attempt: the rendezvous' id, so that ranks of two attempts never meet.
        replay: train on the recorded batches of this folder, without an orchestrator.
        nodes: one machine per replica, of which this starts one; default: all ranks on this machine.

    `RLRUN_ATTEMPT` and `RLRUN_API_KEY` are set by the launcher. The exit code is that of the first rank that failed, and
    `error.json` in the role's log folder holds its message.
    """
    here = nodes or Nodes()
    ranks = config.ranks_per_replica if nodes else config.world_size
    command = module_command("rlrun.trainer.ranks.torchrun")
    command += ["--nnodes", str(here.count), "--node-rank", str(here.rank)]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", "0"]
    command += ["--rdzv-backend", "static", "--rdzv-id", str(attempt)]
    # A little longer than the ranks take at most: they say themselves why they end.
    command += ["--shutdown-timeout", str(config.checkpoint.grace_period_seconds + 5)]
    command += ["--master-addr", here.master, "--master-port", str(rendezvous_port)]
    # torchrun's own `-m` puts the working directory first on the ranks' import path.
    command += ["--no-python", *module_command("rlrun.trainer", ["--config", str(config_file)], unbuffered=True)]
    return command + (["--replay", str(replay)] if replay is not None else [])
