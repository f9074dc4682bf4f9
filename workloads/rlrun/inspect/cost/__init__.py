"""Cost of runs: from the status of an RLRun, or from the metrics in a folder."""
