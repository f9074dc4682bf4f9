"""An environment in a process of its own: whatever it does costs only its own rollouts, and nothing of it is left."""

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
    """Answers with the prompt; to "slow" after a minute."""

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
async def running(
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
    """A process that several tests share; none of them ends it."""
    async with running(log=Log(tmp_path_factory.mktemp("logs") / "new" / "bad.log")) as environment:
        yield environment
        assert environment.metrics()["restarts"] == 0


def play(
    environment: IsolatedEnvironment,
    task: str,
    model: Any = None,
    *,
    timeout: float = UNREACHED_SECONDS,
    reward: float = UNREACHED_SECONDS,
) -> Awaitable[Played]:
    ref = environment.tasks("train")[NAMES.index(task)]
    return environment.play(ref, model or Model(), timeout_seconds=timeout, reward_seconds=reward)


async def fails(playing: Awaitable[Played]) -> EpisodeError:
    with pytest.raises(EpisodeError) as caught:
        await playing
    return caught.value


@pytest.mark.parametrize("busy", [False, True])
async def test_a_process_whose_event_loop_hears_nothing_is_found_by_a_ping(busy: bool) -> None:
    async with running(replace(LIMITS, deaf_seconds=0.5)) as environment:
        others = [asyncio.ensure_future(play(environment, "waits")) for _ in range(busy)]
        error = await fails(play(environment, "deafens"))
        assert (error.kind, error.death) == ("hang", 1), error
        assert re.search(r"did not answer for \d+\.\d s although its event loop was idle", str(error))
        for other in others:
            assert (await fails(other)).death == 1
        assert (await play(environment, "good")).task_id == "good"


async def test_a_process_that_hears_is_not_ended_however_long_it_waits() -> None:
    async with running(replace(LIMITS, deaf_seconds=0.05, look_seconds=0.02)) as environment:
        waiting = asyncio.ensure_future(play(environment, "waits"))
        life = environment.workers[0].life
        assert isinstance(life, Life)
        await wait_for_async(lambda: life._answered_ping >= 20)
        assert environment.metrics()["restarts"] == 0
        waiting.cancel()


@on_module_loop
async def test_an_episode_played_there_is_as_one_played_here(living: IsolatedEnvironment) -> None:
    assert (living.id, living.single_turn) == ("misbehaving", True)
    assert [len(living.tasks(split)) for split in ("train", "eval")] == [len(NAMES), 1]
    model = Model()
    played = await play(living, "good", model)
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
async def test_what_a_living_process_does_costs_one_rollout_each(living: IsolatedEnvironment) -> None:
    found = {
        name: await fails(play(living, name, timeout=0.2 if name == "waits" else UNREACHED_SECONDS, reward=0.2))
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


async def test_what_a_process_has_loaded_is_spared_once_all_of_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spared: list[bool] = []
    inside = worker.Worker()
    monkeypatch.setattr(worker.heap, "freeze_loaded", lambda: spared.append(inside._stage is not None))
    assert inside._load({"op": "load", "id": "no:such", "args": {}})["op"] == "unusable"
    assert spared == []
    assert inside._load({"op": "load", "id": MODULE, "args": {}})["op"] == "ready"
    assert spared == [True]


@on_module_loop
async def test_what_is_printed_ends_in_the_log_even_if_it_looks_like_a_message(living: IsolatedEnvironment) -> None:
    assert (await play(living, "prints")).task_id == "prints"
    assert (await play(living, "good")).task_id == "good"
    path = living.workers[0].log.path
    assert path is not None
    await wait_for_async(lambda: path.read_bytes().count(b'"op":"played"') == 10_000)
    assert b"\xff\x00" in await asyncio.to_thread(path.read_bytes)


@on_module_loop
async def test_an_episode_that_ignores_its_end_is_given_up(
    living: IsolatedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk, "GRACE_SECONDS", 0.2)
    error = await fails(play(living, "ignores", timeout=0.2))
    assert (error.kind, error.task_id) == ("timeout", f"train[{NAMES.index('ignores')}]")
    assert (await play(living, "good")).task_id == "good"


@on_module_loop
async def test_a_reply_that_nobody_waits_for_is_cancelled_and_never_taken_for_the_next_one(
    living: IsolatedEnvironment,
) -> None:
    while True:  # on a busy machine it may have given up before its question is read, and nobody is asked
        model = Model()
        played = await play(living, "gives_up", model)
        assert played.episode.last_reply == "<gives_up>"
        asked = [seen[0][-1]["content"] for seen in model.seen]
        assert asked in (["gives_up"], ["slow", "gives_up"])
        if "slow" in asked:
            break
    assert model.cancelled == 1


@on_module_loop
async def test_a_rollout_that_is_cancelled_leaves_nothing_behind(living: IsolatedEnvironment) -> None:
    model = Model()
    playing = asyncio.ensure_future(play(living, "slow", model))
    await wait_for_async(lambda: len(model.seen) == 1)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await wait_for_async(lambda: model.cancelled == 1)
    assert living.workers[0].life._rollouts == {}


@on_module_loop
async def test_what_the_model_client_raised_comes_back_as_it_was(living: IsolatedEnvironment) -> None:
    error = await fails(play(living, "good", Model(ConnectionError("engine gone"))))
    assert (error.kind, error.task_id) == ("model", "good")
    assert isinstance(error.__cause__, ConnectionError)


@on_module_loop
async def test_an_environment_does_not_get_the_runs_key(living: IsolatedEnvironment) -> None:
    variables = await asyncio.to_thread(Path(f"/proc/{living.workers[0].life.pid}/environ").read_bytes)
    assert b"PYTHONPATH=" in variables
    assert b"RLRUN_API_KEY" not in variables


@pytest.mark.full  # the rows of `test_env_hostile` are the same deaths
async def test_a_deadly_deed_costs_the_rollouts_in_flight_and_the_process_comes_back() -> None:
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
    async with running() as environment:
        for deaths, (deed, (kind, message)) in enumerate(says.items(), 1):
            model = Model()
            beside = asyncio.ensure_future(play(environment, "slow", model))
            await wait_for_async(lambda model=model: bool(model.seen))  # it waits for the model
            if kind == "hang":  # all others answer, however late a busy machine lets them
                environment.workers[0].life.limits = replace(LIMITS, hang_seconds=2.0)
            error = await fails(play(environment, deed))
            assert (error.kind, error.death) == (kind, deaths), error
            assert str(error).startswith(f"environment '{MODULE}', task 'train[{NAMES.index(deed)}]': its process ")
            assert re.search(message, str(error))
            lost = await fails(beside)
            assert (lost.kind, lost.death) == (kind, deaths)
            await wait_for_async(lambda model=model: model.cancelled == 1)
            assert (await play(environment, "good")).task_id == "good"  # waits until it is up again
            assert environment.metrics()["restarts"] == deaths


async def test_a_rollout_that_was_given_up_is_blamed_for_the_end_of_the_process() -> None:
    """Its group was given up, or its time was over: its code runs on, and those beside it have done nothing."""
    async with running() as environment:
        model, late = Model(), Model()
        beside = asyncio.ensure_future(play(environment, "slow", model))
        given_up = asyncio.ensure_future(play(environment, "dies_late", late))
        await wait_for_async(lambda: bool(model.seen) and bool(late.seen))
        given_up.cancel()
        lost = await fails(beside)
        assert (lost.kind, lost.death, lost.bystander) == ("crash", 1, True)
        await wait_for_async(lambda: environment._record.accused == {TaskRef("train", NAMES.index("dies_late"))})


async def test_rollouts_that_were_given_up_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "MAX_GIVEN_UP", 3)
    async with running() as environment:
        for _ in range(5):
            model = Model()
            playing = asyncio.ensure_future(play(environment, "slow", model))
            await wait_for_async(lambda model=model: bool(model.seen))
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        assert len(environment.workers[0].life._given_up) == 3


async def test_one_that_was_ended_is_not_killed_once_more_when_its_connection_is_gone() -> None:
    """Seconds later its pid may be another process's, and the event loop may have no threads any more."""
    living = life.Life(Command(MODULE, {}), LIMITS, Log(None))
    await living.start()
    living.end()
    await wait_for_async(lambda: living._wire._transport is None)
    assert living._closing is None
    assert living._killing is None


async def test_nothing_that_an_environment_started_outlives_it() -> None:
    async with running() as environment:
        await play(environment, "lets_children_go")
        mark = environment.workers[0].life._mark
        assert len(processes_with(MARK_VARIABLE, mark)) == 5
        await fails(play(environment, "exits"))
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
async def test_an_environment_that_does_not_start_is_named(command: Command, says: str, code: int) -> None:
    environment = IsolatedEnvironment(
        "bad", command, replace(LIMITS, start_seconds=1 if "slow" in command.id else UNREACHED_SECONDS), [Log(None)]
    )
    with pytest.raises(RoleError, match=says) as caught:
        await environment.start()
    assert caught.value.code == code
    environment.close()


async def test_one_that_only_dies_ends_the_run_with_its_first_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "MAX_DEATHS", 2)

    async def wear_out() -> None:
        async with running(gives_up=True) as environment:
            await fails(play(environment, "exits"))
            await play(environment, "good")  # not in a row
            await fails(play(environment, "exits"))
            await fails(play(environment, "exits"))  # the same task again counts once
            await fails(play(environment, "dies"))

    with pytest.raises(RoleError, match=r"'bad': its process ended 3 times in a row .* first time it exited") as caught:
        await wear_out()
    assert caught.value.code == exit_codes.DATA


async def test_a_late_reply_to_a_call_that_was_given_up_is_dropped() -> None:
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


async def test_another_event_loop_is_refused_by_name() -> None:
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


async def test_it_ends_with_the_orchestrator_even_while_it_computes() -> None:
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


async def test_limits_and_interpreter_are_those_of_the_configuration(tmp_path: Path) -> None:
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


def test_a_log_has_an_end_and_does_not_mind_a_full_volume(tmp_path: Path) -> None:
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


def test_a_line_that_is_still_being_written_can_be_left_out() -> None:
    """Python's fault handler writes a line piece by piece, and a hang is told by the first one."""
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
