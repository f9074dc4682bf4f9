"""What a local run uses and others may use too: GPUs, engines that run already, the trainer of a host run."""
