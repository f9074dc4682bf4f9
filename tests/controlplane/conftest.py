"""A real control plane without real nodes, with the RLRun resource installed as the documentation says: by Helm."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import Cluster, ClusterError, attach, up
from tests.cluster.api import find
from tests.controlplane.harness import OperatorProcess
from tests.controlplane.installation import fresh_namespace, install_crds, judged_operator
from tests.controlplane.world import World

NAME = "cplane"
USE = "RLRUN_TEST_CLUSTER"
"""Variable with the name of a cluster that is up, to be used instead of an own one: seconds saved while a test is written."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """API server, etcd, controllers, scheduler and kwok; it ends with the test run, however that ends."""
    given = os.environ.get(USE)
    try:
        if given:
            running = attach(given)
        else:
            # Another test run on this machine may hold the usual name.
            name = NAME if find(NAME) is None else f"{NAME}-{os.getpid()}"
            running = up(name, nodes=0, tie=True)
    except ClusterError as error:
        pytest.fail(f"these tests need a cluster: {error}", pytrace=False)
    try:
        install_crds(running)
        yield running
    finally:
        if not given:
            running.down()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace of this test."""
    with fresh_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="module")
def operator(
    cluster: Cluster, nodes: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """One operator for all namespaces, for the tests of a file that has a fixture `nodes`."""
    with judged_operator(cluster, tmp_path_factory.mktemp("operator")) as operator:
        yield operator


@pytest.fixture
def world(cluster: Cluster, operator: OperatorProcess, namespace: str) -> World:
    """A namespace of this test, under the operator."""
    return World(cluster, namespace)
