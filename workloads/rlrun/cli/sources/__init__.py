"""Sources of a run's configuration: files, options and variables, in RLRun's names and in PRIME-RL's."""
