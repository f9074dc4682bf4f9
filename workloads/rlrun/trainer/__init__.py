"""The trainer: a torchrun group that consumes packed batches, steps the optimizer, publishes weights and saves checkpoints.

`loop.train_runs` is the loop, `run` one run's state in it, `learning.train_step` one optimizer step, `ranks.launch` the start of the group.
Rank 0 alone talks to the orchestrator (`channel`). Other roles import nothing from here but `ranks.launch` and `modeling.tiny_model`,
which import torch late or not at all; stand-ins of tests share what needs no torch.
"""
