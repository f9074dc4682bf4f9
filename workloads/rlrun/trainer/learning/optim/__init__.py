"""Optimizer updates: norm, clipping and update (`update`), RLRun's own optimizers (`muon`, `adamw8bit`, `host_moments`), and timing."""
