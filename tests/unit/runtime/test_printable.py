"""Escaping of foreign text, so that it cannot control a terminal or hide characters."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loguru import logger

from rlrun.api.run_status import RLRunStatus
from rlrun.config.loading.problems import Problem
from rlrun.environments.bounds import clip_text
from rlrun.environments.process.process_output import Log
from rlrun.pod.container import failure_text
from rlrun.protocol.files.failures import telling_lines
from rlrun.runtime import process_logs
from rlrun.runtime.printable import escape_controls, shorten_text
from rlrun_operator.decide import status_builder
from rlrun_operator.runtime import log_setup

HOSTILE = "good\x1b]0;owned\x07 \x1b[2J\u202etxet\u2066\u200b\x9b31m\ud800\x00\x7f\r"
SHOWN = r"good\x1b]0;owned\x07 \x1b[2J\u202etxet\u2066\u200b\x9b31m\ud800\x00\x7f\r"


def obeyed(text: str) -> list[str]:
    """Return the characters that a terminal would not show literally."""
    return [
        c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t\u200c\u200d"
    ]


def test_terminal_control_characters_are_escaped() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    found = escape_controls(everything)
    assert obeyed(found) == []
    assert "\n" not in found
    assert "\t" not in found
    assert obeyed(escape_controls(everything, lines=True)) == []
    lost = {*everything} - {*found} - {*obeyed(everything)} - {*"\n\t"}
    assert {unicodedata.category(c) for c in lost} <= {"Cn", "Mn"}, (
        "beside them only what is reserved, and variation selectors"
    )
    for text in ("Grüße, 日本語　です", "\U0001f469\u200d\U0001f680", "مرحبا", "a\u00a0b", "C:\\x1b"):
        assert escape_controls(text) == text


@given(st.text())
def test_escaping_twice_changes_nothing(text: str) -> None:
    once = escape_controls(text)
    assert escape_controls(once) == once
    assert escape_controls(text, lines=True).replace("\n", r"\n").replace("\t", r"\t") == once


def test_log_escapes_text_and_prevents_forged_lines() -> None:
    sink = io.StringIO()
    process_logs.configure_log(sink, "{level} | {message}")
    try:
        logger.warning(f"an environment brought {HOSTILE}\nERROR | forged")
    finally:
        logger.remove()
    text = sink.getvalue()
    assert obeyed(text) == []
    assert SHOWN in text
    assert [line[:4] for line in text.splitlines()] == ["WARN", "    "]


def test_operator_log_escapes_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    for kind in ("plain", "json"):
        log_setup.set_up("info", kind)  # type: ignore[arg-type]
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logging.getLogger("x").exception("a run named %s", HOSTILE)
        line = capsys.readouterr().err.strip()
        assert obeyed(json.loads(line)["message"] if kind == "json" else line) == []
        assert r"\u202etxet" in line.replace("\\\\", "\\")


def test_status_escapes_and_limits_text() -> None:
    status = RLRunStatus(
        message=HOSTILE * 1000,
        results=[HOSTILE] * 2,
        progress={"waitingOn": "x" * 1_000_000},  # type: ignore[arg-type]
    )
    document = status_builder.status_document(status)
    texts = [document["message"], *document["results"], document["progress"]["waitingOn"]]
    assert all(obeyed(text) == [] and len(text) <= status_builder.TEXT_MAX for text in texts)
    assert document["results"] == [SHOWN] * 2
    assert status_builder.status_document(RLRunStatus.model_validate(document)) == document, (
        "what is written is not written again"
    )
    assert shorten_text(HOSTILE).startswith(r"good\x1b]0;owned\x07 \x1b[2J")


@pytest.mark.parametrize(
    "shown",
    [
        str(Problem("run.yaml", "spec.x", HOSTILE)),
        clip_text(HOSTILE),
        *telling_lines(HOSTILE + "\nnext"),
        failure_text(1, said=None, full=None, lines=[HOSTILE]),
        failure_text(1, said=HOSTILE, full=None, lines=[]),
    ],
)
def test_role_messages_escape_text(shown: str) -> None:
    assert obeyed(shown) == []
    shown.encode()


def test_environment_output_tail_is_escaped(tmp_path: Path) -> None:
    log = Log(None)
    log._store_output(HOSTILE.encode(errors="surrogatepass") + b"\xff\n")
    assert all(obeyed(line) == [] for line in log.last_lines())
    assert log.last_lines()[-1].startswith(r"good\x1b]0;owned\x07") or len(log.last_lines()) > 1
