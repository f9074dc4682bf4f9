"""Agreement between runs that share a trainer. Both trainer and operator refuse a run by it, the operator first."""

from __future__ import annotations

from rlrun.config.models.roles import TrainerConfig


def sharing_refusal(host: TrainerConfig, guest: TrainerConfig) -> str | None:
    """Reason why a run cannot be trained in the host's trainer: the field, its value and the fix. None when it can. Pure."""
    if guest.shared_with != host.name or guest.lora is None or host.lora is None:
        return (
            f"trainer.sharedWith is {guest.shared_with}, but this is the trainer of {host.name}; set it to {host.name}"
        )
    if guest.model != host.model:
        return f"model is another one than that of {host.name}, whose trainer holds one model; make them the same"
    if guest.lora.rank > host.lora.rank:
        return (
            f"trainer.lora.rank ({guest.lora.rank}) is more than that of {host.name} ({host.lora.rank}); "
            f"lower it to at most {host.lora.rank}"
        )
    if guest.lora.dropout > 0 and host.parallelism.tp > 1:
        return (
            f"trainer.lora.dropout ({guest.lora.dropout}) needs a trainer without tensor parallelism, {host.name} has "
            f"parallelism.tp {host.parallelism.tp}; set dropout: 0"
        )
    mine, theirs = sorted(guest.lora.targets), sorted(host.lora.targets)
    if mine != theirs:
        return f"trainer.lora.targets ({mine or 'all'}) are not those of {host.name} ({theirs or 'all'}); make them the same"
    if guest.algorithm.critic is not None:
        return "algorithm.critic is a whole model beside the shared one; remove it, or remove trainer.sharedWith to train alone"
    wanted, limit = guest.micro_batch_tokens or guest.seq_len, host.micro_batch_tokens or host.seq_len
    if wanted > limit:
        return (
            f"trainer.microBatchTokens ({wanted}) is more than that of {host.name} ({limit}), whose memory it shares; "
            f"lower it to at most {limit}"
        )
    return None
