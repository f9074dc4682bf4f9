"""Operator chart, rendered with `helm template`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import binaries
from tests.cluster.progress import Progress
from tests.processes.chart.rendering import CHART, KUBE_VERSION, RefusedError, Render
from tests.support.programs import run_program


@pytest.fixture(scope="session")
def helm() -> Path:
    """Helm of the test clusters, or from PATH. In CI it is built if missing, which takes a minute."""
    tool = binaries.TOOLS["helm"]
    folder = binaries._find_given(tool) or binaries._cached(tool)
    if folder is not None:
        return folder / "helm"
    if on_path := shutil.which("helm"):
        return Path(on_path)
    if os.environ.get("CI"):
        return binaries.find("helm", progress=Progress(print))["helm"]
    pytest.skip("no helm: python -m tests.cluster prepare")


@pytest.fixture(scope="session")
def render(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Function that renders the chart with values; raises `RefusedError` if Helm refuses them."""
    home = tmp_path_factory.mktemp("helm")
    env = os.environ | {f"HELM_{name}_HOME": str(home / name) for name in ("CACHE", "CONFIG", "DATA")}

    def run(values: dict[str, Any] | None = None, *, release: str = "rlrun-operator") -> list[dict[str, Any]]:
        values = values or {}
        if not values.keys() & {"watchNamespaces", "clusterWide"}:
            values = values | {"watchNamespaces": ["team-a"]}
        command = [str(helm), "template", release, str(CHART), "--namespace", "rlrun-system", "--values", "-"]
        command += ["--kube-version", KUBE_VERSION]
        answer = run_program(command, input=yaml.safe_dump(values), env=env)
        if answer.returncode:
            raise RefusedError(answer.stderr)
        return [document for document in yaml.safe_load_all(answer.stdout) if document]

    return run
