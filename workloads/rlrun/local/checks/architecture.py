"""The trainer's proof that it can train a model's architecture, made before anything starts where the model is a folder here.

The proof needs torch, which a command line does not import: it runs in a process of its own, beside those that load a run's environments.
One that was made on this machine before is not made again (`shared.proved`).
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
"""Limits of a proof: most of its time is the import of torch and transformers; a model's own code may do anything."""


@dataclass(frozen=True)
class Proof:
    """A proof to make."""

    piece: Piece
    name: str | None
    """Name under which it is remembered (`shared.proved`); None: it is not."""


def list_proofs(models: Mapping[Key, ModelConfig], wrong: Collection[Key], *, seq_len: int) -> list[Proof]:
    """Proofs to make, of the models that are folders here and have no other problem, but those made before."""
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
    """Remember those that were made, but for those of these fields."""
    for proof in made:
        if proof.name is not None and not any(key == proof.piece.key[: len(key)] for key in not_proved):
            keep_proof(proof.name)


def unproved_notices(models: Mapping[Key, ModelConfig]) -> Iterator[Finding]:
    """Notices of models that are not at hand."""
    for key, model in models.items():
        if model.name is not None:
            yield Finding(
                key,
                f"{model.name} is not on this machine: the trainer checks at its start, before it reads weights, whether it can "
                "train this architecture, and the orchestrator whether it can play its chat template",
                notice=True,
            )
