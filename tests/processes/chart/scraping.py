"""Real Prometheus that scrapes real exporters with the chart's monitors."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.programs import wait_for
from tests.support.waiting import PATIENCE_SECONDS

PODS = {
    "orchestrator": ("metrics", {"run": "good", "role": "orchestrator", "attempt": "1"}),
    "trainer": ("health", {"run": "good", "role": "trainer", "attempt": "1"}),
    "inference": ("health", {"run": "good", "role": "inference"}),
    "forged": ("http", {"run": "good", "role": "inference"}),
}
"""Exporters that represent pods: port name and pod labels."""
POLL_SECONDS = 0.3
LOG = "prometheus.log"


def scrape_configs(documents: list[dict[str, Any]], ports: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the scrape configuration that the Prometheus operator would generate from the chart's monitors, with our exporters as targets.

    Args:
        documents: rendered chart.
        ports: ports of the exporters by name.
    """
    (service,) = (d for d in documents if d["kind"] == "ServiceMonitor")
    (pods,) = (d for d in documents if d["kind"] == "PodMonitor")
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    (endpoint,) = service["spec"]["endpoints"]
    configs = []
    for process in ("operator", "standby"):
        labels = {"namespace": namespace, "job": name, "pod": process}
        configs.append(_make_config(process, endpoint, ports[process], labels))
    endpoints = {endpoint["port"]: endpoint for endpoint in pods["spec"]["podMetricsEndpoints"]}
    for pod, (port, labels) in PODS.items():
        meta = {f"__meta_kubernetes_pod_label_rlrun_io_{label}": value for label, value in labels.items()}
        target = {"namespace": "team-a", "job": f"{namespace}/{pods['metadata']['name']}", "pod": pod}
        configs.append(_make_config(pod, endpoints[port], ports[pod], meta | target))
    return configs


def _make_config(name: str, endpoint: Mapping[str, Any], port: int, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "job_name": name,
        "honor_labels": endpoint["honorLabels"],
        "metrics_path": endpoint["path"],
        "relabel_configs": [_convert_to_snake_case(rule) for rule in endpoint.get("relabelings", ())],
        "metric_relabel_configs": [_convert_to_snake_case(rule) for rule in endpoint.get("metricRelabelings", ())],
        "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": dict(labels)}],
    }


def _convert_to_snake_case(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {re.sub(r"[A-Z]", lambda found: "_" + found[0].lower(), key): value for key, value in rule.items()}


@dataclass
class Server:
    """Running Prometheus server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query.

        Raises:
            AssertionError: Prometheus refuses the expression.
        """
        url = f"{self.url}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
                return list(json.load(answer)["data"]["result"])
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from None

    def alerts(self) -> list[dict[str, Any]]:
        """Return pending and firing alerts."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=PATIENCE_SECONDS) as answer:
            return list(json.load(answer)["data"]["alerts"])

    def until(self, condition: Callable[[], object], what: Callable[[], object]) -> None:
        """Wait until `condition` holds.

        Raises:
            StalledError: no progress and no success; the message contains the result of `what`.
        """
        wait_for(condition, state=what, poll_seconds=POLL_SECONDS)


def start(
    programs: Mapping[str, Path], folder: Path, configs: list[dict[str, Any]], rules: Mapping[str, Any]
) -> subprocess.Popen[bytes]:
    """Start Prometheus on a free port; the caller stops it.

    Args:
        programs: paths of Prometheus and promtool by name.
        folder: empty folder for its files.
        configs: scrape configurations.
        rules: groups of alerts.
    """
    interval = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"}
    (folder / "rules.yaml").write_text(yaml.safe_dump(dict(rules)))
    document = {"global": interval, "rule_files": [str(folder / "rules.yaml")], "scrape_configs": configs}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(document))
    flags = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    flags += ["--web.listen-address=127.0.0.1:0"]
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen([str(programs["prometheus"]), *flags], stdout=log, stderr=log)


def ready(process: subprocess.Popen[bytes], folder: Path) -> Server:
    """Wait until the Prometheus in `folder` responds.

    Raises:
        AssertionError: Prometheus has ended or does not respond; the message contains its log.
    """
    log = folder / LOG

    def serving() -> Server | None:
        assert process.poll() is None, log.read_text()
        if found := re.search(r'msg="Listening on" address=(\S+)', log.read_text()):
            server = Server(f"http://{found[1]}")
            with suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=5):
                return server
        return None

    server = wait_for(serving, "Prometheus serves", state=log.read_text)
    assert server is not None
    return server
