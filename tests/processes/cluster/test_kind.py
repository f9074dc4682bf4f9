"""Provider `kind` with fake kind, docker and kubectl programs that accept only the options of kind v0.30.0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ClusterError, api, kind, provider
from tests.cluster.binaries import KUBE_COMMANDS
from tests.cluster.docker_archive import write_archive
from tests.cluster.kind import KindCluster

ROOT = Path(__file__).parents[3]
KIND = """
import argparse, os, sys, time
parser = argparse.ArgumentParser(prog="kind", allow_abbrev=False)
top = parser.add_subparsers(dest="verb", required=True)
def command(verb, noun, *options, positional=()):
    if verb not in verbs:
        verbs[verb] = top.add_parser(verb).add_subparsers(dest="noun", required=True)
    made = verbs[verb].add_parser(noun, allow_abbrev=False)
    for name in (*positional, *options):
        made.add_argument(name)
verbs = {}
command("create", "cluster", "--name", "--config", "--kubeconfig", "--image", "--wait")
command("delete", "cluster", "--name", "--kubeconfig")
command("get", "clusters")
command("get", "nodes", "--name")
command("load", "image-archive", "--name", "--nodes", positional=["archive"])
options = parser.parse_args()
time.sleep(float(os.environ.get("KIND_SLEEPS", "0")))
state = os.environ["KIND_STATE"]
there = os.path.exists(state)
if options.verb == "create":
    open(state, "w").close()
    open(options.kubeconfig, "w").close()
if options.verb == "delete" and there:
    os.remove(state)
if options.verb == "get" and there:
    names = ["rlrun-k"] if options.noun == "clusters" else ["rlrun-k-worker2", "rlrun-k-control-plane", "rlrun-k-worker"]
    print("\\n".join(names))
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """File that receives one line per call of the fake programs."""
    log = tmp_path / "calls"
    log.touch()
    folder = tmp_path / "programs"
    folder.mkdir()

    def put(name: str, script: str) -> None:
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)

    (tmp_path / "kind.py").write_text(KIND)
    put("kind", f'#!/bin/sh\necho "kind $*" >>{log}\nexec {sys.executable} -I -S {tmp_path}/kind.py "$@"\n')
    put("docker", f'#!/bin/sh\necho "docker $*" >>{log}\n')
    fails = '[ -z "$KUBECTL_FAILS" ] || case "$*" in *"$KUBECTL_FAILS"*) echo refused >&2; exit 1;; esac'
    for command in (*KUBE_COMMANDS, "helm"):
        put(command, f'#!/bin/sh\necho "{command} $*" >>{log}\n{fails}\n')
    monkeypatch.setenv("RLRUN_KUBE_BIN", str(folder))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KIND_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("RLRUN_PROVIDER", "kind")
    monkeypatch.setattr(provider, "DOCKER_TIMEOUT_S", 120.0)
    return log


def make_archive(folder: Path) -> Path:
    write_archive(folder / "image.tar", "localhost/image:1", {"program": b""}, ["/program"])
    return folder / "image.tar"


def read_calls(calls: Path, program: str) -> list[str]:
    return [line for line in calls.read_text().splitlines() if line.startswith(f"{program} ")]


def test_cluster_is_created_loaded_and_deleted(calls: Path, tmp_path: Path) -> None:
    image = make_archive(tmp_path)
    cluster = api.up("k", nodes=2, kwok=False, images=[image])
    assert isinstance(cluster, KindCluster)
    assert cluster.nodes == ("rlrun-k-worker", "rlrun-k-worker2")
    folder = tmp_path / "cache/clusters/k"
    own = f"--name rlrun-k --kubeconfig {folder}/kubeconfig"
    asked = [line for line in calls.read_text().splitlines() if not line.startswith(("kind get", "docker info"))]
    assert asked[0] == f"kind create cluster {own} --config {folder}/kind.json --wait 120s"
    waits = "kubectl wait node --all --for=condition=Ready --timeout=120s"
    assert asked[-2:] == [waits, f"kind load image-archive {image} --name rlrun-k"]
    nodes = json.loads((folder / "kind.json").read_text())["nodes"]
    assert [node["role"] for node in nodes] == ["control-plane", "worker", "worker"]
    assert api.up("k", nodes=2, kwok=False).provider == "kind"
    assert len(read_calls(calls, "kind create")) == 1, "a cluster that is up is attached to"
    assert api.down("k")
    assert read_calls(calls, "docker exec") == [
        "docker exec rlrun-k-control-plane find /var/rlrun-volumes -mindepth 1 -delete"
    ]
    assert calls.read_text().splitlines()[-1] == f"kind delete cluster {own}"
    assert not folder.exists()


def test_interrupted_creation_leaves_no_containers(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECTL_FAILS", "wait node")
    with pytest.raises(ClusterError, match=r"kubectl wait node .* failed with 1: refused"):
        api.up("k", nodes=2, kwok=False)
    assert calls.read_text().splitlines()[-1].startswith("kind delete cluster --name rlrun-k ")
    assert api.find("k") is None
    monkeypatch.delenv("KUBECTL_FAILS")
    assert api.up("k", nodes=2, kwok=False).nodes, "the next try starts afresh"


def test_hanging_program_is_reported(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIND_SLEEPS", "600")
    monkeypatch.setattr(kind, "KIND_TIMEOUT_S", 1.0)
    with pytest.raises(ClusterError, match=r"`kind create cluster .*` did not end within 1 s"):
        api.up("k", nodes=2, kwok=False)


def test_demo_needs_no_package() -> None:
    """The CI job for kind installs only Python."""
    command = [sys.executable, "-S", "-m", "tests.cluster.demo", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--stubs" in done.stdout
