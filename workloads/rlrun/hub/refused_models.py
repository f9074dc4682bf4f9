"""Rejection of models: pickled weights, and architectures that cannot be trained.

RLRun reads weights only from safetensors. An untrainable model is rejected before a role downloads or reads its weights.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rlrun.config.families import training_refusal, unquantized_name
from rlrun.config.model_heads import TEXT_MODEL
from rlrun.hub.repository import show_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
"""Weights files that Python reads as a pickle, which can contain a program."""
_ADAPTER, _PIPELINE, _SENTENCES = "adapter_config.json", "model_index.json", "modules.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors",)
_MERGE = (
    "import sys; from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; a, b = sys.argv[1:]; "
    "m = M.from_pretrained(a, dtype='auto'); T.from_pretrained(m.peft_config['default'].base_model_name_or_path).save_pretrained(b); "
    "m.merge_and_unload().save_pretrained(b)"
)
"""Program that merges an adapter into its base model; it needs the package `peft`."""
_CONVERT = (
    "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; a, b = sys.argv[1:]; "
    "M.from_pretrained(a, dtype='auto', use_safetensors=False).save_pretrained(b); T.from_pretrained(a).save_pretrained(b)"
)
"""Conversion program. transformers reads only tensors from such a file (`weights_only`); the sandbox that the message recommends
is an additional protection."""


def convert_command(source: str, target: str) -> str:
    """Return the command that converts a model to safetensors.

    Args:
        source: folder, or name on the hub.
        target: new folder.
    """
    return shlex.join(["python", "-c", _CONVERT, source, target])


def refuse_other_formats(folder: Path, field: str, source: str) -> None:
    """Reject a folder without the weights of a model in safetensors.

    Args:
        folder: folder of the model.
        field: manifest field of the model.
        source: value of the field.

    Raises:
        RoleError: contains the file that shows the format, and the fix.
    """
    if (refusal := format_refusal(folder, source)) is not None:
        raise RoleError(f"{field}: {refusal}", exit_codes.DATA)


def format_refusal(folder: Path, source: str) -> str | None:
    """Return why a folder has no weights that RLRun reads, with the fix: an adapter, GGUF, a diffusion pipeline or pickles.

    Returns None for a folder with weights in safetensors, and for one without any weights.

    Args:
        folder: folder of the model.
        source: folder or name of the model in messages.
    """
    if any(file.name not in _ADAPTER_WEIGHTS for file in folder.glob("*.safetensors")):
        return None
    if (adapter := folder / _ADAPTER).is_file():
        return _adapter_refusal(adapter, source)
    if (folder / _PIPELINE).is_file() and not (folder / "config.json").is_file():
        return f"{source} is a pipeline of diffusers ({_PIPELINE}), not a language model; use a text model, such as {TEXT_MODEL}"
    if found := sorted(path.name for path in folder.glob("*.gguf")):
        return (
            f"{source} has only weights for llama.cpp ({found[0]}), and the trainer reads safetensors; use the repository that they "
            f"were made from{_original_of(source)}"
        )
    if found := sorted(path.name for pattern in PICKLED for path in folder.glob(pattern)):
        return _describe_pickles(source, found[0])
    return None


def _adapter_refusal(file: Path, source: str) -> str:
    try:
        base = json.loads(file.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        return (
            f"{source} is an adapter ({_ADAPTER}) without the model's weights, and does not name its base model; set "
            f"base_model_name_or_path in {_ADAPTER} and merge the adapter, or use its base model"
        )
    return (
        f"{source} is an adapter of {base} ({_ADAPTER}) without the model's weights; use {base}, or merge the adapter first and use the "
        f"new folder: {shlex.join(['python', '-c', _MERGE, source, f'{Path(source).name}-merged'])}"
    )


def _embedding_refusal(file: Path, shown: str) -> str | None:
    """Return why a model with the file `modules.json` of sentence-transformers is not trained, or None.

    Its class may be causal: Qwen3-Embedding is a `Qwen3ForCausalLM` with a tied head, and its logits mean nothing.
    """
    try:
        modules = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    kinds = (
        [str(module.get("type")) for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    )
    if not any(kind.startswith("sentence_transformers.") for kind in kinds):
        return None
    return (
        f"{shown} is an embedding model of sentence-transformers ({_SENTENCES}), not a language model; use the language model that it "
        f"was made from, or another one, such as {TEXT_MODEL}; if it is a language model, delete {_SENTENCES} from its folder"
    )


def _original_of(source: str) -> str:
    base = unquantized_name(source)
    return "" if base is None else f", such as {base}"


def pickle_refusal(field: str, source: str, file: str = "") -> str:
    """Return the message about a model without safetensors.

    Args:
        field: manifest field of the model.
        source: value of the field.
        file: name of one of its pickles, or an empty text if unknown.
    """
    return f"{field}: {_describe_pickles(source, file)}"


def _describe_pickles(source: str, file: str) -> str:
    seen = f" ({file} is a pickle)" if file else ""
    target = f"{Path(source).name}-safetensors"
    return (
        f"{source} has no safetensors weights{seen}, and RLRun reads no pickles: they can contain programs. "
        f"Convert the model in a sandbox, then set model.path to the new folder: {convert_command(source, target)}"
    )


def untrainable_reason(folder: Path, name: str | None = None, *, own_class: bool = False) -> str | None:
    """Return why the trainer cannot train a model, by the configuration in its folder.

    Returns None if no reason is known. It also returns None if the configuration cannot be read, which other checks report.

    Args:
        folder: folder with `config.json`.
        name: name of the model in messages. Default: the folder.
        own_class: whether the run has its own class for the model (`model.class`).
    """
    config, shown = read_config(folder), name or show_source(str(folder))
    if config is not None:
        refusal = training_refusal(config, shown, own_class=own_class)
        return refusal if refusal is not None or own_class else _embedding_refusal(folder / _SENTENCES, shown)
    # A folder of the hub's cache may lack its weights still, but an adapter or a pipeline has no config.json.
    return format_refusal(folder, shown) if folder.is_dir() else None


def read_config(folder: Path) -> dict[str, object] | None:
    """Return the content of a model's `config.json`, or None if it cannot be read, which other checks report."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def refuse_untrainable(folder: Path, field: str, name: str | None = None, *, own_class: bool = False) -> None:
    """Reject a model that the trainer cannot train.

    Args:
        folder: folder with `config.json`.
        field: manifest field of the model.
        name: name of the model on the hub. Default: the folder.
        own_class: whether the run has its own class for the model (`model.class`).

    Raises:
        RoleError: contains the field, the model and the fix.
    """
    if (fault := untrainable_reason(folder, name, own_class=own_class)) is not None:
        raise RoleError(f"{field}: {fault}", exit_codes.CONFIGURATION)
