"""The orchestrator of supervised fine-tuning: rows of data sets become the batches that the trainer takes, over the same protocol as RL.

files -> Rows -> Mixture -> chat template, loss mask -> batch of a step (durable) -> trainer
"""
