"""String formats: a regular expression for the check, and a description for users, who never have to read the expression."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class Format:
    """Metadata of a string type: `Annotated[str, Format(...)]`. The CRD has the same check and the same description."""

    pattern: str
    """Regular expression of the whole string, without anchors, in the syntax common to Python and RE2."""
    words: str
    """Description of the string with examples, as the end of `expected ...`."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, value: str) -> str:
        """Return the string unchanged.

        Raises:
            ValueError: The string does not have this format.
        """
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"got {json.dumps(value, ensure_ascii=False)}, expected {self.words}")
        return value


@dataclass(frozen=True)
class Distinct:
    """Metadata of a list without duplicates: list type `map` or `set` in the CRD (`x-kubernetes-list-type`).

    Field managers that apply different items can then share the list. An item is always applied as a whole, so none of its fields may
    have a default.
    """

    key: str | None = None
    """Field that identifies an item; None: items are plain values."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, items: list[object]) -> list[object]:
        """Return the list unchanged.

        Raises:
            ValueError: Two items are equal.
        """
        keys = [item if self.key is None else getattr(item, self.key) for item in items]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                first = keys.index(key)
                what = f"{self.key} of items {first} and {i}" if self.key else f"items {first} and {i}"
                raise ValueError(f"got {json.dumps(key, ensure_ascii=False)} twice ({what}); remove one")
        return items


_SEGMENT = r"[^/\x00-\x1f]*[^/.\x00-\x1f][^/\x00-\x1f]*"
_MOUNTED = r"[^/:\x00-\x1f]*[^/:.\x00-\x1f][^/:\x00-\x1f]*"
"""Segment of a mount path, without a colon."""
RunFolder = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Format(
        rf"/?{_SEGMENT}(/{_SEGMENT})*/?",
        "the name of a run on the same volume, or a folder without '.' or '..' between its '/' and without unprintable characters",
    ),
]
VolumePath = Annotated[
    str,
    Field(min_length=1, max_length=256),
    Format(
        rf"{_MOUNTED}(/{_MOUNTED})*",
        "a path below the volume's mount, such as datasets/words, without '/' at its ends, '.', '..', ':' or unprintable characters",
    ),
]
GuestPattern = Annotated[
    str,
    Field(min_length=1, max_length=41),
    Format(
        r"[a-z]([-a-z0-9]*[a-z0-9])?|[a-z][-a-z0-9]*[*]|[*]",
        "the name of a run, or a prefix of names followed by *, such as ann-*",
    ),
]
RunName = Annotated[
    str,
    Field(min_length=1, max_length=40),
    Format(
        "[a-z]([-a-z0-9]*[a-z0-9])?",
        "the name of a run: lower-case letters, digits, and '-' between them, starting with a letter",
    ),
]
OperatorName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    Format(
        "[a-z0-9]([-a-z0-9]*[a-z0-9])?",
        "the operatorName of an operator's installation: lower-case letters, digits, and '-' between them",
    ),
]
DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{DNS_LABEL}(\.{DNS_LABEL})*"
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(SUBDOMAIN, "the name of a Kubernetes object: lower-case letters and digits, and '-' or '.' between them"),
]
"""An RFC 1123 subdomain."""
WebAddress = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Format(
        "https?://[!-.0-?A-~]+(/[!-~]*)?",
        "an address such as https://tracker.example.org, without spaces and credentials",
    ),
]
RESERVED_VARIABLES = "RLRUN_"
"""Prefix of RLRun's own environment variables, including the run's key."""


def _not_reserved(name: str) -> str:
    if name.startswith(RESERVED_VARIABLES):
        raise ValueError(f"got {json.dumps(name)}, a variable of RLRun that environments do not get; remove it")
    return name


_PRINTABLE = r"[^\x00-\x1f\x7f\x85]"
PrintableText = Annotated[
    str,
    Field(min_length=1, max_length=128),
    Format(f"{_PRINTABLE}*", "one line of printable text"),
]
_INNER = r"[^\x00-\x20\x7f\x85\xa0]"
PRINTABLE = Format(
    rf"{_INNER}({_PRINTABLE}*{_INNER})?",
    "text of one line without spaces at its ends",
)
"""Format of strings that appear in messages or are passed to a process unchanged."""
EnvironmentId = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        r"[A-Za-z0-9_][-A-Za-z0-9_.]*(:[A-Za-z0-9_][-A-Za-z0-9_./@]*)?",
        "an environment such as gsm8k, verifiers:wordle or my_package.module:function, without spaces",
    ),
]
EnvironmentName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    Format(
        r"[A-Za-z0-9_]([-/.:]*[A-Za-z0-9_])*",
        "a name for metrics and files such as gsm8k-hard: letters and digits, and '-', '_', '.', ':' or '/' between them",
    ),
]
_HUB_PART = r"[A-Za-z0-9_]([-A-Za-z0-9_.]*[A-Za-z0-9_])?"
HubName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        rf"{_HUB_PART}(/{_HUB_PART})?",
        "a repository on the hub such as Qwen/Qwen3-8B: letters, digits, '-', '_' and '.', with at most one '/'; "
        "set path for a folder",
    ),
]
Revision = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        r"[A-Za-z0-9_][-A-Za-z0-9_.+]*(/[A-Za-z0-9_][-A-Za-z0-9_.+]*)*",
        "a branch, tag or commit such as main, v1.0 or refs/pr/1, without spaces",
    ),
]
_ABSOLUTE = rf"(/{_SEGMENT})+/?"
_RELATIVE = r"[^-~/\x00-\x20]([^\x00-\x1f]*[^\x00-\x20])?"
FolderPath = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Format(
        rf"{_ABSOLUTE}|{_RELATIVE}",
        "a path such as /data/models/qwen, without '~' or unprintable characters; an absolute path has no '.' or '..' between its '/'",
    ),
]
ModelSource = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Format(
        rf"{_ABSOLUTE}|{_HUB_PART}(/{_HUB_PART})?",
        "initial, an absolute folder without '.' or '..' between its '/', or a repository on the hub such as Qwen/Qwen3-8B",
    ),
]
ModulePattern = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        r"[A-Za-z0-9_.*?\[\]!-]+",
        "the name of one module, or its end, such as q_proj or mlp.*; write each name as a separate item",
    ),
]
ClassPath = Annotated[
    str,
    Field(min_length=3, max_length=253),
    Format(
        r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*",
        "the import path of a class, such as my_package.models:MyForCausalLM",
    ),
]
Column = Annotated[str, Field(min_length=1, max_length=253), PRINTABLE]
ImageReference = Annotated[
    str,
    Field(min_length=1, max_length=512),
    Format(
        r"([A-Za-z0-9\[][-A-Za-z0-9]*[.:][]A-Za-z0-9.:-]*/)?[a-z0-9]+([-_./][-_.]*[a-z0-9]+)*"
        r"(:[A-Za-z0-9_][-A-Za-z0-9_.]*)?(@[a-z0-9][a-z0-9+._-]*:[0-9a-fA-F]+)?",
        "an image such as registry.example.com/team/app:1.2, with lower-case letters except in the tag, without spaces or https://",
    ),
]
ServerArgument = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Format(
        rf"--?[A-Za-z0-9.][^=\x00-\x20\x7f]*(={_PRINTABLE}*)?|[^-\x00-\x1f\x7f\x85]{_PRINTABLE}*",
        "--flag, --flag=value, or the value of the previous flag, each as a separate item and on one line",
    ),
]
VariableName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        r"[A-Za-z_][A-Za-z0-9_]*\*?",
        "the name of an environment variable such as OPENAI_API_KEY, or a prefix with a star such as AWS_*",
    ),
    AfterValidator(_not_reserved),
]
