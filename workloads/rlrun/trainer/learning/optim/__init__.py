"""Optimizer updates: norm, clipping and update (`update`), RLRun's own optimizers (`muon`, `host_moments`), and timing."""
