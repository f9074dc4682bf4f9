"""Loading of the run's tokenizer, if possible without torch."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERIC = "TokenizersBackend"
"""Class name that transformers writes for a tokenizer that consists only of its `tokenizer.json`."""
_TEXT_CONFIGS = ("text_config", "llm_config", "thinker_config")
"""Keys under which multimodal models keep the configuration of their language model."""
_MODEL_TYPE = "llama"
"""Only model type that is loaded without AutoTokenizer. For other types AutoTokenizer corrects files that name the
wrong class.
"""


def load_tokenizer(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name, with the same result as `AutoTokenizer`.

    AutoTokenizer imports torch, which costs seconds of CPU time and 600 MB. A folder that names the generic class (tiny
    models do) is therefore loaded directly.

    Raises:
        OSError, ValueError: the tokenizer is missing or unreadable.
    """
    if _is_generic(Path(source)):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(source))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(source), revision=revision or "main", trust_remote_code=trust_remote_code)


def stored_ends(source: str | Path, *, revision: str | None = None) -> tuple[int, ...]:
    """Return the ids of `eos_token_id` in the model's `generation_config.json`, at which the engine stops; empty
    without the file.

    Raises:
        OSError, ValueError: the file is unreadable or the value is not an id or a list of ids.
    """
    from transformers.utils.hub import cached_file

    file = cached_file(
        str(source),
        "generation_config.json",
        revision=revision or "main",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
    )
    if file is None:
        return ()
    ends = json.loads(Path(file).read_bytes()).get("eos_token_id")
    found = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(id) is int for id in found):
        raise ValueError(f"{file}: eos_token_id is {ends!r}; expected a number or a list of numbers")
    return tuple(found)


def preload_modules() -> None:
    """Import the modules of `load_tokenizer`, which takes a second, while the trainer starts.

    Must not run in parallel with another thread that imports transformers, which fills its namespace during the import.
    """
    with suppress(ImportError):  # `load_tokenizer` reports it
        from transformers import PreTrainedTokenizerFast  # noqa: F401


def read_vocabulary_size(source: str | Path, *, revision: str | None = None) -> int | None:
    """Return `vocab_size` of a model folder or hub name, or None if its `config.json` is unreadable or has no such
    value.

    It is often larger than the tokenizer: models pad their embedding and also sample ids of the padding.
    """
    file = Path(source) / "config.json"
    try:
        if not Path(source).is_dir():
            from transformers.utils import cached_file

            file = Path(cached_file(str(source), "config.json", revision=revision or "main"))
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, TypeError):
        return None
    texts = [document, *(document.get(name) for name in _TEXT_CONFIGS)] if isinstance(document, dict) else []
    sizes = [text.get("vocab_size") for text in texts if isinstance(text, dict)]
    # The largest: a multimodal model may have several values, and no valid id may be refused.
    return max((size for size in sizes if type(size) is int and size > 0), default=None)


def _is_generic(folder: Path) -> bool:
    try:
        tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
        model = json.loads((folder / "config.json").read_bytes())
        return (tokenizer.get("tokenizer_class"), model.get("model_type")) == (
            _GENERIC,
            _MODEL_TYPE,
        ) and "auto_map" not in tokenizer
    except (OSError, ValueError, AttributeError):
        return False
