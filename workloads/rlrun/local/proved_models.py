"""Proofs that the trainer can train a model's architecture, made before the start for models in folders on this machine.

The proof needs torch, which a command line does not import and whose import takes longer than all other work of a launcher. Therefore a
proof runs in its own process, at the same time as the processes that load a run's environments.

The result is the same for the same files and packages, so proofs are stored on this machine and not repeated. A stored proof is an empty
file with a hash as its name. It replaces only the launcher's early check: the trainer repeats the proof at each start.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import rlrun
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.language_models import ModelConfig
from rlrun.environments.process.life import Command, Limits
from rlrun.hub.folder_weights import read_header
from rlrun.local.user_code import CodeCheck, Finding

_PACKAGES = ("torch", "transformers")
_OWN = ("trainer", "fit")
"""Packages of RLRun whose code a proof runs."""
_WEIGHTS = "*.safetensors"
_OTHERS = ("*.bin", "*.pt", "*.pth", "*.gguf")
"""Weights whose tensor names only torch can read."""


def proof_folder(variables: Mapping[str, str]) -> Path:
    """Return the folder of stored proofs, in the user's cache."""
    return Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlrun" / "proved"


def proof_name(folder: Path, *, seq_len: int) -> str | None:
    """Return a hash of all inputs of a model's proof: its configuration, the names and shapes of its tensors, and the code.

    Args:
        folder: folder of the model. Its own code must not be trusted, because it could do anything.
        seq_len: longest sequence of the run, in tokens.

    Returns:
        Hash, or None if the names of the tensors are unknown or a file cannot be read.
    """
    try:
        if any(True for pattern in _OTHERS for _ in folder.glob(pattern)):
            return None
        parts = [str(seq_len), *_package_versions(), *_proof_sources(), *_file_contents(folder)]
    except (OSError, PackageNotFoundError, ValueError):
        return None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def is_proved(name: str, variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether `keep_proof` was called with this name."""
    with suppress(OSError, RuntimeError):
        return (proof_folder(variables) / name).is_file()
    return False


def keep_proof(name: str, variables: Mapping[str, str] = os.environ) -> None:
    """Store a proof. If the folder cannot be written, the proof is repeated at the next start."""
    with suppress(OSError, RuntimeError):
        folder = proof_folder(variables)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def _package_versions() -> Iterator[str]:
    for package in _PACKAGES:
        yield f"{package} {version(package)}"


def _proof_sources() -> Iterator[str]:
    """Yield each module that a proof may run, with its size and modification time."""
    root = Path(rlrun.__file__).parent
    for room in _OWN:
        for path in sorted((root / room).rglob("*.py")):
            found = path.stat()
            yield f"{path.relative_to(root)} {found.st_size} {found.st_mtime_ns}"


def _file_contents(folder: Path) -> Iterator[str]:
    """Yield hashes of small files and of the headers of weights files."""
    for path in sorted(folder.glob("*.json")):
        yield f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    for path in sorted(folder.glob(_WEIGHTS)):
        yield f"{path.name} {path.stat().st_size} {hashlib.sha256(read_header(path)).hexdigest()}"


CHECK = "rlrun.trainer.proof.start_check:check_folder"
LIMITS = Limits(start_seconds=180.0, memory_bytes=16 * 1024**3)
"""Limits of a proof. Most of its time is the import of torch and transformers; a model's own code may run for any time."""


@dataclass(frozen=True)
class Proof:
    """A proof to make."""

    check: CodeCheck
    name: str | None
    """Name under which the proof is stored (see `keep_proof`), or None if it must not be stored."""


def list_proofs(models: Mapping[Key, ModelConfig], wrong: Collection[Key], *, seq_len: int) -> list[Proof]:
    """Return the proofs to make: models in folders on this machine, without another problem and without a stored proof."""
    found: list[Proof] = []
    for key, model in models.items():
        if model.path is None or key in wrong or not (folder := Path(model.path).absolute()).is_dir():
            continue
        has_code = model.trust_remote_code or model.class_ is not None  # which may change with equal files
        name = None if has_code else proof_name(folder, seq_len=seq_len)
        if name is None or not is_proved(name):
            args: dict[str, object] = {"path": str(folder), "trust_remote_code": model.trust_remote_code}
            if model.class_ is not None:
                args["model_class"] = model.class_
            command = Command(CHECK, args | {"seq_len": seq_len}, kind="check")
            found.append(Proof(CodeCheck(key, command, LIMITS), name))
    return found


def keep_proofs(made: Iterable[Proof], not_proved: Collection[Key]) -> None:
    """Store the proofs that were made, except for models whose field has a problem."""
    for proof in made:
        if proof.name is not None and not any(key == proof.check.key[: len(key)] for key in not_proved):
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
