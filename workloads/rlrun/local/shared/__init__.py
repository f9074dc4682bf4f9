"""Resources that a local run shares with others: GPUs, engines that already run, the trainer of a host run."""
