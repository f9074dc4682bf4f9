"""Event stream about changing runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlrun.ui import live
from rlrun.ui.live import Feed
from rlrun.ui.run_registry import Registry
from tests.support.made_runs import made, metrics_line


def document(event: str) -> dict[str, str]:
    name, data, *_ = event.splitlines()
    assert name == "event: runs"
    found: dict[str, str] = json.loads(data.removeprefix("data: "))
    return found


async def test_event_stream_sends_current_state_and_changes(tmp_path: Path) -> None:
    run = made(tmp_path / "runs" / "demo")
    feed = Feed(Registry([run.root.parent]).fingerprint_runs, seconds=0.001)
    heard = feed.stream_events()
    async with asyncio.timeout(30):
        first = document(await anext(heard))
        assert list(first) == [run.id]
        run.lines("metrics.jsonl", [metrics_line(11)], more=True)
        second = document(await anext(heard))
        assert second[run.id] != first[run.id]
        other = made(tmp_path / "runs" / "other")
        while other.id not in second:  # a poll may happen between the writes of two files
            second = document(await anext(heard))
    await heard.aclose()


async def test_pages_share_one_poll_that_stops_without_pages() -> None:
    looks = 0

    def look() -> dict[str, str]:
        nonlocal looks
        looks += 1
        return {"a": str(looks)}

    feed = Feed(look, seconds=0.001)
    async with asyncio.timeout(30):
        pages = [feed.stream_events() for _ in range(10)]
        for page in pages:
            await anext(page)
        while looks < 5:
            heard = [document(await anext(page))["a"] for page in pages]
        assert max(map(int, heard)) <= looks
        for page in pages:
            await page.aclose()
    before = looks
    assert feed._task is None, "the look has ended with the last page"
    await asyncio.sleep(0)
    assert looks <= before + 1, "one that was under way"


async def test_simultaneous_pages_share_a_poll() -> None:
    feed = Feed(dict, seconds=0.001)
    pages = [feed.stream_events() for _ in range(5)]
    async with asyncio.timeout(30):
        await asyncio.gather(*(anext(page) for page in pages))
        looking = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(looking) == 1
        for page in pages:
            await page.aclose()
        await asyncio.wait(looking)
    assert feed.explain_refusal() is None


async def test_slow_page_receives_only_newest_state() -> None:
    state = {"a": "0"}
    feed = Feed(lambda: dict(state), seconds=0.001)
    heard = feed.stream_events()
    async with asyncio.timeout(30):
        await anext(heard)
        for number in range(1, 4):
            state["a"] = str(number)
            async with feed._changed:
                await feed._changed.wait_for(lambda: feed._now == state)
        assert document(await anext(heard)) == {"a": "3"}
    await heard.aclose()


async def test_unreadable_folder_does_not_end_events() -> None:
    answers = [{"a": "1"}, OSError("gone"), {"a": "2"}]

    def look() -> dict[str, str]:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, OSError):
            raise found
        return found

    heard = Feed(look, seconds=0.001).stream_events()
    async with asyncio.timeout(30):
        assert [document(await anext(heard))["a"] for _ in range(2)] == ["1", "2"]
    await heard.aclose()


async def test_idle_page_receives_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_KEEPALIVE_SECONDS", 0.001)
    heard = Feed(dict, seconds=0.001).stream_events()
    async with asyncio.timeout(30):
        found = set[str]()
        while len(found) < 2:
            found.add(await anext(heard))
    assert found == {"event: runs\ndata: {}\n\n", ": still here\n\n"}
    await heard.aclose()


async def test_page_limit_applies_per_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "OF_ONE_MAX", 2)
    monkeypatch.setattr(live, "CLIENTS_MAX", 3)
    feed = Feed(dict, seconds=0.001)
    async with asyncio.timeout(30):
        anns = [feed.stream_events(user="ann") for _ in range(2)]
        for page in anns:
            await anext(page)
        assert (
            feed.explain_refusal("ann")
            == "you have 2 open pages of this server, the maximum per user; close some of them"
        )
        assert [event async for event in feed.stream_events(user="ann")] == [], (
            "one that was answered before the others began"
        )
        assert feed.explain_refusal("bob") is None
        bobs = feed.stream_events(user="bob")
        await anext(bobs)
        assert "3 pages of this server are open, the maximum for all users" in str(feed.explain_refusal("eve"))
        await anns[0].aclose()
        assert feed.explain_refusal("eve") is None
        assert feed.explain_refusal("ann") is None
        for page in (anns[1], bobs):
            await page.aclose()
    assert not feed._clients
