"""Checks of a model or a weight folder before the engine is changed, without torch.

vLLM only warns about missing tensors in a checkpoint, and an engine whose reload failed half-way is lost. The header of a safetensors file
contains names, shapes and the file's length, so a folder can be checked completely before it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlrun.inference.engine_settings import InferenceSettings
from rlrun.protocol.files.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, COMPLETE
from rlrun.protocol.messages.buckets import MANIFEST, TensorInfo

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")

Shapes = dict[str, tuple[int, ...]]
"""Tensor name to shape."""


class FolderError(ValueError):
    """Error for a folder that cannot be loaded; the message contains the path and the missing part."""


def _file_shapes(file: Path) -> Shapes:
    """Return the names and shapes in one file's header; a truncated file raises `FolderError`."""
    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FolderError(f"{file} is not a complete safetensors file: {error}") from None


def tensor_shapes(folder: Path) -> Shapes:
    """Return names and shapes of all tensors in a folder's safetensors files; raises `FolderError`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FolderError(f"{folder} contains no *.safetensors file")
    if (folder / INDEX).is_file():
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            named = sorted(set(index["weight_map"].values()))
            files_of_it = all(Path(name).name == name for name in named)
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            files_of_it = False
        if not files_of_it:
            raise FolderError(f"{folder / INDEX} is not a valid safetensors index of files in the same folder")
        if missing := [name for name in named if not (folder / name).is_file()]:
            raise FolderError(f"{folder} lacks {missing[0]}, which {INDEX} lists")
        files = [folder / name for name in named]
    shapes: Shapes = {}
    for file in files:
        shapes |= _file_shapes(file)
    return shapes


def check_weights(path: str, weights_dir: str, expected: Shapes | None) -> Path:
    """Check the folder of a weight update and return its resolved path; raises `FolderError`.

    `expected` are the tensors of the model that the server was started with (None: unknown). The folder must contain exactly these: the
    engine keeps the old values of a missing tensor and fails on an unknown one.
    """
    folder = _published_folder(path, weights_dir)
    if (folder / MANIFEST).is_file():
        return folder  # a difference is checked when the whole version is built
    shapes = tensor_shapes(folder)
    for name, shape in (expected or {}).items():
        if name not in shapes:
            raise FolderError(f"{folder} lacks the tensor {name}, which the served model has")
        if shapes[name] != shape:
            raise FolderError(f"{folder}: tensor {name} has shape {shapes[name]}, the served model {shape}")
    if expected is not None and (unknown := sorted(set(shapes) - set(expected))):
        raise FolderError(f"{folder} contains the tensor {unknown[0]}, which the served model does not have")
    return folder


def problem_of_tensors(tensors: Sequence[TensorInfo], expected: Shapes | None) -> str | None:
    """Return why the trainer's tensors cannot be loaded, or None: they must be exactly the tensors of the served model (if known)."""
    if expected is None:
        return None
    coming = {tensor.name: tuple(tensor.shape) for tensor in tensors}
    for name, shape in expected.items():
        if coming.get(name) != shape:
            return f"the trainer's {name} has shape {coming.get(name)}, the served model's {shape}"
    if unknown := sorted(set(coming) - set(expected)):
        return f"the trainer sends {unknown[0]}, which the served model does not have"
    return None


def _published_folder(path: str, weights_dir: str) -> Path:
    """Return the resolved folder; it must be below `weights_dir` and complete."""
    folder, root = resolve_folder(path, weights_dir), resolve_folder("", weights_dir)
    if folder == root or not folder.is_relative_to(root):
        raise FolderError(f"{path} is not below the weights folder {root}")
    try:
        if not folder.is_dir():
            raise FolderError(f"{folder} does not exist or is not a folder")
        if not (folder / COMPLETE).is_file():
            raise FolderError(f"{folder} has no {COMPLETE} file: it is still being written, or its writer died")
    except OSError as error:  # an invalid file name, or a failing volume
        raise FolderError(f"{folder} cannot be read: {error.strerror}") from None
    return folder


def resolve_folder(path: str, weights_dir: str) -> Path:
    """Return the folder of a request (absolute, or relative to `weights_dir`) without links; it need not exist. Raises `FolderError`."""
    try:
        return (Path(weights_dir).resolve() / path).resolve()
    except (ValueError, OSError, RuntimeError):  # a null byte, invalid text, a cycle of links
        raise FolderError(f"{path!r} is not a path") from None


def check_adapter(path: str, weights_dir: str, expected: Shapes | None, max_rank: int) -> Path:
    """Check the folder of an adapter (PEFT format) and return its resolved path; raises `FolderError`.

    The rank is at most `max_rank`, and every A `[rank, in]` has a B `[out, rank]` that match a weight `[out, in]` of the served model
    (`expected`; None: unknown). vLLM would silently skip a part without its counterpart.
    """
    folder = _published_folder(path, weights_dir)
    try:
        rank = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["r"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        rank = None
    if type(rank) is not int:
        raise FolderError(f"{folder} is not an adapter: {ADAPTER_CONFIG} is missing, or has no rank r")
    if rank > max_rank:
        raise FolderError(f"{folder}: the adapter's rank {rank} is above {max_rank}, the maximum of this server")
    shapes = _file_shapes(folder / ADAPTER_WEIGHTS)
    for layer in sorted({name.removesuffix(end) for name in shapes for end in (_A, _B) if name.endswith(end)}):
        weight = f"{layer.removeprefix(_PREFIX)}.weight"
        if expected is not None and weight not in expected:
            raise FolderError(f"{folder} changes {weight}, which the served model does not have")
        out, into = expected[weight] if expected is not None else (None, None)
        for end, wanted in ((_A, (rank, into)), (_B, (out, rank))):
            found = shapes.get(layer + end)
            if found is None or (expected is not None and found != wanted):
                raise FolderError(f"{folder}: {layer}{end} has shape {found}, but the served model needs {wanted}")
    if not shapes or (unknown := sorted(name for name in shapes if not name.endswith((_A, _B)))):
        raise FolderError(
            f"{folder}: {unknown[0] if shapes else 'an empty file'} is not part of an adapter that vLLM supports"
        )
    return folder


def check_model(settings: InferenceSettings) -> Shapes | None:
    """Return the tensor shapes of the model to serve; None for a Hugging Face id, which vLLM resolves. Raises `FolderError`."""
    folder = Path(settings.model_path)
    if not folder.is_dir():
        if settings.model_path.startswith(("/", ".", "~")) or settings.model_path.count("/") > 1:
            raise FolderError(f"model: the folder {settings.model_path} does not exist")
        return None
    if not (folder / "config.json").is_file():
        raise FolderError(f"model: {folder} has no config.json; use a folder that save_pretrained wrote")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise FolderError(f"model: {folder} has no tokenizer ({TOKENIZER_FILES[0]}); save it in the same folder")
    if settings.language_model_only and find_spec("torchvision") is None:
        raise FolderError(
            f"model: {folder} has an encoder of images, and vLLM's classes of such models need torchvision, also without the encoder; "
            "run pip install torchvision==0.28.0"
        )
    try:
        return tensor_shapes(folder)
    except FolderError as error:
        raise FolderError(f"model: {error}") from None
