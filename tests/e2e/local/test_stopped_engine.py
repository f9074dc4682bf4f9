"""One of two engine processes is stopped with SIGSTOP during a run: connections stay open, but it does not answer.

The stop may occur between two requests; `tests/thorough/orchestrator/test_orch_replica_faults.py` tests that requests
in flight move.
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
    """Whether the second engine holds that version or a newer one. An engine that was stopped within an update may
    end; its successor then starts.
    """
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


def test_run_continues_without_a_stopped_engine_and_readmits_it(tmp_path: Path) -> None:
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
