"""Proof that the trainer can train a model's architecture, made before the start if the model is a folder on this machine.

The proof needs torch, which a command line does not import. Therefore it runs in its own process, at the same time as those that load a
run's environments. A proof that was made on this machine before is not repeated (`shared.proved`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.model import ModelConfig
from rlrun.environments.process.life import Command, Limits
from rlrun.local.shared.proved import is_proved, keep_proof, proof_name
from rlrun.local.user_code import Finding, Piece

CHECK = "rlrun.trainer.proof.start_check:check_folder"
LIMITS = Limits(start_seconds=180.0, memory_bytes=16 * 1024**3)
"""Limits of a proof. Most of its time is the import of torch and transformers; a model's own code may run for any time."""


@dataclass(frozen=True)
class Proof:
    """A proof to make."""

    piece: Piece
    name: str | None
    """Name under which the proof is stored (`shared.proved`), or None if it must not be stored."""


def list_proofs(models: Mapping[Key, ModelConfig], wrong: Collection[Key], *, seq_len: int) -> list[Proof]:
    """Return the proofs to make: models in folders on this machine, without another problem and without a stored proof."""
    found: list[Proof] = []
    for key, model in models.items():
        if model.path is None or key in wrong or not (folder := Path(model.path).absolute()).is_dir():
            continue
        name = None if model.trust_remote_code else proof_name(folder, seq_len=seq_len)
        if name is None or not is_proved(name):
            args = {"path": str(folder), "trust_remote_code": model.trust_remote_code}
            command = Command(CHECK, args | {"seq_len": seq_len}, kind="check")
            found.append(Proof(Piece(key, command, LIMITS), name))
    return found


def keep_proofs(made: Iterable[Proof], not_proved: Collection[Key]) -> None:
    """Store the proofs that were made, except for models whose field has a problem."""
    for proof in made:
        if proof.name is not None and not any(key == proof.piece.key[: len(key)] for key in not_proved):
            keep_proof(proof.name)


def unproved_notices(models: Mapping[Key, ModelConfig]) -> Iterator[Finding]:
    """Yield notices about models that are not on this machine."""
    for key, model in models.items():
        if model.name is not None:
            yield Finding(
                key,
                f"{model.name} is not on this machine, so it is not checked here: at the start the trainer checks the architecture "
                "before it reads weights, and the orchestrator checks the chat template",
                notice=True,
            )
