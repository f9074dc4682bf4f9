"""Loads the run's tokenizer, without torch where that can be."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERIC = "TokenizersBackend"
"""The class that transformers writes for a tokenizer that is its `tokenizer.json` and nothing more."""
_MODEL_TYPE = "llama"
"""Only type accepted: of other types AutoTokenizer knows models whose files name the wrong class."""


def load_tokenizer(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name, as `AutoTokenizer` finds it.

    AutoTokenizer imports torch, which costs seconds of CPU and 600 MB. So a folder that says itself which class it wants (tiny models do)
    is given that class.

    Raises:
        OSError, ValueError: there is no tokenizer, or it cannot be read.
    """
    if _is_generic(Path(source)):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(source))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(source), revision=revision or "main", trust_remote_code=trust_remote_code)


def preload() -> None:
    """Import what `load_tokenizer` mostly needs: that takes a second, and while the trainer starts there is nothing else to do.

    Never beside another thread that imports the same: transformers fills its names while it is imported.
    """
    with suppress(ImportError):  # `load_tokenizer` reports it
        from transformers import PreTrainedTokenizerFast  # noqa: F401


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
