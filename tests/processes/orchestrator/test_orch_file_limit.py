"""Limit of open files, in separate processes: a process cannot raise a lowered hard limit again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from orch_simulation import make_config

from tests.support.program_forks import CODE, program_forks

ROLE = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[2:])))
from rlrun.orchestrator import main
async def begin(config, **_):
    print("limit", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return 0
sys.exit(main.run_process(["--config", sys.argv[1]], "role", lambda *a, **k: begin(*a, **k)))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "concurrency", "limit", "says"),
    [
        pytest.param(256, 1000, 512, 1000, None, marks=pytest.mark.full),
        (256, 1000, 727, 1000, None),  # 727 + one environment's 16 + 256 = 999
        (256, 1000, 729, 1000, "limit of open files (ulimit -n) is 1000, but maxConcurrency (729) can need 1001"),
        pytest.param(256, 1000, 729, 1000, "set maxConcurrency to 728", marks=pytest.mark.full),
        pytest.param(900, 900, 8000, 900, "set maxConcurrency to 628", marks=pytest.mark.full),
        (300, 300, 8000, 300, "set maxConcurrency to 28"),
    ],
)
def test_role_raises_file_limit_or_reports_low_limit(
    tmp_path: Path, tokenizer_folder: Path, soft: int, hard: int, concurrency: int, limit: int, says: str | None
) -> None:
    file = tmp_path / "run.json"
    config = make_config(tmp_path / "out", tokenizer_folder, max_concurrency=concurrency)
    file.write_text(config.model_dump_json())
    variables = os.environ | {"RLRUN_ATTEMPT": "1", "RLRUN_API_KEY": "key"}
    ended = program_forks().call(CODE, ROLE, str(file), str(soft), str(hard), environment=variables)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["limit", str(limit)]
    if says is None:
        assert "open files" not in ended.stderr
    else:
        assert says in ended.stderr
