"""Quantization of a model's files by its `config.json`: the formats that the trainer reads, and refusals of all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

READ_FORMATS = "FP8 with scales per block or per tensor (quant_method fp8), and MXFP4 (quant_method mxfp4)"
"""Formats that the trainer reads, for messages."""
_KNOWN = {"compressed-tensors": "compressed-tensors", "bitsandbytes": "bitsandbytes"}
_SECTIONS = ("quantization_config", "compression_config")


class UnreadableFormatError(ValueError):
    """Error for a quantized repository that the trainer cannot read; the message names format and reason."""


@dataclass(frozen=True)
class Quantization:
    """Format of a quantized repository."""

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] | None = None
    """FP8: rows and columns that share a scale; None: one scale for each tensor."""


def read_quantization(config: Mapping[str, object]) -> Quantization | None:
    """Return the format of a model's weights, or None if they are not quantized.

    Args:
        config: content of the model's `config.json`.

    Raises:
        UnreadableFormatError: the trainer cannot read the format.
    """
    found = next((section for part in config_parts(config) for section in _sections(part)), None)
    if found is None:
        return None
    method = quantization_method(config)
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method != "fp8":
        raise UnreadableFormatError(f"the format {method} is not read")
    if (layout := found.get("fmt")) not in (None, "e4m3", "float8_e4m3fn"):
        raise UnreadableFormatError(f"fp8 with fmt {layout} is not read, only e4m3")
    block = found.get("weight_block_size")
    if block is None:
        return Quantization("fp8")
    given = list(block) if isinstance(block, list | tuple) else [block]
    sizes = [size for size in given if type(size) is int and size > 0]
    if len(sizes) != 2 or sizes != given:
        raise UnreadableFormatError(f"fp8 with weight_block_size {block} is not read, only two positive whole numbers")
    return Quantization("fp8", (sizes[0], sizes[1]))


def quantization_method(config: Mapping[str, object]) -> str | None:
    """Return the name of the method of a model's weights, or None if they are not quantized."""
    for part in config_parts(config):
        for found in _sections(part):
            if method := found.get("quant_method"):
                return _KNOWN.get(str(method), str(method))
            return "bitsandbytes" if found.get("load_in_4bit") or found.get("load_in_8bit") else "an unknown method"
    return None


def without_quantization(config: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration without the quantization of the model and of its parts."""
    return {
        name: without_quantization(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _SECTIONS
    }


def config_parts(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield a configuration, and the configuration of its text part."""
    yield config
    text = config.get("text_config") or config.get("language_config") or config.get("llm_config")
    if isinstance(text, Mapping):
        yield text


def _sections(part: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    for name in _SECTIONS:
        if isinstance(found := part.get(name), Mapping):
            yield found
