"""Orchestrator of supervised fine-tuning: rows of data sets become batches for the trainer, over the same protocol as
RL.

files -> Rows -> Mixture -> chat template, loss mask -> batch of a step (durable) -> trainer
"""
