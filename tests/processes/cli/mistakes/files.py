"""Mistakes in the choice of a file, and in its syntax."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import FOLDER, MANIFEST, TOML, Mistake, changed, plain

_KEY = {"RLRUN_API_KEY": "secret"}

FILES: Sequence[Mistake] = (
    *plain(
        78,
        ("a missing manifest", "rlrun validate rnu.yaml", "rnu.yaml", "no such file", "did you mean run.yaml"),
        (
            "a missing manifest of a local run",
            "rlrun local runn.yaml",
            "runn.yaml",
            "no such file",
            "did you mean run.yaml",
        ),
        ("a missing file of rl", "rl @ rum.toml", "rum.toml", "no such file", "did you mean run.toml"),
    ),
    Mistake(
        "a missing file of a role", "trainer @ nowhere.json", 78, "nowhere.json", "", "no such file", variables=_KEY
    ),
    *plain(78, ("a missing manifest of eval", "eval nowhere.yaml", "nowhere.yaml", "", "no such file")),
    Mistake("a folder as manifest", "rlrun validate folder", 78, "folder", "", "expected a file", {"folder": FOLDER}),
    Mistake("a folder as file of rl", "rl @ run.toml", 78, "run.toml", "", "expected a file", {"run.toml": FOLDER}),
    Mistake(
        "a link in a circle", "rlrun render run.yaml", 78, "run.yaml", "", "symbolic links", {"run.yaml": "-> run.yaml"}
    ),
    Mistake(
        "an empty manifest",
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        "contains nothing",
        "exactly one RLRun",
        {"run.yaml": ""},
    ),
    Mistake(
        "an empty file of a role",
        "inference @ run.json",
        78,
        "run.json",
        "is empty",
        "expected a mapping of fields",
        {"run.json": ""},
        _KEY,
    ),
    Mistake(
        "a binary manifest",
        "rlrun local run.yaml",
        78,
        "run.yaml",
        "",
        "save it as UTF-8",
        {"run.yaml": b"\x7fELF\x02\x01\x01\x00\xff\xfe"},
    ),
    Mistake(
        "a manifest with zero bytes",
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        "",
        "character",
        {"run.yaml": b"kind: RL\x00Run\n"},
    ),
    Mistake(
        "a manifest in UTF-16",
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        "",
        "save it as UTF-8",
        {"run.yaml": MANIFEST.encode("utf-16")},
    ),
    Mistake(
        "a TOML in Latin-1",
        "rl @ run.toml",
        78,
        "run.toml",
        "",
        "save it as UTF-8",
        {"run.toml": "# für\n".encode("latin-1") + TOML.encode()},
    ),
    Mistake(
        "a file of an unknown format", "rl @ run.ini", 78, "run.ini", "'.ini'", "known: .toml", {"run.ini": "a=1\n"}
    ),
    *plain(
        64,
        ("a file without @", "rl run.toml", "run.toml", "", '"@ run.toml"'),
        ("@ without a file", "rl @", "@", "", "needs a file"),
    ),
    Mistake("@ without a space", "trainer @run.json", 64, "@run.json", "", 'write "@ run.json"', variables=_KEY),
    *plain(64, ("a role's @ without a file", "rl --trainer @", "--trainer @", "", "needs a file")),
)

SYNTAX: Sequence[Mistake] = (
    *changed(
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        ("broken YAML", "{tiny: {}}", "{tiny: {}", "run.yaml:6", "<scalar>", "expected ',' or '}'"),
        ("a tab in YAML", "  maxSteps", "\tmaxSteps", "run.yaml:6", "'\\t'", "indent with spaces"),
        ("wrong indentation", "  seqLen", "   seqLen", "run.yaml:7", "mapping values", "not allowed here"),
    ),
    *changed(
        "rl @ run.toml",
        78,
        "run.toml",
        ("broken TOML", "[model.tiny]", "[model.tiny", "run.toml:3", "column 12", "Expected ']'"),
    ),
    Mistake(
        "broken JSON",
        "trainer @ run.json",
        78,
        "run.json:1",
        "property name",
        "double quotes",
        {"run.json": "{trainer: 1}"},
        _KEY,
    ),
    *changed(
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        (
            "a key twice in YAML",
            "  seqLen: 512",
            "  maxSteps: 12\n  seqLen: 512",
            "run.yaml:7",
            "maxSteps",
            "remove one",
        ),
    ),
    *changed(
        "rl @ run.toml",
        78,
        "run.toml",
        (
            "a key twice in TOML",
            "seq_len = 512",
            "max_steps = 12\nseq_len = 512",
            "run.toml:2",
            "max_steps",
            "remove one",
        ),
    ),
    Mistake(
        "a key twice in JSON",
        "trainer @ run.json",
        78,
        "run.json",
        "name",
        "remove one",
        {"run.json": '{"name": 1, "name": 2}'},
        _KEY,
    ),
    Mistake(
        "two documents", "rlrun local run.yaml", 78, "run.yaml", "2", "one", {"run.yaml": f"{MANIFEST}---\n{MANIFEST}"}
    ),
    Mistake("a list at the top", "rl @ run.yaml", 78, "run.yaml", "", "mapping of fields", {"run.yaml": "- a\n- b\n"}),
    Mistake(
        "a text at the top", "rlrun validate run.yaml", 78, "run.yaml", "", "expected", {"run.yaml": "just text\n"}
    ),
)
