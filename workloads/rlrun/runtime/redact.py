"""Removal of secrets from messages, bug reports, trackers, the web page and logs.

Pure. A text passes five filters: names of fields that hold secrets, shapes that only secrets have (`secret_shapes`), base64 of either,
words that look random, and the values of this process's own secret variables. A configuration also passes an allow-list (`secret_shapes`).

`LogLines` also removes characters that control a terminal.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from urllib.parse import quote

from rlrun.runtime import secret_shapes
from rlrun.runtime.printable import escape_controls
from rlrun.runtime.secret_shapes import ANY

REMOVED = "<removed>"
"""Replacement of a secret."""
HIDDEN = "<hidden>"
"""Replacement of a free-form value that is not known to be harmless."""
_NAMES = re.compile(
    r"(?i)(pass(word|wd|phrase|code)|(?:^|[-_.])pass$|pwd|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|credential|authorization"
    r"|cookie|bearer|account[-_]?key|shared[-_]?key|signing[-_]?key|encryption[-_]?key|master[-_]?key|session[-_]?key|ssh[-_]?key|auth[-_]?key"
    r"|client[-_]?key|(?:^|[-_.])_?auth$|(?:^|[-_.])(?:dsn|jwt|psk|sas|netrc)$|webhook|[-_]signature$|connection[-_]?string|dockerconfig)"
)
_FOLDERS = ("PWD", "OLDPWD")
"""Shell variables with folders, whose names look like those of passwords."""
_HARMLESS = re.compile(
    r"(?i)^(?:.*tokens?(?:[-_ ]?(?:per|id|ids|count|max|limit|budget|seconds|second).*)|(?:max|micro|min|completion|prompt|total|num|"
    r"batch|pad|eos|bos|stop|new|n)[-_a-z]*tokens?.*|tokenizer.*|tokens|.*/tokens|secret(?:s|name|keyref|ref)|imagepullsecrets|"
    r"automountserviceaccounttoken|credentials|serviceaccounttoken|.*[-_]?key[-_]?attempt|.*key[-_]?rotation.*)$"
)
"""Names that only look like names of secrets: counts of tokens, references to Secrets."""
_BEARER = re.compile(r"(?i)\b(bearer|basic|token|apikey)(\s+)(?=\S*[0-9=]|(?-i:\S*[a-z][A-Z]))[A-Za-z0-9._~+/=-]{8,}")
_HEADER = re.compile(
    r"""(?i)(\b(?:proxy-)?authorization|\b(?:set-)?cookie|\bx-[a-z-]{0,40}(?:api-key|token|auth|secret|signature|credential)[a-z-]{0,40})"""
    r"""(\\?["']?\s*[:=]\s*\\?["']?)([^"'\\\r\n]+)"""
)
_IN_URL = re.compile(
    r"""(\b[a-z][a-z0-9+.-]{0,40}://)(?!git@)(?:[^/\s:@"'<>]{0,256}:(?!\d{1,5}(?:[/?\#"'\s]|$))[^\s@"'<>]{1,512}"""
    r"""|[^/\s:@"'<>]{1,512})@(?=[\w\[.-])""",
    re.IGNORECASE,
)
_IN_QUERY = re.compile(r"""([?&;])([A-Za-z_][\w.-]*)=([^&\s"'<>\#;]+)""")
_QUERY_NAMES = frozenset(
    {"sig", "signature", "key", "code", "auth", "pass", "pwd", "sv", "hmac", "x-amz-credential", "x-goog-credential"}
)
_ASSIGNED = re.compile(
    r"""(?P<name>\\?["']?(?<![\w.-])[\w.-]+\\?["']?)(?P<between>[ \t]*(?:=>|[=:])[ \t]*)"""
    r"""(?P<value>\\"(?:[^"\\\n]|\\\\[^\n"])*\\?"|"(?:[^"\\\n]|\\[^\n])*"?|'(?:[^'\\\n]|\\[^\n])*'?"""
    r"""|(?:(?!\\+n[ \t]*[\w.-]+[ \t]*[:=])[^\s,;}\])"'])+)"""
)
_LINE = re.compile(
    r"(?im)^([ \t]*(?:-[ \t]+)?(?:export[ \t]+)?[\w.-]*(?:password|passphrase|passwd|secret)\s*[:=][ \t]+)"
    r"([^\s\"'{\[|>$<].*[ \t]\S.*)$"
)
"""Line with a name and a value of several words, as in YAML."""
_BLOCK = re.compile(
    r"""((?<![\w.-])[\w.-]+\\*["']?[ \t]*[:=][ \t]*(?:[|>][-+]?\d?|(?=(?:\n|\\+n)[ \t]*\\*["'])|\\)"""
    r"""[ \t]*(?:\n|\\+n)[ \t]*)(\S[^\n\\]*)"""
)
"""Name whose value is on the next line."""
_ELEMENT = re.compile(r"<([A-Za-z_][\w.-]*)>([^<>\n]+)(?=</)")
_FLAG = re.compile(r"""((?<![\w-])--?[\w.-]+)(=|\s+|\\?["'],\s*\\?["'])("[^"\n]*"?|'[^'\n]*'?|[^\s()\[\]{},;"']+)""")
_NETRC = re.compile(r"(?i)\b(login\s+\S+\s+password\s+)\S+")
_NOT_VALUES = ("$", "<", "…", "...")
"""Prefixes of texts that replace a value in messages: a shell variable, a placeholder."""
_PLAIN_VALUES = ("null", "None", "true", "false", "{}", "[]", REMOVED, HIDDEN, "{", "[", "|", ">", "-")
_LEAST = 6
"""Minimum length of a known secret; shorter values are words that also occur elsewhere."""
_ENCODED = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{16,}={0,2}")
_RANDOM = re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{20,}={0,2}")
_CHANGES = 0.42
"""Share of changes between lower case, upper case and digits in random text: 0.62 on average; CamelCase has 0.3."""
_WRAP = re.compile(r"(?<=[A-Za-z0-9_+/=.-])(?:\\*\r?\n[ \t]*|\\+n[ \t]*|\\+[ \t]+)(?=[A-Za-z0-9_+/=.-])")
_NESTED = 4
"""Maximum depth of assignments within the value of an assignment, such as JSON in JSON."""
_DEPTH = 2
"""Maximum layers of base64 that are decoded: a Secret's value may itself be base64."""


def is_secret(name: str) -> bool:
    """Return whether a field or a variable of this name holds a secret."""
    plain = name.strip("\\\"'").lstrip("-")
    return _NAMES.search(plain) is not None and _HARMLESS.match(plain.rpartition(".")[2]) is None


def is_token(value: str) -> bool:
    """Return whether a text contains a token by its shape, or an address with a password."""
    return ANY.search(value) is not None or _IN_URL.search(value) is not None


def known_secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the values of secret variables in plain form, in base64, in URLs and in JSON, longest first."""
    found: set[str] = set()
    for name, value in environment.items():
        if is_secret(name) and name not in _FOLDERS and len(value) >= _LEAST:
            raw = value.encode(errors="surrogateescape")
            found |= {
                value,
                quote(value, safe=""),
                json.dumps(value)[1:-1],
                base64.b64encode(raw).decode(),
                base64.urlsafe_b64encode(raw).decode(),
            }
    return sorted(found, key=len, reverse=True)


def certain_spans(content: str, secrets: list[str]) -> list[tuple[int, int]]:
    """Return the places of certain secrets in a text, as `(start, end)`: known values, and shapes that only secrets have."""
    found = [(at.start(), at.end()) for secret in secrets for at in re.finditer(re.escape(secret), content)]
    found += [at.span() for at in ANY.finditer(content)]
    return sorted({*found, *_wrapped_spans(content), *_encoded_spans(content, secrets, 1)})


def _wrapped_spans(content: str) -> Iterator[tuple[int, int]]:
    """Yield places of shapes that contain a line break."""
    breaks = [at.span() for at in _WRAP.finditer(content)]
    if not breaks:
        return
    # Positions in the joined text, in which every break is empty, and in the original.
    starts, pieces, joined, before = [0], [], 0, 0
    for start, end in breaks:
        pieces.append(content[before:start])
        joined += start - before
        starts.append(joined)
        before = end
    pieces.append(content[before:])
    origins, whole = [0, *(end for _, end in breaks)], "".join(pieces)
    for at in ANY.finditer(whole):
        crossed = [i for i, place in enumerate(starts[1:], 1) if at.start() < place < at.end()]
        if not crossed:
            continue
        first = max(i for i, place in enumerate(starts) if place <= at.start())
        last = first
        for i in crossed:  # an unrelated next line is a word, not a piece of a token
            piece = whole[starts[i] : min(at.end(), starts[i + 1] if i + 1 < len(starts) else len(whole))]
            if not (re.search(r"[0-9]|[a-z][A-Z]|={1,2}$", piece) or len(piece) >= 16):
                break
            last = i
        end = min(at.end(), starts[last + 1]) if last + 1 < len(starts) else at.end()
        if last > first:
            yield origins[first] + at.start() - starts[first], origins[last] + end - starts[last]


def _encoded_spans(content: str, secrets: list[str], depth: int = _DEPTH) -> Iterator[tuple[int, int]]:
    """Yield places of base64 that contains a secret."""
    for at in _ENCODED.finditer(content):
        decoded = _decode_word(at[0])
        if decoded is not None and (
            any(secret in decoded for secret in secrets)
            or ANY.search(decoded)
            or _redact_named(decoded) != decoded
            or (depth > 1 and next(_encoded_spans(decoded, secrets, depth - 1), None) is not None)
        ):
            yield at.span()


def _decode_word(word: str) -> str | None:
    """Return the text that a word encodes in base64, or None."""
    word = word.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        decoded = base64.b64decode(word + "=" * (-len(word) % 4), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if all(c.isprintable() or c in "\n\r\t" for c in decoded) else None


def redact_certain(content: str, secrets: list[str]) -> str:
    """Return a text without certain secrets.

    For texts of a model, in which `token = next(tokens)` is code to be read: `redact_text` would remove the word after the name.
    """
    end, pieces = 0, []
    for start, stop in certain_spans(content, secrets):
        if start >= end:
            pieces += [content[end:start], REMOVED]
        end = max(end, stop)
    return "".join([*pieces, content[end:]])


def redact_text(content: str, secrets: list[str]) -> str:
    """Return a text without secrets."""
    content = _redact_named(redact_certain(content, secrets))
    found = list(_encoded_spans(content, secrets))
    for start, end in reversed(found):
        content = content[:start] + REMOVED + content[end:]
    return _RANDOM.sub(lambda m: REMOVED if _is_random(m[0]) else m[0], content)


def _redact_named(content: str) -> str:
    """Return a text without the values that follow names of secrets."""
    content = _HEADER.sub(lambda m: m[0] if m[3].startswith(_NOT_VALUES) else f"{m[1]}{m[2]}{REMOVED}", content)
    content = _BEARER.sub(rf"\1\2{REMOVED}", content)
    content = _IN_URL.sub(rf"\1{REMOVED}@", content)
    content = _IN_QUERY.sub(_redact_parameter, content)
    content = _NETRC.sub(rf"\1{REMOVED}", content)
    content = _ELEMENT.sub(lambda m: f"<{m[1]}>{REMOVED}" if is_secret(m[1]) else m[0], content)
    content = _FLAG.sub(
        lambda m: f"{m[1]}{m[2]}{REMOVED}" if is_secret(m[1]) and not m[3].startswith(("-", *_NOT_VALUES)) else m[0],
        content,
    )
    content = _BLOCK.sub(
        lambda m: f"{m[1]}{REMOVED}" if is_secret(re.split(r"[\\\"' \t:=]", m[1])[0]) else m[0], content
    )
    content = _LINE.sub(rf"\1{REMOVED}", content)
    return _ASSIGNED.sub(_assigned_spans, content)


def _redact_parameter(found: re.Match[str]) -> str:
    name = found[2].lower()
    return f"{found[1]}{found[2]}={REMOVED}" if is_secret(name) or name in _QUERY_NAMES else found[0]


def _assigned_spans(found: re.Match[str], depth: int = 0) -> str:
    given = found["value"].strip("\\\"'")
    if not is_secret(found["name"]):  # the value may contain assignments, too
        within = (
            found["value"]
            if depth == _NESTED
            else _ASSIGNED.sub(lambda m: _assigned_spans(m, depth + 1), found["value"])
        )
        return f"{found['name']}{found['between']}{within}"
    if not given or given.startswith(_NOT_VALUES) or found["value"] in _PLAIN_VALUES:
        return found[0]
    quoted = re.match(r"\\?[\"']", found["value"])
    mark = quoted[0] if quoted else ""
    return f"{found['name']}{found['between']}{mark}{REMOVED}{mark}"


def _is_random(word: str) -> bool:
    """Return whether letters and digits of a word change as often as those of keys."""
    word = word.rstrip("=")
    kinds = ["a" if c.islower() else "A" if c.isupper() else "0" if c.isdigit() else "+" for c in word]
    if not {"a", "A", "0"} <= set(kinds):
        return False
    return sum(a != b for a, b in pairwise(kinds)) >= _CHANGES * len(word)


def redact_document(value: object, secrets: list[str], name: str = "") -> object:
    """Return a JSON document without secrets: values of secret names, and secrets within texts."""
    return _Document(secrets, allow_list=False).clean(value, name)


def redact_configuration(value: object, secrets: list[str], name: str = "") -> object:
    """Return a document without secrets, in which free-form values are hidden unless they are known to be harmless."""
    return _Document(secrets, allow_list=True).clean(value, name)


@lru_cache(maxsize=4096)
def _certain_name(name: str, secrets: tuple[str, ...]) -> str:
    """Return a field's name without secrets. Cached: the lines of `metrics.jsonl` repeat their names, half of the time of a bundle."""
    return redact_certain(name, list(secrets))


class _Document:
    """Redaction of one JSON document.

    Args:
        secrets: known secrets.
        allow_list: whether unknown free-form values are hidden.
    """

    def __init__(self, secrets: list[str], *, allow_list: bool) -> None:
        self._secrets, self._allow_list = secrets, allow_list
        self._known = tuple(secrets)

    def clean(self, value: object, name: str, *, free: bool = False) -> object:
        """Return a redacted value of a field.

        Args:
            value: mapping, list or scalar.
            name: name of the field.
            free: whether the value is within a free-form field.
        """
        if isinstance(value, Mapping):
            return self._clean_mapping(value, free=free)
        if isinstance(value, list | tuple):
            words = all(isinstance(one, str) for one in value)
            if words and free and secret_shapes.plain_name(name) in ("args", "command", "extraargs"):
                return self._clean_command([str(one) for one in value])
            return self._clean_list(list(value), name, free=free)
        if isinstance(value, str):
            if not value or is_secret(name):
                return REMOVED if value else value
            return redact_text(value, self._secrets) if not free or secret_shapes.is_shown(name, value) else HIDDEN
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and len(str(value)) >= _LEAST
            and is_secret(name)
        ):
            return REMOVED  # a numeric password, which YAML reads as a number
        return value

    def _clean_mapping(self, value: Mapping[object, object], *, free: bool) -> object:
        # A variable of a container.
        if "name" in value and "value" in value and set(value) <= {"name", "value", "valueFrom"}:
            return {**value, "value": self._clean_variable(str(value["name"]), value["value"])}
        if free and set(value) <= {"name", "key", "optional"}:  # a reference to a key of a Secret or a ConfigMap
            return dict(value)
        free = free and not ({"key", "operator"} <= set(value))  # a term of a selector
        cleaned: dict[str, object] = {}
        for key, one in value.items():
            name = str(key)
            within = self._allow_list and (free or secret_shapes.is_free(name))
            if within and secret_shapes.plain_name(name) == "env" and isinstance(one, Mapping):
                cleaned[name] = {str(k): self._clean_variable(str(k), v) for k, v in one.items()}
            else:
                cleaned[_certain_name(name, self._known)] = self.clean(one, name, free=within)
        return cleaned

    def _clean_variable(self, name: str, value: object) -> object:
        if not isinstance(value, str) or not value:
            return value
        if is_secret(name):
            return REMOVED
        shown = not self._allow_list or secret_shapes.is_shown_variable(name, value)
        return redact_text(value, self._secrets) if shown else HIDDEN

    def _clean_list(self, value: list[object], name: str, *, free: bool) -> list[object]:
        flags = [None, *value]  # of a command line: the word after `--token` is secret
        secret = [
            isinstance(flag, str) and flag.startswith("-") and "=" not in flag and is_secret(flag)
            for flag in flags[:-1]
        ]
        return [REMOVED if hide else self.clean(one, name, free=free) for one, hide in zip(value, secret, strict=True)]

    def _clean_command(self, words: list[str]) -> list[str]:
        """Return the words of a command: flags, and values that are known to be harmless."""
        shown, flag = [], ""
        for word in words:
            name, _, value = word.partition("=")
            if word.startswith("-") and value:
                keep = not is_secret(name) and secret_shapes.is_shown_word(name, value)
                shown.append(
                    f"{name}={redact_text(value, self._secrets) if keep else REMOVED if is_secret(name) else HIDDEN}"
                )
                flag = ""
            elif flag and is_secret(flag):
                shown.append(REMOVED)
                flag = ""
            else:
                shown.append(redact_text(word, self._secrets) if secret_shapes.is_shown_word(flag, word) else HIDDEN)
                flag = word if word.startswith("-") else ""
        return shown


_BEGIN, _END = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY"), re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY")
_KEY_LINES = 200
"""Maximum number of lines of a private key: after that, a log that was truncated within a key is shown again."""


class LogLines:
    """Filter of the lines of one log, in order: a private key spans lines.

    Args:
        environment: environment variables of this process; the values of its secret variables are known secrets.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._known = known_secrets(environment)
        self._within = 0

    def clean(self, line: str) -> str:
        """Return a line without secrets; all lines within a private key are secret."""
        if self._within:
            self._within = 0 if _END.search(line) else self._within - 1
            return REMOVED
        if _BEGIN.search(line) and not _END.search(line):
            self._within = _KEY_LINES
        return escape_controls(redact_text(line, self._known), lines=True)
