"""The trainer: a torchrun group that consumes packed batches, steps the optimizer, publishes weights and saves checkpoints.

`loop.train_runs` is the loop, `trained_run` the state of one run, `learning.train_step` one optimizer step, `ranks.launch` the start of
the group. Only rank 0 communicates with the orchestrator (`channel`). Other roles import only `ranks.launch` and `modeling.tiny_model`,
which import torch lazily or not at all; test doubles share the modules without torch.
"""
