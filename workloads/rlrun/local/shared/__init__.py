"""Things that a local run shares with others: GPUs, engines that run already, the trainer of a host run."""
