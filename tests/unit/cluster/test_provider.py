"""Selection of the cluster provider, and messages if it cannot work."""

from pathlib import Path

import pytest

from tests.cluster import ClusterError, attach, provider, up
from tests.cluster.kind import configuration
from tests.cluster.provider import VARIABLE, choose_provider, detect_provider


@pytest.mark.parametrize(
    ("kubeconfig", "kind", "chosen"),
    [("/k", True, "kubeconfig"), ("/k", False, "kubeconfig"), ("", True, "kind"), ("", False, "native")],
)
def test_first_working_provider_is_selected(kubeconfig: str, kind: bool, chosen: str) -> None:
    assert choose_provider(None, kubeconfig=kubeconfig, kind_works=lambda: kind) == chosen


def test_requested_provider_is_selected() -> None:
    assert choose_provider("native", kubeconfig="/k", kind_works=lambda: True) == "native"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("minikube", "use one of kubeconfig, kind, native"),
        ("kubeconfig", "set RLRUN_KUBECONFIG"),
        ("kind", "install kind .*start Docker"),
    ],
)
def test_unusable_provider_names_missing_requirement(wanted: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        choose_provider(wanted, kubeconfig="", kind_works=lambda: False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put a working `docker` and `kind` first on PATH, as on a hosted runner; each of their calls adds a line to the returned file."""
    log = tmp_path / "calls"
    log.touch()
    for program in ("docker", "kind"):
        stand_in = tmp_path / "bin" / program
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(f'#!/bin/sh\necho "{program} $*" >>{log}\n')
        stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("RLRUN_KUBECONFIG", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    return log


def test_named_provider_is_taken_without_asking_docker_or_kind(monkeypatch: pytest.MonkeyPatch, calls: Path) -> None:
    monkeypatch.setenv(VARIABLE, "native")
    assert detect_provider(None) == "native"
    assert calls.read_text() == ""


def test_provider_argument_overrides_variable(monkeypatch: pytest.MonkeyPatch, calls: Path) -> None:
    monkeypatch.setenv(VARIABLE, "kind")
    assert detect_provider("native") == "native"
    assert calls.read_text() == ""


def test_empty_variable_names_no_provider(monkeypatch: pytest.MonkeyPatch, calls: Path) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(provider, "kind_works", lambda: True)
    assert detect_provider(None) == "kind"


def test_unknown_provider_variable_is_refused(monkeypatch: pytest.MonkeyPatch, calls: Path) -> None:
    monkeypatch.setenv(VARIABLE, "minikube")
    for wanted in (None, "native"):
        with pytest.raises(
            ClusterError, match=r"RLRUN_PROVIDER is 'minikube': set it to one of kubeconfig, kind, native"
        ):
            detect_provider(wanted)


def test_named_kubeconfig_needs_one(monkeypatch: pytest.MonkeyPatch, calls: Path) -> None:
    monkeypatch.setenv(VARIABLE, "kubeconfig")
    with pytest.raises(ClusterError, match="set RLRUN_KUBECONFIG"):
        detect_provider(None)


def test_missing_kubeconfig_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    monkeypatch.setenv("RLRUN_KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ClusterError, match=r"RLRUN_KUBECONFIG: .*/none does not exist"):
        up("given")


def test_missing_cluster_error_contains_up_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    with pytest.raises(ClusterError, match=r"cluster x is not up: python -m tests.cluster up --name x"):
        attach("x")


def test_kind_nodes_mount_shared_volumes() -> None:
    nodes = configuration(2, Path("/cache/volumes"))["nodes"]
    assert isinstance(nodes, list)
    assert [node["role"] for node in nodes] == ["control-plane", "worker", "worker"]
    assert {node["extraMounts"][0]["hostPath"] for node in nodes} == {"/cache/volumes"}


def test_native_provider_without_root_names_alternatives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"run it with sudo, or start Docker .* or set RLRUN_KUBECONFIG"):
        up("x", provider="native")
