"""Environment in its own process: failures affect only its own rollouts, and it leaves no processes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.environments import Episode, EpisodeError, Message, Reply, Score
from rlrun.environments.process import life, supervised, talk, worker
from rlrun.environments.process.containment.keeper import MARK_VARIABLE
from rlrun.environments.process.isolated import IsolatedEnvironment
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import MAX_BYTES, Log
from rlrun.environments.stage import Played, TaskRef
from rlrun.orchestrator.rollouts import environment_pool
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.runtime.processes import processes_with
from tests.support.programs import cpu_seconds, wait_for_async
from tests.support.python_path import before
from tests.support.waiting import UNREACHED_SECONDS, result_of, wait_until

MEMORY = 200 * 1024**2
LIMITS = Limits(start_seconds=UNREACHED_SECONDS, memory_bytes=MEMORY, hang_seconds=UNREACHED_SECONDS, look_seconds=0.1)
MODULE = "misbehaving:misbehaving"
sys.path.insert(0, FOLDER := str(Path(__file__).parent / "misbehaving"))
from misbehaving import ASYNC, DEEDS  # noqa: E402

NAMES = [*DEEDS, *ASYNC]


on_module_loop = pytest.mark.asyncio(loop_scope="module")


class Model:
    """Model that returns the prompt; for "slow" only after a minute."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: list[tuple[list[Message], int | None, list[str]]] = []
        self.cancelled = 0

    async def complete(
        self, messages: Sequence[Message], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        self.seen.append((list(messages), max_tokens, list(stop)))
        if self.error:
            raise self.error
        try:
            await asyncio.sleep(60 if messages[-1]["content"] == "slow" else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Reply(f"<{messages[-1]['content']}>", "length", truncated=True)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", before(FOLDER))
        patch.setenv("RLRUN_API_KEY", "secret")
        patch.setattr(supervised, "FIRST_BACKOFF_SECONDS", 0.01)
        patch.setattr(life, "CLOSE_SECONDS", 2.0)
        patch.setattr(life, "MAX_PROCESSES", 20)
        patch.setattr(life, "STACK_SECONDS", 60.0)
        yield


@asynccontextmanager
async def run_environment(
    limits: Limits = LIMITS, log: Log | None = None, workers: int = 1, *, gives_up: bool = False
) -> AsyncIterator[IsolatedEnvironment]:
    environment = IsolatedEnvironment("bad", Command(MODULE, {}), limits, [log or Log(None)] * workers)
    await environment.start()
    supervising = asyncio.create_task(environment.run())
    try:
        yield environment
        if gives_up or supervising.done():
            await result_of(supervising, "the end of the supervision")
    finally:
        supervising.cancel()
        environment.close()
    assert processes_with(MARK_VARIABLE, environment.workers[0].life._mark) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def living(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[IsolatedEnvironment]:
    """Process that several tests share and do not end."""
    async with run_environment(log=Log(tmp_path_factory.mktemp("logs") / "new" / "bad.log")) as environment:
        yield environment
        assert environment.metrics()["restarts"] == 0


def play_task(
    environment: IsolatedEnvironment,
    task: str,
    model: Any = None,
    *,
    timeout: float = UNREACHED_SECONDS,
    reward: float = UNREACHED_SECONDS,
) -> Awaitable[Played]:
    ref = environment.tasks("train")[NAMES.index(task)]
    return environment.play(ref, model or Model(), timeout_seconds=timeout, reward_seconds=reward)


async def get_error(playing: Awaitable[Played]) -> EpisodeError:
    with pytest.raises(EpisodeError) as caught:
        await playing
    return caught.value


@pytest.mark.parametrize("busy", [False, True])
async def test_ping_finds_process_with_deaf_event_loop(busy: bool) -> None:
    async with run_environment(replace(LIMITS, deaf_seconds=0.5)) as environment:
        others = [asyncio.ensure_future(play_task(environment, "waits")) for _ in range(busy)]
        error = await get_error(play_task(environment, "deafens"))
        assert (error.kind, error.death) == ("hang", 1), error
        assert re.search(r"did not answer for \d+\.\d s although its event loop was idle", str(error))
        for other in others:
            assert (await get_error(other)).death == 1
        assert (await play_task(environment, "good")).task_id == "good"


async def test_waiting_process_with_responsive_loop_is_kept() -> None:
    async with run_environment(replace(LIMITS, deaf_seconds=0.05, look_seconds=0.02)) as environment:
        waiting = asyncio.ensure_future(play_task(environment, "waits"))
        life = environment.workers[0].life
        assert isinstance(life, Life)
        await wait_for_async(lambda: life._answered_ping >= 20)
        assert environment.metrics()["restarts"] == 0
        waiting.cancel()


@on_module_loop
async def test_process_plays_episode_like_in_process_environment(living: IsolatedEnvironment) -> None:
    assert (living.id, living.single_turn) == ("misbehaving", True)
    assert [len(living.tasks(split)) for split in ("train", "eval")] == [len(NAMES), 1]
    model = Model()
    played = await play_task(living, "good", model)
    assert model.seen == [([{"role": "user", "content": "good"}], None, [])]
    assert played == Played(
        "good",
        Episode(
            [{"role": "user", "content": "good"}, {"role": "assistant", "content": "<good>"}],
            1,
            {"finish_reason": "length", "truncated": True},
        ),
        Score(1.0, {"n": 2.0}),
    )


@on_module_loop
async def test_failing_deeds_affect_one_rollout_each(living: IsolatedEnvironment) -> None:
    found = {
        name: await get_error(
            play_task(living, name, timeout=0.2 if name == "waits" else UNREACHED_SECONDS, reward=0.2)
        )
        for name in ("raises", "exits_politely", "swallows_memory", "waits", "no_json", "scores_slowly")
    }
    told = {name: (error.kind, error.task_id) for name, error in found.items()}
    assert told == {
        "raises": ("environment", "raises"),
        "exits_politely": ("environment", "exits_politely"),
        "swallows_memory": ("environment", "swallows_memory"),
        "waits": ("timeout", "waits"),
        "no_json": ("environment", "no_json"),
        "scores_slowly": ("timeout", "scores_slowly"),
    }
    assert "KeyError: 'row 9'" in str(found["raises"])
    assert "SystemExit(4)" in str(found["exits_politely"])
    assert "MemoryError" in str(found["swallows_memory"])
    assert "which is not JSON" in str(found["no_json"])
    assert "score() did not finish within 0.2 seconds" in str(found["scores_slowly"])


async def test_loaded_objects_are_frozen_only_after_complete_load(monkeypatch: pytest.MonkeyPatch) -> None:
    spared: list[bool] = []
    inside = worker.Worker()
    monkeypatch.setattr(worker.heap, "freeze_loaded", lambda: spared.append(inside._stage is not None))
    assert inside._load_code({"op": "load", "id": "no:such", "args": {}})["op"] == "unusable"
    assert spared == []
    assert inside._load_code({"op": "load", "id": MODULE, "args": {}})["op"] == "ready"
    assert spared == [True]


@on_module_loop
async def test_printed_messages_go_to_the_log(living: IsolatedEnvironment) -> None:
    assert (await play_task(living, "prints")).task_id == "prints"
    assert (await play_task(living, "good")).task_id == "good"
    path = living.workers[0].log.path
    assert path is not None
    await wait_for_async(lambda: path.read_bytes().count(b'"op":"played"') == 10_000)
    assert b"\xff\x00" in await asyncio.to_thread(path.read_bytes)


@on_module_loop
async def test_episode_that_ignores_its_timeout_is_abandoned(
    living: IsolatedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk, "GRACE_SECONDS", 0.2)
    error = await get_error(play_task(living, "ignores", timeout=0.2))
    assert (error.kind, error.task_id) == ("timeout", f"train[{NAMES.index('ignores')}]")
    assert (await play_task(living, "good")).task_id == "good"


@on_module_loop
async def test_abandoned_reply_is_cancelled_and_never_reused(
    living: IsolatedEnvironment,
) -> None:
    while True:  # On a busy machine the deed can give up before its request is read, so that the model receives none.
        model = Model()
        played = await play_task(living, "gives_up", model)
        assert played.episode.last_reply == "<gives_up>"
        asked = [seen[0][-1]["content"] for seen in model.seen]
        assert asked in (["gives_up"], ["slow", "gives_up"])
        if "slow" in asked:
            break
    assert model.cancelled == 1


@on_module_loop
async def test_cancelled_rollout_is_removed(living: IsolatedEnvironment) -> None:
    model = Model()
    playing = asyncio.ensure_future(play_task(living, "slow", model))
    await wait_for_async(lambda: len(model.seen) == 1)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await wait_for_async(lambda: model.cancelled == 1)
    assert living.workers[0].life._rollouts == {}


@on_module_loop
async def test_exception_of_model_client_is_kept_as_cause(living: IsolatedEnvironment) -> None:
    error = await get_error(play_task(living, "good", Model(ConnectionError("engine gone"))))
    assert (error.kind, error.task_id) == ("model", "good")
    assert isinstance(error.__cause__, ConnectionError)


@on_module_loop
async def test_environment_does_not_get_api_key(living: IsolatedEnvironment) -> None:
    variables = await asyncio.to_thread(Path(f"/proc/{living.workers[0].life.pid}/environ").read_bytes)
    assert b"PYTHONPATH=" in variables
    assert b"RLRUN_API_KEY" not in variables


@pytest.mark.full  # The rows of `test_env_hostile` cover the same ends.
async def test_deadly_deed_ends_rollouts_and_process_restarts() -> None:
    says = {
        "exits": ("crash", r"exited with code 3; its last output: so long"),
        "dies": ("crash", r"was killed by SIGKILL"),
        "crashes": ("crash", r"was killed by SIGABRT at File .* in crashes"),
        "computes": (
            "hang",
            r"did not answer for \d\.\d s: .*; it is at File .*misbehaving.py\", line \d+ in computes",
        ),
        "leaks": ("memory", r"used 0.\d+ GiB, more than memoryGib allows \(0.20 GiB\)"),
        "multiplies": ("crash", r"ran \d\d processes \(the limit is 20\)"),
        "garbles": ("crash", r"broke the protocol"),
        "hangs_up": ("crash", r"closed its connection"),
    }
    async with run_environment() as environment:
        for deaths, (deed, (kind, message)) in enumerate(says.items(), 1):
            model = Model()
            beside = asyncio.ensure_future(play_task(environment, "slow", model))
            await wait_for_async(lambda model=model: bool(model.seen))  # The rollout waits for the model.
            if (
                kind == "hang"
            ):  # Only a hang needs a short limit: all other deeds return in time, even on a busy machine.
                environment.workers[0].life.limits = replace(LIMITS, hang_seconds=2.0)
            error = await get_error(play_task(environment, deed))
            assert (error.kind, error.death) == (kind, deaths), error
            assert str(error).startswith(f"environment '{MODULE}', task 'train[{NAMES.index(deed)}]': its process ")
            assert re.search(message, str(error))
            lost = await get_error(beside)
            assert (lost.kind, lost.death) == (kind, deaths)
            await wait_for_async(lambda model=model: model.cancelled == 1)
            assert (await play_task(environment, "good")).task_id == "good"  # Waits for the restart.
            assert environment.metrics()["restarts"] == deaths


async def test_abandoned_rollout_is_blamed_for_process_end() -> None:
    """The code of a cancelled or timed-out rollout still runs, and the rollouts next to it are innocent."""
    async with run_environment() as environment:
        model, late = Model(), Model()
        beside = asyncio.ensure_future(play_task(environment, "slow", model))
        given_up = asyncio.ensure_future(play_task(environment, "dies_late", late))
        await wait_for_async(lambda: bool(model.seen) and bool(late.seen))
        given_up.cancel()
        lost = await get_error(beside)
        assert (lost.kind, lost.death, lost.bystander) == ("crash", 1, True)
        await wait_for_async(lambda: environment._record.accused == {TaskRef("train", NAMES.index("dies_late"))})


async def test_record_of_abandoned_rollouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "MAX_GIVEN_UP", 3)
    async with run_environment() as environment:
        for _ in range(5):
            model = Model()
            playing = asyncio.ensure_future(play_task(environment, "slow", model))
            await wait_for_async(lambda model=model: bool(model.seen))
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        assert len(environment.workers[0].life._given_up) == 3


async def test_ended_process_is_not_killed_again_on_disconnect() -> None:
    """Seconds later its pid may belong to another process, and the threads of the event loop may have ended."""
    living = life.Life(Command(MODULE, {}), LIMITS, Log(None))
    await living.start()
    living.end()
    await wait_for_async(lambda: living._wire._transport is None)
    assert living._closing is None
    assert living._killing is None


async def test_child_processes_end_with_their_environment() -> None:
    async with run_environment() as environment:
        await play_task(environment, "lets_children_go")
        mark = environment.workers[0].life._mark
        assert len(processes_with(MARK_VARIABLE, mark)) == 5
        await get_error(play_task(environment, "exits"))
        assert processes_with(MARK_VARIABLE, mark) == []


@pytest.mark.parametrize(
    ("command", "says", "code"),
    [
        (Command("revers-text", {}), "did you mean reverse-text", exit_codes.CONFIGURATION),
        (
            Command("misbehaving:slow_start", {}),
            "did not load within 1 seconds",
            exit_codes.FAILURE,
        ),
        (Command("misbehaving:dies_at_start", {}), r"exited with code 7; .*no licence found while", exit_codes.FAILURE),
        (Command(MODULE, {}, "/no/python"), "cannot start /no/python: No such file", exit_codes.CONFIGURATION),
    ],
)
async def test_environment_that_fails_to_start_is_named(command: Command, says: str, code: int) -> None:
    environment = IsolatedEnvironment(
        "bad", command, replace(LIMITS, start_seconds=1 if "slow" in command.id else UNREACHED_SECONDS), [Log(None)]
    )
    with pytest.raises(RoleError, match=says) as caught:
        await environment.start()
    assert caught.value.code == code
    environment.close()


async def test_repeated_deaths_end_run_with_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "MAX_DEATHS", 2)

    async def wear_out() -> None:
        async with run_environment(gives_up=True) as environment:
            await get_error(play_task(environment, "exits"))
            await play_task(environment, "good")  # A success resets the count.
            await get_error(play_task(environment, "exits"))
            await get_error(play_task(environment, "exits"))  # The same task counts once.
            await get_error(play_task(environment, "dies"))

    with pytest.raises(RoleError, match=r"'bad': its process ended 3 times in a row .* first time it exited") as caught:
        await wear_out()
    assert caught.value.code == exit_codes.DATA


async def test_late_reply_to_abandoned_call_is_dropped() -> None:
    class Wire:
        def send(self, document: dict[str, Any]) -> None:
            self.last = document

        def send_line(self, line: bytes) -> None:
            pass

    wire = Wire()
    model = worker.RemoteModel(wire, 1)  # type: ignore[arg-type]
    first = asyncio.ensure_future(model.complete([{"role": "user", "content": "a"}]))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert wire.last == {"op": "abandon", "rollout": 1, "call": 1}
    second = asyncio.ensure_future(model.complete([{"role": "user", "content": "b"}]))
    await asyncio.sleep(0)
    model.set_reply({"op": "reply", "call": 1, **vars(Reply("late"))})
    model.set_reply({"op": "reply", "call": 2, **vars(Reply("in time"))})
    assert (await second).text == "in time"


async def test_call_from_another_event_loop_is_refused() -> None:
    """The reply would arrive in the episode's own loop, and the call would wait until its deadline."""
    model = worker.RemoteModel(Any, 1)  # type: ignore[arg-type]

    def ask() -> None:
        asyncio.run(model.complete([{"role": "user", "content": "a"}]))

    with pytest.raises(RuntimeError, match="called in another event loop; await it in the loop that runs the episode"):
        await asyncio.to_thread(ask)


COMPUTED_SECONDS = 0.5
HOLDER = """
import asyncio, sys
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.stage import TaskRef

async def main():
    life = Life(Command("misbehaving:misbehaving", {}), Limits(), Log(None))
    await life.start()
    asyncio.ensure_future(life.play(TaskRef("train", int(sys.argv[1])), None, timeout_seconds=60, reward_seconds=60))
    print(life._mark, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_computing_process_ends_with_the_orchestrator() -> None:
    command = [sys.executable, "-c", HOLDER, str(NAMES.index("computes"))]
    holder = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None
    mark = (await holder.stdout.readline()).decode().strip()
    held = processes_with(MARK_VARIABLE, mark)
    assert len(held) == 2
    used = cpu_seconds(*held)
    await wait_for_async(lambda: cpu_seconds(*held) > used + COMPUTED_SECONDS, "it computes")
    holder.kill()
    await holder.wait()
    await wait_for_async(lambda: processes_with(MARK_VARIABLE, mark) == [])


async def test_limits_and_interpreter_come_from_configuration(tmp_path: Path) -> None:
    document = {
        "id": "reverse-text",
        "name": "a/b",
        "start_timeout_seconds": 7,
        "memory_gib": 0.5,
        "timeout_seconds": 9,
    }
    document |= {"python": "/opt/py", "variables": ["TEAM_*"]}
    found = environment_pool.make_environment(EnvironmentConfig.model_validate(document), tmp_path)
    assert found._limits == Limits(start_seconds=7, memory_bytes=2**29, hang_seconds=9)
    assert found._command == Command("reverse-text", {}, "/opt/py", variables=("TEAM_*",))
    assert found.workers[0].log.path == tmp_path / "environment-a_b.log"


def test_log_is_bounded_and_survives_full_volume(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    reading, writing = os.pipe()
    thread = log.follow(reading)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(b"x" * (MAX_BYTES + 200_000))
        pipe.write(b"\nthe end\n")
    thread.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == MAX_BYTES + 200_009
    assert log.last_lines()[-1] == "the end"


def test_incomplete_log_line_can_be_excluded() -> None:
    """Python's fault handler writes a line in pieces, and the report of a hang uses the first complete line."""
    log = Log(None)
    reader, writer = os.pipe()
    thread = log.follow(reader)
    os.write(writer, b'Stack (most recent call first):\n  File "a.py"')
    wait_until(lambda: len(log.last_lines()) == 2)
    assert log.last_lines(whole=True) == ["Stack (most recent call first):"]
    os.write(writer, b", line 7 in hangs\n")
    os.close(writer)
    thread.join()
    assert log.last_lines(whole=True)[-1] == 'File "a.py", line 7 in hangs'
