"""Mistakes in the text of a manifest or a data file: syntax, characters, other formats and other file types."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import FOLDER, SFT, SPEC, TOML, Mistake, text

_SFT_LOCAL = "rlrun local sft.yaml"


def _syntax(
    what: str, old: str, new: str, place: str, value: str, fix: str, repair: tuple[str, str] | None = None
) -> Mistake:
    assert old in SPEC
    return text(what, SPEC.replace(old, new), place, value, fix, repair)


def _row(what: str, row: str | bytes, place: str, value: str, fix: str, name: str = "chats.jsonl") -> Mistake:
    """Return a row of training data."""
    files = {name: row, "sft.yaml": SFT.replace("chats.jsonl", name)}
    return Mistake(what, _SFT_LOCAL, 65, place, value, fix, files)


_SYNTAX = (
    _syntax(
        "no blank after a colon",
        "maxSteps: 10",
        "maxSteps:10",
        "run.yaml:6",
        "maxSteps:10",
        "maxSteps: 10",
        ("maxSteps:10", "maxSteps: 10"),
    ),
    _syntax(
        "no colon",
        "maxSteps: 10",
        "maxSteps 10",
        "run.yaml:6",
        "maxSteps 10",
        "maxSteps: 10",
        ("maxSteps 10", "maxSteps: 10"),
    ),
    _syntax(
        "an equals sign",
        "maxSteps: 10",
        "maxSteps = 10",
        "run.yaml:6",
        "maxSteps = 10",
        "maxSteps: 10",
        ("maxSteps = 10", "maxSteps: 10"),
    ),
    _syntax(
        "a comma at the end of a line",
        "maxSteps: 10",
        "maxSteps: 10,",
        "spec.maxSteps",
        '"10,"',
        "maxSteps: 10",
        ("maxSteps: 10,", "maxSteps: 10"),
    ),
    _syntax("a quote that is not closed", "{name: quick}", '{name: "quick}', "run.yaml", "", 'close the "'),
    _syntax("a bracket that is not closed", "{length: 5}}]", "{length: 5}}", "run.yaml", "", "expected ',' or ']'"),
    _syntax("a bracket too many", "{length: 5}}]", "{length: 5}}]]", "run.yaml:8", "]", "remove"),
    _syntax("a colon in a value", "model: {tiny: {}}", "model: path: /m", "run.yaml:5", "", "quotes"),
    _syntax(
        "a tab behind a dash",
        "  environments: [{id: reverse-text, args: {length: 5}}]",
        "  environments:\n  -\tid: reverse-text\n\targs: {}",
        "run.yaml",
        "",
        "spaces",
    ),
    _syntax(
        "typographic quotes",
        "maxSteps: 10",
        "maxSteps: “10”",
        "spec.maxSteps",
        "“10”",
        "maxSteps: 10",
        ("maxSteps: “10”", "maxSteps: 10"),
    ),
    _syntax(
        "a blank that cannot be seen", "maxSteps: 10", "maxSteps:\u00a010", "run.yaml:6", "U+00A0", "a plain space"
    ),
    _syntax("an alias without its anchor", "model: {tiny: {}}", "model: *base", "run.yaml:5", "base", "&base"),
    _syntax("an include", "model: {tiny: {}}", "model: !include model.yaml", "run.yaml:5", "!include", "remove it"),
    _syntax(
        "an object of Python",
        "model: {tiny: {}}",
        "model: !!python/object:os.system {}",
        "run.yaml:5",
        "python/object",
        "remove it",
    ),
    _syntax("a percent sign", "maxSteps: 10", "maxSteps: %STEPS%", "run.yaml:6", "'%'", "quotes"),
    _syntax("an at sign", "model: {tiny: {}}", "model: @base", "run.yaml:5", "'@'", "quotes"),
    _syntax("a merge of nothing", "model: {tiny: {}}", "model: {<<: 3, tiny: {}}", "run.yaml:5", "<<", "mapping"),
    _syntax("a number as a key", "model: {tiny: {}}", "model: {1: {}}", "run.yaml:5", "1", "quotes"),
    _syntax("a section of the shell", "model: {tiny: {}}", "model: `cat m`", "run.yaml:5", "'`'", "quotes"),
    _syntax("a name of Windows", "model: {tiny: {}}", 'model: {path: "C:\\models"}', "run.yaml:5", "", "single quotes"),
    _syntax("three levels of one space", "  maxSteps: 10", "    maxSteps: 10", "run.yaml:6", "", "line 5"),
)

_FILES = (
    text("only comments", "# nothing\n", "run.yaml", "nothing", "exactly one RLRun"),
    text("only a separator", "---\n", "run.yaml", "nothing", "exactly one RLRun"),
    text("a list of manifests", "- " + SPEC.replace("\n", "\n  "), "run.yaml", "a list", "---"),
    text("two runs", SPEC + "---\n" + SPEC, "run.yaml", "2 RLRuns", "split the file"),
    text(
        "JSON with a comma too many",
        '{"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun",, }',
        "run.yaml:1",
        "','",
        "remove the comma",
    ),
    text(
        "an HTML page",
        "<!DOCTYPE html>\n<html><body>404: Not Found</body></html>\n",
        "run.yaml",
        "HTML",
        "download the raw file",
    ),
    text("a patch", "--- a/run.yaml\n+++ b/run.yaml\n@@ -1 +1 @@\n-a\n+b\n", "run.yaml", "", "RLRun"),
    text("an archive", b"PK\x03\x04\x14\x00\x00\x00", "run.yaml", "", "UTF-8"),
    text("a compressed file", b"\x1f\x8b\x08\x00\x00", "run.yaml", "", "UTF-8"),
    text(
        "a conflict of git",
        SPEC.replace("  maxSteps: 10\n", "<<<<<<< HEAD\n  maxSteps: 10\n=======\n  maxSteps: 20\n>>>>>>> b\n"),
        "run.yaml:6",
        "<<<<<<<",
        "remove the markers",
    ),
    Mistake("a TOML file", "rlrun validate run.toml", 78, "run.toml", "is TOML", "rlrun convert run.toml"),
    Mistake(
        "rows instead of a manifest",
        "rlrun validate rows.jsonl",
        78,
        "rows.jsonl",
        "",
        "expected",
        {"rows.jsonl": '{"a": 1}\n{"a": 2}\n'},
    ),
    Mistake(
        "a script instead of a manifest",
        "rlrun validate train.py",
        78,
        "train.py",
        "",
        "RLRun",
        {"train.py": "import rlrun\n\nrlrun.run()\n"},
    ),
    Mistake(
        "a folder in a list of files",
        "rlrun validate run.yaml configs",
        78,
        "configs",
        "",
        "expected a file",
        {"configs": FOLDER},
    ),
    Mistake(
        "a name with blanks",
        "rlrun validate 'my run.yml'",
        78,
        "my run.yml",
        "no such file",
        "did you mean my run.yaml",
        {"my run.yaml": SPEC},
    ),
    Mistake("another ending", "rlrun validate run.yml", 78, "run.yml", "no such file", "did you mean run.yaml"),
    Mistake(
        "capitals in a file's name", "rlrun validate Run.yaml", 78, "Run.yaml", "no such file", "did you mean run.yaml"
    ),
    Mistake(
        "a home folder in quotes", "rlrun validate '~/run.yaml'", 78, "~/run.yaml", "no such file", "without quotes"
    ),
    Mistake(
        "a TOML with yes",
        "rl @ run.toml --dry-run",
        78,
        "run.toml:3",
        "suspend",
        "suspend = true",
        {
            "run.toml": 'max_steps = 10\nseq_len = 512\nsuspend = yes\n[model.tiny]\n[[environments]]\nid = "reverse-text"\n'
        },
    ),
    Mistake(
        "a TOML with a colon",
        "rl @ run.toml --dry-run",
        78,
        "run.toml:1",
        "max_steps: 10",
        "max_steps = 10",
        {"run.toml": TOML.replace("max_steps = 10", "max_steps: 10")},
        repairs=(("max_steps: 10", "max_steps = 10"),),
    ),
    Mistake(
        "a TOML with a bare text",
        "rl @ run.toml --dry-run",
        78,
        "run.toml:1",
        "RL",
        'task = "RL"',
        {"run.toml": "task = RL\n" + TOML},
        repairs=(("task = RL", 'task = "RL"'),),
    ),
    Mistake(
        "a TOML with camelCase of Python",
        "rl @ run.toml --dry-run",
        78,
        "run.toml:1",
        "True",
        "suspend = true",
        {"run.toml": "suspend = True\n" + TOML},
        repairs=(("suspend = True", "suspend = true"),),
    ),
    Mistake(
        "a TOML with one table for a list",
        "rl @ run.toml --dry-run",
        78,
        "environments",
        "a mapping",
        'environments = [{id = "reverse-text"}]',
        {"run.toml": TOML.replace("[[environments]]", "[environments]")},
    ),
    Mistake(
        "a TOML with a quoted number",
        "rl @ run.toml --dry-run",
        78,
        "max_steps",
        '"10"',
        "max_steps = 10",
        {"run.toml": TOML.replace("max_steps = 10", 'max_steps = "10"')},
    ),
    Mistake("a TOML that is YAML", "rl @ run.toml --dry-run", 78, "run.toml:1", "", "YAML", {"run.toml": SPEC}),
)

_DATA = (
    _row("a row that is a list", json.dumps([1]) + "\n", "chats.jsonl", "line 1", "a list"),
    _row(
        "one JSON list of rows",
        json.dumps([{"messages": []}]) + "\n",
        "chats.jsonl",
        "line 1",
        "one JSON object per line",
    ),
    _row("a row without messages", '{"text": "a"}\n', "chats.jsonl", "messages", "text"),
    _row("messages as a text", '{"messages": "a"}\n', "chats.jsonl", "assistant", "there is nothing to learn"),
    _row("a role that is none", '{"messages": [{"role": "bot", "content": "a"}]}\n', "chats.jsonl", "bot", "assistant"),
    _row("from and value", '{"messages": [{"from": "human", "value": "a"}]}\n', "chats.jsonl", "from", "role"),
    _row(
        "no reply", '{"messages": [{"role": "user", "content": "a"}]}\n', "chats.jsonl", "assistant", "correct the row"
    ),
    _row(
        "content that is a number",
        '{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]}\n',
        "chats.jsonl",
        "content",
        "it must be a text",
    ),
    _row("quotes of Python", "{'messages': []}\n", "chats.jsonl", "line 1", "double quotes"),
    _row("NaN in a row", '{"messages": [{"role": "user", "content": NaN}]}\n', "chats.jsonl", "nan", "correct the row"),
    _row("an empty data file", "", "chats.jsonl", "no rows", "row"),
    _row("a binary data file", b"\x93NUMPY\xff\xfe\x00", "chats.jsonl", "UTF-8", "UTF-8"),
    _row("CSV under the name of JSON lines", "question,answer\na,b\n", "chats.jsonl", "line 1", "JSON"),
    _row("an ending that is none", "a\n", "chats.txt", ".txt", ".jsonl", "chats.txt"),
)

TEXTS: Sequence[Mistake] = (*_SYNTAX, *_FILES, *_DATA)
