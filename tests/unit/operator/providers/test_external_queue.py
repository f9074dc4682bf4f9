"""Choice of the queue by provider, and the operations that every queue has."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest

from rlrun_operator import providers
from rlrun_operator.kube.client import Client
from rlrun_operator.reconcile.admissions import Admissions
from rlrun_operator.reconcile.cache_feed import Feed
from rlrun_operator.reconcile.external_queue import ExternalQueue
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.reconcile.queue_objects import Cluster
from rlrun_operator.reconcile.queues import queue_of
from rlrun_operator.reconcile.reconciler import Queue
from rlrun_operator.runtime.cache import Store
from rlrun_operator.settings import Provider, QueueSettings, RenderSettings
from tests.unit.operator.edge.fake_api import FakeApi, serve_api


def make_queue(client: Client, provider: Provider) -> Queue | None:
    store = Store()
    cluster = Cluster(
        client=client,
        store=store,
        feed=Feed(store, client, lambda key, seconds: None),
        look_ups=LookUps(client, read_nodes=False),
        namespaces=(),
        serves=lambda run: True,
        is_active=lambda: True,
        requeue=lambda key, seconds: None,
    )
    return queue_of(cluster, QueueSettings(provider=provider), RenderSettings(provider=provider))


@pytest.mark.parametrize("provider", [name for name in get_args(Provider) if name != "none"])
async def test_queue_of_each_provider_runs_until_canceled(provider: Provider) -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        queue = make_queue(client, provider)
        assert isinstance(queue, Admissions if provider == "own" else ExternalQueue)
        with pytest.raises(TimeoutError):  # the operator ends if this task ends
            await asyncio.wait_for(queue.run(), 0.2)


def test_external_provider_explains_its_ignored_fields() -> None:
    assert set(providers._IGNORED) == set(get_args(Provider)) - {"none", "own"}
