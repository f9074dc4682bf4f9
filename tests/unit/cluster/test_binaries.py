"""Build of the programs of the local cluster."""

from __future__ import annotations

import re

from tests.cluster.binaries import TOOLS, linker_flags


def test_helm_build_flags_match_client_library_version() -> None:
    """Without these flags `helm template` and `helm lint` assume Kubernetes 1.20, which the charts refuse."""
    helm = TOOLS["helm"]
    client = re.search(r"k8s\.io/client-go v0\.(\d+)", (helm.folder / "go.mod").read_text())
    assert client is not None
    flags = linker_flags(helm)
    for package in ("chartutil", "lint/rules"):
        assert f"helm.sh/helm/v3/pkg/{package}.k8sVersionMajor=1 " in flags + " "
        assert f"helm.sh/helm/v3/pkg/{package}.k8sVersionMinor={client[1]} " in flags + " "
    assert f"version.version=v{helm.version} " in flags


def test_flags_of_every_program_are_complete() -> None:
    assert not [name for name, tool in TOOLS.items() if "{" in linker_flags(tool)]
