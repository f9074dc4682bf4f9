"""Evaluation of policy versions during training."""
