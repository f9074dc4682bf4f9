"""Work queue: unique keys, fairness, growing retry delays, and work that stops and resumes."""

from __future__ import annotations

import asyncio

from rlrun_operator.runtime.workqueue import LONGEST_BACKOFF_SECONDS, Workers, WorkQueue


def test_key_added_repeatedly_runs_once_in_order() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in ("a", "b", "a", "c", "a"):
        queue.add(key, 0.0)
    assert [queue.pop(0.0) for _ in range(4)] == ["a", "b", "c", None]


def test_key_added_during_work_runs_again_after_others() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", 0.0)
    assert queue.pop(0.0) == "a"
    queue.add("a", 1.0)
    queue.add("b", 1.0)
    queue.add("a", 1.0)
    assert (queue.pop(1.0), queue.pop(1.0)) == ("b", None), "a is in work: not by two workers at once"
    queue.record_success("a", 2.0)
    assert (queue.pop(2.0), queue.pop(2.0)) == ("a", None)


def test_shortest_of_several_delays_applies() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", 0.0, delay=30.0)
    queue.add("a", 0.0, delay=5.0)
    queue.add("a", 0.0, delay=60.0)
    assert queue.pop(4.9) is None
    assert queue.next_due() == 5.0
    assert queue.pop(5.0) == "a"
    queue.record_success("a", 5.0)
    assert queue.pop(1000.0) is None, "the longer delays are void"


def test_event_overrides_a_delay() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", 0.0, delay=30.0)
    queue.add("a", 1.0)
    assert queue.pop(1.0) == "a"
    queue.record_success("a", 1.0)
    assert queue.pop(31.0) is None


def test_failing_key_backs_off_despite_events() -> None:
    queue: WorkQueue[str] = WorkQueue()
    now, pauses = 0.0, []
    queue.add("a", now)
    for _ in range(8):
        assert queue.pop(now) == "a"
        queue.add("a", now, delay=0.2)
        queue.add("a", now)
        pause = queue.record_failure("a", now)
        pauses.append(pause)
        queue.add("a", now)
        assert queue.pop(now + pause - 0.01) is None
        now += pause
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert max(pauses) == LONGEST_BACKOFF_SECONDS
    assert queue.pop(now) == "a"
    queue.record_success("a", now)
    queue.add("a", now)
    assert queue.pop(now) == "a"
    assert queue.record_failure("a", now) == 1.0, "success starts the pauses anew"


def test_reopened_queue_resets_backoff() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in ("a", "b"):
        queue.add(key, 0.0)
        queue.pop(0.0)
        queue.record_failure(key, 0.0)
    queue.end_pauses(0.1)
    assert [queue.pop(0.1), queue.pop(0.1)] == ["a", "b"]


def test_new_keys_use_at_most_half_of_the_places() -> None:
    queue: WorkQueue[str] = WorkQueue(is_new=lambda key: key.startswith("new"), most_new=2)
    for number in range(1000):
        queue.add(f"new-{number}", 0.0)
    assert [queue.pop(1.0) for _ in range(3)] == ["new-0", "new-1", "new-2"], "nobody else needs the places"
    queue.add("trains", 1.0)
    queue.add("fails", 1.0)
    assert [queue.pop(2.0) for _ in range(3)] == ["trains", "fails", "new-3"], (
        "others do not wait for the new ones before them"
    )
    for key in ("new-0", "new-1", "new-2", "trains"):
        queue.record_success(key, 3.0)
    queue.add("trains", 3.0)
    assert queue.pop(4.0) == "new-4", "nor do new ones starve: one is in work, and the oldest of all is new"
    assert queue.pop(4.0) == "trains"
    assert queue.count_ready(5.0) == 995
    assert queue.age(5.0) == 5.0


def test_key_is_new_according_to_its_state_when_ready() -> None:
    begun: set[str] = set()
    queue: WorkQueue[str] = WorkQueue(is_new=lambda key: key not in begun, most_new=1)
    for key in ("a", "b", "c"):
        queue.add(key, 0.0)
    assert queue.pop(0.0) == "a"
    begun.add("a")
    queue.add("a", 0.0)
    queue.add("a", 0.5, delay=0.2)
    queue.record_success("a", 1.0)
    assert [queue.pop(1.0) for _ in range(4)] == ["b", "a", "c", None], (
        "what has begun overtakes, and stands in one line only"
    )


def test_age_and_depth_describe_ready_keys() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("later", 0.0, delay=10.0)
    assert (queue.count_ready(5.0), queue.age(5.0)) == (0, 0.0)
    queue.add("now", 5.0)
    assert (queue.count_ready(25.0), queue.age(25.0)) == (2, 20.0)
    queue.pop(25.0)
    assert queue.age(25.0) == 15.0, "the delayed one is ready since 10"
    assert queue.longest_work(40.0) == 15.0


def test_moving_queue_has_no_standstill() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for number in range(10):
        queue.add(str(number), 0.0)
    queue.end_pauses(50.0)
    assert queue.standstill(70.0) == 20.0, "before that nobody was allowed to take any"
    for now in (100.0, 150.0, 200.0):
        key = queue.pop(now)
        assert key is not None
        queue.record_success(key, now)
    assert queue.age(210.0) == 210.0
    assert queue.standstill(210.0) == 10.0
    queue.add("later", 300.0)
    while (key := queue.pop(300.0)) is not None:
        queue.record_success(key, 300.0)
    assert queue.standstill(900.0) == 0.0, "nothing waits"
    queue.add("new", 900.0)
    assert queue.standstill(905.0) == 5.0


class Bench:
    """Workers whose work ends when the test opens the gate."""

    def __init__(self, concurrency: int = 2) -> None:
        self.running: list[str] = []
        self.finished: list[str] = []
        self.failures: list[str] = []
        self.gate = asyncio.Event()
        self.fail = False
        self.workers: Workers[str] = Workers(
            self.work, lambda key, error, pause: self.failures.append(key), concurrency=concurrency
        )

    async def work(self, key: str) -> None:
        self.running.append(key)
        try:
            await self.gate.wait()
            if self.fail:
                raise RuntimeError("no")
            self.finished.append(key)
        finally:
            self.running.remove(key)

    async def until(self, what: str, **expected: object) -> None:
        for _ in range(60_000):  # one minute
            if all(getattr(self, name) == value for name, value in expected.items()):
                break
            await asyncio.sleep(0.001)
        assert all(getattr(self, name) == value for name, value in expected.items()), (what, vars(self))


async def test_workers_are_limited_to_the_concurrency() -> None:
    bench = Bench(concurrency=2)
    run = asyncio.create_task(bench.workers.run())
    for key in "abc":
        bench.workers.add(key)
    await asyncio.sleep(0)
    assert bench.running == [], "closed until opened"
    bench.workers.open()
    await bench.until("two at work", running=["a", "b"])
    assert bench.workers.count_ready() == 1
    bench.gate.set()
    await bench.until("all done", finished=["a", "b", "c"], running=[])
    run.cancel()


async def test_closed_workers_repeat_interrupted_work_after_opening() -> None:
    bench = Bench(concurrency=2)
    run = asyncio.create_task(bench.workers.run())
    bench.workers.open()
    bench.workers.add("a")
    await bench.until("at work", running=["a"])
    await bench.workers.close()
    assert bench.running == []
    assert bench.workers.age() == 0.0, "a closed queue that waits is not a sick one"
    assert bench.workers.standstill() == 0.0
    bench.gate.set()
    bench.workers.open()
    await bench.until("repeated", finished=["a"])
    run.cancel()


async def test_work_interrupted_before_its_first_line_is_repeated() -> None:
    bench = Bench()
    bench.gate.set()
    run = asyncio.create_task(bench.workers.run())
    bench.workers.open()
    bench.workers.add("a")
    await asyncio.sleep(0)  # the loop has created the task but not started it
    await bench.workers.close()
    bench.workers.open()
    await bench.until("repeated", finished=["a"])
    run.cancel()


async def test_failure_is_reported_and_retried() -> None:
    bench = Bench()
    bench.gate.set()
    bench.fail = True
    run = asyncio.create_task(bench.workers.run())
    bench.workers.open()
    bench.workers.add("a")
    await bench.until("failed", failures=["a"])
    bench.fail = False
    bench.workers.open()  # resets the delays
    await bench.until("retried", finished=["a"])
    run.cancel()
