"""Monitors, alerts and dashboards of the chart, against a real Prometheus and the product's real exporters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import prometheus
from tests.processes.chart import scraping
from tests.processes.chart.alert_series import CASES, HEALTHY, Case, rule_tests
from tests.processes.chart.rendering import RefusedError, Render
from tests.support.programs import run_program, wait_for_exit
from tools.dashboards import DASHBOARDS
from tools.docs_metrics import shared

ROOT = Path(__file__).parents[3]
ON: dict[str, Any] = {
    "serviceMonitor": {"enabled": True},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True},
}
KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def get_alerts(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    (found,) = of_kind(documents, "PrometheusRule")
    return {rule["alert"]: rule for group in found["spec"]["groups"] for rule in group["rules"]}


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    """Prometheus and promtool; in CI they are downloaded if missing."""
    found = prometheus.find(print, download=bool(os.environ.get("CI")))
    if not found:
        pytest.skip("no prometheus: python -m tests.cluster prepare --tests")
    return found


# ---- rendered objects


def test_no_prometheus_operator_object_is_made_by_default(render: Render) -> None:
    documents = render()
    assert [document["kind"] for document in documents if document["kind"] in (*KINDS, "ConfigMap")] == []


def test_runs_are_scraped_in_served_namespaces(render: Render) -> None:
    (one,) = of_kind(render(ON | {"watchNamespaces": ["a", "b"]}), "PodMonitor")
    assert one["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}
    assert one["metadata"]["namespace"] == "rlrun-system"
    (everywhere,) = of_kind(render(ON | {"clusterWide": True}), "PodMonitor")
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}
    own = ON | {"watchNamespaces": ["a", "b"], "podMonitor": {"enabled": True, "inRunNamespaces": True}}
    each = of_kind(render(own), "PodMonitor")
    assert [(m["metadata"]["namespace"], m["spec"]["namespaceSelector"]) for m in each] == [
        ("a", {"matchNames": ["a"]}),
        ("b", {"matchNames": ["b"]}),
    ]
    with pytest.raises(RefusedError, match="needs watchNamespaces"):
        render(ON | {"clusterWide": True, "podMonitor": {"enabled": True, "inRunNamespaces": True}})


def test_metrics_exported_by_operator_count_once(render: Render) -> None:
    """The orchestrator exports these metrics too, for installations that scrape only runs."""
    documents = render(ON)
    (monitor,) = of_kind(documents, "PodMonitor")
    (rule,) = monitor["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    assert rule["action"] == "drop"
    assert rule["regex"].split("|") == shared()
    (alone,) = of_kind(render({"podMonitor": {"enabled": True}}), "PodMonitor")
    assert all("metricRelabelings" not in endpoint for endpoint in alone["spec"]["podMetricsEndpoints"])


def test_run_scrapers_reach_operator_settings(render: Render) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    (deployment,) = of_kind(render({"networkPolicy": {"runMetricsFrom": [peer]}}), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert json.loads(given["RLRUN_NETWORK"]) == {"metricsFrom": [peer]}


def test_dashboards_have_label_of_grafana_sidecar(render: Render) -> None:
    found = of_kind(render(ON), "ConfigMap")
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in found)
    pages = [json.loads(text) for each in found for text in each["data"].values()]
    assert sorted(page["title"] for page in pages) == sorted(dashboard.title for dashboard in DASHBOARDS)
    assert len({page["uid"] for page in pages}) == len(DASHBOARDS)


def test_alerts_can_be_disabled_and_have_other_thresholds(render: Render) -> None:
    rule = {"enabled": True, "disabled": ["RLRunRewardFlat"], "thresholds": {"stalledSeconds": 1200000}}
    found = get_alerts(render(ON | {"prometheusRule": rule}))
    assert "RLRunRewardFlat" not in found
    assert "> 1.2e+06" in found["RLRunStalled"]["expr"]
    with pytest.raises(RefusedError, match="stalledHours"):
        render(ON | {"prometheusRule": {"thresholds": {"stalledHours": 1}}})


def test_each_alert_has_instructions_and_runbook_section(render: Render) -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    sections = {heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.M)}
    for name, rule in get_alerts(render(ON)).items():
        page, _, section = rule["annotations"]["runbook_url"].partition("#")
        assert page.endswith("/docs/monitoring.md")
        assert section == name.lower()
        assert section in sections
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["for"]
        assert "@" not in json.dumps(rule), "a word that the chart did not fill in"
        if name != "RLRunOperatorDown":
            assert all("{{ $labels.run }}" in rule["annotations"][key] for key in ("summary", "description"))
    assert {s for s in sections if s.startswith("rlrun")} == {name.lower() for name in get_alerts(render(ON))}


# ---- alerts, in series of broken runs


def rules_file(render: Render, folder: Path) -> Path:
    (found,) = of_kind(render(ON), "PrometheusRule")
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(found["spec"]))
    return file


def test_prometheus_accepts_rules(render: Render, programs: dict[str, Path], tmp_path: Path) -> None:
    answer = run_program([programs["promtool"], "check", "rules", rules_file(render, tmp_path)])
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_each_alert_fires_only_in_its_broken_run(render: Render, programs: dict[str, Path], tmp_path: Path) -> None:
    assert {case.alert for case in CASES} == set(get_alerts(render(ON)))
    rules_file(render, tmp_path)
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump(rule_tests("rules.yaml", [Case("", HEALTHY, "4h"), *CASES])))
    answer = run_program([programs["promtool"], "test", "rules", file])
    assert answer.returncode == 0, answer.stdout + answer.stderr


# ---- queries, on real exporters


@pytest.fixture(scope="module")
def server(
    render: Render, programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[scraping.Server]:
    """Prometheus that scrapes the operator and the pods of a run with the chart's monitors."""
    documents, folder = render(ON), tmp_path_factory.mktemp("prometheus")
    command = [sys.executable, "-m", "tests.processes.chart.exporters"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as exporters:
        assert exporters.stdin is not None
        assert exporters.stdout is not None
        try:
            ports = json.loads(exporters.stdout.readline())
            (rules,) = of_kind(documents, "PrometheusRule")
            configs = scraping.scrape_configs(documents, ports)
            process = scraping.start(programs, folder, configs, rules["spec"])
            try:
                yield scraping.ready(process, folder)
            finally:
                process.terminate()
                wait_for_exit(process)
        finally:
            exporters.stdin.close()


def all_answer(server: scraping.Server, expressions: list[str]) -> None:
    """Wait until each expression has returned data."""
    left = list(expressions)

    def answered() -> bool:
        left[:] = [expression for expression in left if not server.query(expression)]
        return not left

    server.until(answered, lambda: "no data:\n" + "\n".join(left))


def fill_query(expression: str, dashboard: str) -> str:
    """Return a dashboard query as Grafana sends it."""
    namespace = ".*" if dashboard == "fleet" else "team-a"
    values = {"$namespace": namespace, "$run": "good", "$job": "rlrun-operator", "$__rate_interval": "1m"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_each_dashboard_query_has_data(server: scraping.Server, dashboard: Any, render: Render) -> None:
    """Read the queries from the chart's installed JSON."""
    (text,) = (
        text
        for each in of_kind(render(ON), "ConfigMap")
        for name, text in each["data"].items()
        if name == f"rlrun-{dashboard.name}.json"
    )
    panels = json.loads(text)["panels"]
    expressions = [fill_query(t["expr"], dashboard.name) for panel in panels for t in panel["targets"]]
    assert len(expressions) >= len(dashboard.panels)
    all_answer(server, expressions)


def find_operands(expression: str) -> list[str]:
    """Return each selector of an expression, without its range."""
    return re.findall(r"rlrun_\w+(?:\{[^}]*\})?", expression)


def test_each_alert_operand_has_data(server: scraping.Server, render: Render) -> None:
    found = {name: find_operands(rule["expr"]) for name, rule in get_alerts(render(ON)).items()}
    assert all(found.values()), found
    all_answer(server, sorted({operand for each in found.values() for operand in each}))


def test_alerts_name_the_broken_run(server: scraping.Server) -> None:
    wanted = {
        ("RLRunStalled", "bad"),
        ("RLRunStorageFull", "bad"),
        ("RLRunRestarting", "bad"),
        ("RLRunBudgetNearlySpent", "bad"),
    }
    told: dict[tuple[str, str], str] = {}

    def named() -> bool:
        for alert in server.alerts():
            key = (alert["labels"]["alertname"], alert["labels"].get("run", ""))
            told[key] = alert["annotations"]["summary"]
        return wanted <= told.keys()

    server.until(named, lambda: told)
    assert all("run bad" in told[key].lower() for key in wanted)
    silent = ("RLRunStalled", "RLRunStorageFull", "RLRunMismatchKLHigh", "RLRunTrainerStarved", "RLRunOperatorDown")
    assert [key for key in told if key[0] in silent and key[1] != "bad"] == []


def test_only_leader_counts_runs(server: scraping.Server) -> None:
    all_answer(server, ['rlrun_operator_leader{pod="standby"} == 0', "rlrun_info"])
    counted = server.query("count by (run) (rlrun_info)")
    assert {sample["metric"]["run"]: sample["value"][1] for sample in counted} == dict.fromkeys(
        ("good", "bad", "late", "new"), "1"
    )
    phases = server.query("count by (run) (rlrun_phase)")
    assert {sample["value"][1] for sample in phases} == {"10"}
    assert len(server.query('rlrun_step{run="good"}')) == 1


def test_pod_cannot_impersonate_another_run(server: scraping.Server) -> None:
    all_answer(server, ['rlrun_loss{pod="forged"}'])
    (sample,) = server.query('rlrun_loss{pod="forged"}')
    assert (sample["metric"]["namespace"], sample["metric"]["run"]) == ("team-a", "good")
    assert server.query('{run="theirs"}') == server.query('{namespace="team-b", run!=""}') == []
