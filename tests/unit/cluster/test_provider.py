"""Which provider is taken, and what is said when it cannot work."""

from pathlib import Path

import pytest

from tests.cluster import ClusterError, attach, up
from tests.cluster.kind import configuration
from tests.cluster.provider import choose_provider


@pytest.mark.parametrize(
    ("kubeconfig", "kind", "chosen"),
    [("/k", True, "kubeconfig"), ("/k", False, "kubeconfig"), ("", True, "kind"), ("", False, "native")],
)
def test_the_first_that_works_is_taken(kubeconfig: str, kind: bool, chosen: str) -> None:
    assert choose_provider(None, kubeconfig=kubeconfig, kind_works=lambda: kind) == chosen


def test_the_one_that_is_asked_for_is_taken() -> None:
    assert choose_provider("native", kubeconfig="/k", kind_works=lambda: True) == "native"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("minikube", "use one of kubeconfig, kind, native"),
        ("kubeconfig", "set RLRUN_KUBECONFIG"),
        ("kind", "install kind .*start Docker"),
    ],
)
def test_one_that_cannot_work_says_what_is_missing(wanted: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        choose_provider(wanted, kubeconfig="", kind_works=lambda: False)


def test_a_missing_kubeconfig_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    monkeypatch.setenv("RLRUN_KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterError, match=r"RLRUN_KUBECONFIG: .*/none does not exist"):
        up("given")


def test_a_cluster_that_is_not_up_says_how_to_bring_it_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    with pytest.raises(ClusterError, match=r"cluster x is not up: python -m tests.cluster up --name x"):
        attach("x")


def test_every_kind_node_sees_the_shared_volumes() -> None:
    nodes = configuration(2, Path("/cache/volumes"))["nodes"]
    assert isinstance(nodes, list)
    assert [node["role"] for node in nodes] == ["control-plane", "worker", "worker"]
    assert {node["extraMounts"][0]["hostPath"] for node in nodes} == {"/cache/volumes"}


def test_without_root_the_native_provider_names_the_other_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"run it with sudo, or start Docker .* or set RLRUN_KUBECONFIG"):
        up("x", provider="native")
