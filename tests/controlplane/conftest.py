"""Fixtures for a real control plane without real nodes; Helm installs the RLRun resource as the documentation
describes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterError, attach, up
from tests.cluster.api import find
from tests.controlplane.harness import OperatorProcess
from tests.controlplane.installation import SHARED_NODE, SharedOperator, fake_nodes, fresh_namespace, install_crds
from tests.controlplane.world import World

NAME = "cplane"
USE = "RLRUN_TEST_CLUSTER"
"""Variable with the name of a running cluster to reuse, which saves seconds while a test is written."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files so that each operator starts once.

    First come files without the shared operator: an operator of all namespaces would act on their runs. Then those with its default
    settings, then those with their own.
    """
    here = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    served = {items[index].path for index in here if "operator" in getattr(items[index], "fixturenames", ())}

    def order(item: pytest.Item) -> tuple[bool, bool]:
        return item.path in served, hasattr(getattr(item, "module", None), "operator_settings")

    ordered = sorted((items[index] for index in here), key=order)
    for index, item in zip(here, ordered, strict=True):
        items[index] = item


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """API server, etcd, controllers, scheduler and kwok. The cluster ends with the test run, also after an abort."""
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
    """A new namespace for one test."""
    with fresh_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="session")
def shared_nodes(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Two nodes with eight GPUs each."""
    with fake_nodes(cluster, 2, prefix="shared", labels=SHARED_NODE) as names:
        yield names


@pytest.fixture(scope="module")
def nodes(shared_nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Nodes for the pods of a file's runs. A file that needs its own nodes overrides this fixture and selects them by a
    label."""
    return shared_nodes


@pytest.fixture(scope="session")
def shared_operator(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedOperator]:
    """The operator for all namespaces."""
    shared = SharedOperator(cluster, lambda: tmp_path_factory.mktemp("operator"))
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def operator_settings() -> Mapping[str, str]:
    """Environment of the operator that serves a file's runs. A file with its own settings overrides this fixture."""
    return {}


@pytest.fixture(scope="module")
def operator(shared_operator: SharedOperator, operator_settings: Mapping[str, str]) -> Iterator[OperatorProcess]:
    """The operator for all namespaces, with the settings of this file. It must keep running and log no unexpected
    error."""
    operator = shared_operator.start(operator_settings)
    yield operator
    assert operator.running, operator.account()
    operator.check_log()


@pytest.fixture
def world(cluster: Cluster, operator: OperatorProcess, nodes: tuple[str, ...], namespace: str) -> World:
    """A namespace for one test, served by the operator."""
    return World(cluster, namespace)
