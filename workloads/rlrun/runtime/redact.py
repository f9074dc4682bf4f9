"""Removal of secrets from messages, and from what leaves a machine in a bundle for a bug report. Pure.

Three nets: names of fields that hold secrets, shapes that only secrets have, and the values of this process's own secret variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REMOVED = "<removed>"
_NAMES = re.compile(
    r"(?i)(pass(word|wd|phrase)?|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|credential|authorization|cookie|bearer)"
)
_HARMLESS = re.compile(
    r"(?i)^(?:.*tokens?(?:[-_ ]?(?:per|id|ids|count|max|limit|budget|seconds|second).*)|(?:max|micro|min|completion|prompt|total|num|"
    r"batch|pad|eos|bos|stop|new|n)[-_a-z]*tokens?.*|tokenizer.*|tokens|.*/tokens|secret(?:s|name|keyref|ref)|imagepullsecrets|"
    r"automountserviceaccounttoken|credentials|serviceaccounttoken|.*[-_]?key[-_]?attempt|.*key[-_]?rotation.*)$"
)
"""Names that only look like those of secrets: counts of tokens, references to Secrets."""
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\bgh[opsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[A-Za-z0-9_-]{16,}|\bnpm_[A-Za-z0-9]{20,}|\bpypi-[A-Za-z0-9_-]{16,}|\bnvapi-[A-Za-z0-9_-]{16,}"
    r"|\bAIza[A-Za-z0-9_-]{30,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{8,}")
_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s:@]*:[^/\s@]+@")
_ASSIGNED = re.compile(
    r"""(?P<name>["']?[A-Za-z_][\w.-]*["']?)(?P<between>\s*[=:]\s*)(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s,;}\])"']+)"""
)
_FLAG = re.compile(r"(--[\w.-]+)(=|\s+)([^\s()\[\]{},;]+)")
_NOT_VALUES = ("$", "<", "…", "...")
"""Beginnings of what a message writes in place of a value: a variable of the shell, a placeholder."""
_LEAST = 6
"""Shorter values of variables are words that stand elsewhere, too."""


def is_secret(name: str) -> bool:
    """True if a field or a variable of this name holds a secret."""
    plain = name.strip("\"'").removeprefix("--")
    return _NAMES.search(plain) is not None and _HARMLESS.match(plain.rpartition(".")[2]) is None


def is_token(value: str) -> bool:
    """True if a text contains what only a secret looks like: a token by its shape, or an address with a password."""
    return _SHAPES.search(value) is not None or _IN_URL.search(value) is not None


def known_secrets(environment: Mapping[str, str]) -> list[str]:
    """Values of secret variables, longest first."""
    found = {value for name, value in environment.items() if is_secret(name) and len(value) >= _LEAST}
    return sorted(found, key=len, reverse=True)


def spans(content: str, secrets: list[str]) -> list[tuple[int, int]]:
    """Places of a text that are secrets for certain, as `(start, end)`: known values, and shapes that only secrets have."""
    found = [(at.start(), at.end()) for secret in secrets for at in re.finditer(re.escape(secret), content)]
    return sorted([*found, *(at.span() for at in _SHAPES.finditer(content))])


def certain(content: str, secrets: list[str]) -> str:
    """A text without what is a secret for certain.

    For texts of a model, in which `token = next(tokens)` is code to be read: `text` would take the word behind the name away.
    """
    for secret in secrets:
        content = content.replace(secret, REMOVED)
    return _SHAPES.sub(REMOVED, content)


def text(content: str, secrets: list[str]) -> str:
    """A text without secrets."""
    content = certain(content, secrets)
    content = _BEARER.sub(rf"\1\2{REMOVED}", content)
    content = _IN_URL.sub(rf"\1{REMOVED}@", content)
    content = _FLAG.sub(lambda m: f"{m[1]}{m[2]}{REMOVED}" if is_secret(m[1]) else m[0], content)
    return _ASSIGNED.sub(_assigned, content)


def _assigned(found: re.Match[str]) -> str:
    given = found["value"].strip("\"'")
    if (
        not is_secret(found["name"])
        or given.startswith(_NOT_VALUES)
        or found["value"]
        in (
            "null",
            "None",
            "true",
            "false",
            "{}",
            "[]",
            REMOVED,
            "{",
            "[",
        )
    ):
        return found[0]
    quote = found["value"][0] if found["value"][0] in "\"'" else ""
    return f"{found['name']}{found['between']}{quote}{REMOVED}{quote}"


def document(value: object, secrets: list[str], name: str = "") -> object:
    """A JSON document without secrets: texts of secret names, all literal values of `env`, and secrets within texts."""
    if isinstance(value, Mapping):
        if set(value) >= {"name", "value"}:  # a variable of a container
            hidden = REMOVED if is_secret(str(value["name"])) else document(value["value"], secrets)
            return {**value, "value": hidden}
        return {key: document(one, secrets, str(key)) for key, one in value.items()}
    if isinstance(value, list):
        flags = [None, *value]  # of a command line: the word behind `--token`
        secret = [isinstance(flag, str) and flag.startswith("--") and is_secret(flag) for flag in flags[:-1]]
        return [REMOVED if hide else document(one, secrets, name) for one, hide in zip(value, secret, strict=True)]
    if isinstance(value, str):
        return REMOVED if value and is_secret(name) else text(value, secrets)
    return value
