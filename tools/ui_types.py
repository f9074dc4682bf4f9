"""TypeScript types of the web page's answers, generated from their models: `python -m tools.ui_types --write`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlrun.ui import rollout_answers, run_answers

FILE = Path(__file__).parents[1] / "workloads/rlrun/ui/web/src/answers.ts"
_HEAD = "// Made by `python -m tools.ui_types --write` from rlrun/ui/models.\n"
_PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def text() -> str:
    """Return the file."""
    return _HEAD + "".join(_interfaces())


def _interfaces() -> Iterator[str]:
    for name, found in _answers():
        schema = found.model_json_schema(mode="serialization")
        fields = "".join(f"  {key}: {_type(one)};\n" for key, one in schema["properties"].items())
        yield f"\nexport interface {name} {{\n{fields}}}\n"


def _answers() -> Iterator[tuple[str, type[run_answers.Answer]]]:
    """Return models by name, in the order of their declaration."""
    for module in (run_answers, rollout_answers):
        for name, found in vars(module).items():
            if isinstance(found, type) and issubclass(found, run_answers.Answer) and found is not run_answers.Answer:
                yield name, found


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    if schema["type"] == "array" and "prefixItems" in schema:
        return f"[{', '.join(_type(one) for one in schema['prefixItems'])}]"
    if schema["type"] == "array":
        inner = _type(schema["items"])
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    return _PLAIN[schema["type"]]


def main(words: Sequence[str]) -> int:
    """Write the file, or report whether it is up to date; return the exit code."""
    if words == ["--write"]:
        FILE.write_text(text())
        return 0
    if FILE.read_text() == text():
        return 0
    print(f"{FILE} differs from the models; run: python -m tools.ui_types --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
