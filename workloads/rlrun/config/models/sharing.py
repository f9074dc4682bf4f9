"""Compatibility of runs that share a trainer. The operator checks it first, and the trainer again."""

from __future__ import annotations

from rlrun.config.models.roles import TrainerConfig


def sharing_refusal(host: TrainerConfig, guest: TrainerConfig) -> str | None:
    """Return why a run cannot use the host's trainer (field, value and fix), or None if it can. Pure."""
    if guest.shared_with != host.name or guest.lora is None or host.lora is None:
        return (
            f"trainer.sharedWith is {guest.shared_with}, but this is the trainer of {host.name}; set it to {host.name}"
        )
    if guest.model != host.model:
        return f"model differs from the model of {host.name}, whose trainer holds only one model; make them equal"
    if guest.lora.rank > host.lora.rank:
        return (
            f"trainer.lora.rank ({guest.lora.rank}) is higher than the rank of {host.name} ({host.lora.rank}); "
            f"lower it to at most {host.lora.rank}"
        )
    if guest.lora.dropout > 0 and host.parallelism.tp > 1:
        return (
            f"trainer.lora.dropout ({guest.lora.dropout}) needs a trainer without tensor parallelism, but {host.name} has "
            f"parallelism.tp {host.parallelism.tp}; set dropout: 0"
        )
    mine, theirs = sorted(guest.lora.targets), sorted(host.lora.targets)
    if mine != theirs:
        return f"trainer.lora.targets ({mine or 'all'}) differ from those of {host.name} ({theirs or 'all'}); make them equal"
    if guest.algorithm.critic is not None:
        return "algorithm.critic is a full model, which a shared trainer cannot hold; remove it, or remove trainer.sharedWith"
    wanted, limit = guest.micro_batch_tokens or guest.seq_len, host.micro_batch_tokens or host.seq_len
    if wanted > limit:
        return (
            f"trainer.microBatchTokens ({wanted}) is higher than the limit of {host.name} ({limit}), whose memory it shares; "
            f"lower it to at most {limit}"
        )
    return None
