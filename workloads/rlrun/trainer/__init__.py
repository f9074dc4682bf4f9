"""The trainer: a torchrun group that consumes packed batches, steps the optimizer, publishes weights and saves checkpoints.

`main.run` is the loop, `launch` starts the group, `step` is one optimizer step; rank 0 alone talks to the orchestrator (`channel`).
Nothing here is imported by the other roles except `launch`, `tiny_model` and `errors`, which import torch late or not at all;
`rlrun.stub` shares what needs no torch.
"""
