"""One of two engine processes stands still in the middle of a run: no connection ends, and nothing answers.

It may be stopped between two requests; that requests in flight move says `tests/thorough/orchestrator/test_orch_replica_faults.py`.
"""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.local.two_engines import TwoEngines, two_engines
from tests.processes.stub.harness.stub_run import API_KEY

pytestmark = pytest.mark.full
ENDLESS = 2000


def serves_again(run: TwoEngines, version: int) -> bool:
    """Whether the second engine holds that version or a newer one. One that was stopped within a hand-over may end: its next one starts."""
    if run.second.poll() is not None:
        run.start_second()
    url = run.run.config.orchestrator.inference_urls[1] + "/rlrun/status"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {API_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status: dict[str, Any] = json.load(answer)
    except OSError:
        return False
    return status["weight_version"] is not None and int(status["weight_version"]) >= version


def test_a_run_goes_on_while_one_of_two_engines_is_stopped_and_takes_it_back(tmp_path: Path) -> None:
    with two_engines(tmp_path, ENDLESS) as run:
        run.begin()
        run.until(4)
        run.second.send_signal(signal.SIGSTOP)
        run.run.until(lambda: run.run.metrics()[-1]["engines/in_rotation"] == 1, "the engine is out of rotation")
        seen = run.steps
        run.until(seen + 4)
        run.second.send_signal(signal.SIGCONT)
        run.run.until(lambda: serves_again(run, seen + 4), "it has got the weights that it missed")
        run.until(run.steps + 4)
        run.end()
        assert len(run.batches()) >= seen + 8
        assert run.wrong_tokens() == 0
