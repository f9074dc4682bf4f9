"""Hostile environment code: each deed affects only its own rollout, and is reported with its real cause."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rlrun.environments import EpisodeError, Message, Reply
from rlrun.environments.process import life, supervised, talk
from rlrun.environments.process.containment.keeper import MARK_VARIABLE
from rlrun.environments.process.isolated import IsolatedEnvironment
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.stage import Played, TaskRef
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime.processes import processes_with
from tests.support.python_path import before

sys.path.insert(0, FOLDER := str(Path(__file__).parent / "misbehaving"))
from hostile import NAMES

from tests.support.programs import wait_for_async
from tests.support.waiting import UNREACHED_SECONDS

LIMITS = Limits(
    start_seconds=UNREACHED_SECONDS, memory_bytes=400 * 1024**2, hang_seconds=UNREACHED_SECONDS, look_seconds=0.1
)
MARK = f"hostile-child-of-{os.getpid()}"
"""Argument of all processes that deeds leave behind, so that concurrent runs of these tests are ignored."""
pytestmark = pytest.mark.asyncio(loop_scope="module")

ENV, REWARD = "environment", "reward"
ONE_ROLLOUT: dict[str, tuple[str, str]] = {
    "raises_base_exception": (ENV, r"run\(\) raised OwnBaseException: all is lost"),
    "raises_generator_exit": (ENV, r"run\(\) raised GeneratorExit"),
    "raises_keyboard_interrupt": (ENV, r"run\(\) raised KeyboardInterrupt"),
    "raises_cancelled_error": (ENV, r"run\(\) raised CancelledError, although the episode was not cancelled"),
    "raises_system_exit": (ENV, r"run\(\) raised SystemExit\(4\)"),
    "raises_stop_iteration": (ENV, r"run\(\) raised RuntimeError: coroutine raised StopIteration"),
    "raises_group": (ENV, r"ExceptionGroup: two .*: ValueError: row 9; KeyError: 'k'"),
    "raises_base_group": (ENV, r"BaseExceptionGroup: two .*: OwnBaseException: lost; SystemExit\(4\)"),
    "raises_without_text": (ENV, r"run\(\) raised SilentError: \(its text cannot be read: OwnBaseException\)"),
    "raises_what_is_masked": (
        ENV,
        r"its code raised (OwnBaseException|an exception that cannot be described)|MaskedError",
    ),
    "raises_long_text": (ENV, r"ValueError: x{1000,1600} \.\.\. x{400,600}$"),
    "raises_surrogates": (ENV, r"run\(\) raised ValueError: \\ud800"),
    "lies_about_its_end": (ENV, r"run\(\) raised EpisodeError"),
    "raises_in_a_circle": (ENV, r"run\(\) raised ValueError: first"),
    "recurses": (ENV, r"run\(\) raised RecursionError"),
    "score_exits": (REWARD, r"score\(\) raised SystemExit\(4\)"),
    "score_raises_base_exception": (REWARD, r"score\(\) raised OwnBaseException: all is lost"),
    "score_raises_cancelled_error": (REWARD, r"score\(\) raised CancelledError, although the episode"),
    "awaited_task_exits": (ENV, r"run\(\) raised SystemExit\(4\)"),
    "interrupts_itself": (ENV, r"run\(\) raised KeyboardInterrupt"),
    "swallows_its_end": ("timeout", r"the episode did not finish within 1 seconds"),
    "takes_memory": (ENV, "run\\(\\) raised MemoryError"),
    "fills_the_disk": (ENV, "run\\(\\) raised OSError: .*No space left"),
    "nests_deeply": (ENV, r"info\['x'\]\[0\].* is nested deeper than 64 levels"),
    "holds_itself": (ENV, r"info\['self'\]\['self'\].* is nested deeper than 64 levels, or contains itself"),
    "brings_much_text": (ENV, r"info\['x'\] .* more than 16777216 characters"),
    "brings_many_values": (ENV, r"info\['x'\].* more than 1000000 values"),
    "brings_many_messages": (ENV, r"messages has 20000 entries \(at most 10000\)"),
    "brings_nan": (ENV, r"info\['deep'\]\[0\]\['x'\] is nan, which is not JSON"),
    "brings_a_huge_number": (ENV, r"info\['x'\] is an integer of \d+ bits"),
    "brings_an_object": (ENV, r"info\['x'\] is of type object, which is not JSON"),
    "brings_a_strange_key": (ENV, r"info has a key of type tuple"),
    "brings_surrogates": (ENV, r"info\['x'\] holds a lone surrogate at character 1"),
    "brings_no_messages": (ENV, r"messages must be a list of dictionaries"),
    "brings_words_as_messages": (ENV, r"messages\[0\] must be a dictionary with a role, not 'hello'"),
    "brings_a_generator": (ENV, r"messages must be a list of dictionaries"),
    "brings_a_fraction_of_a_reply": (ENV, r"replies must be a whole number of at least 1, not 1\.5"),
    "brings_nothing": (ENV, r"run\(\) must return an Episode with at least one reply, not NoneType"),
    "scores_1e300": (REWARD, r"the reward must be between -1e\+09 and 1e\+09, not 1e\+300"),
    "scores_float32_max": (REWARD, r"the reward must be between -1e\+09 and 1e\+09, not -3\.4e\+38"),
    "scores_inf": (REWARD, r"the reward must be a finite number, not inf"),
    "scores_nan": (REWARD, r"the reward must be a finite number, not nan"),
    "scores_a_huge_integer": (REWARD, r"the reward must be between -1e\+09 and 1e\+09, not int"),
    "scores_text": (REWARD, r"the reward must be a finite number, not '1'"),
    "scores_none": (REWARD, r"the reward must be a finite number, not None"),
    "scores_complex": (REWARD, r"the reward must be a finite number, not complex"),
    "scores_what_is_no_number": (REWARD, r"OwnBaseException: no number"),
    "scores_by_a_property": (REWARD, r"OwnBaseException: no reward"),
    "scores_nothing": (REWARD, r"score\(\) must return a Score, not NoneType"),
    "measures_1e300": (REWARD, r"the metric 'x' must be between -3\.40282e\+38 and 3\.40282e\+38, not 1e\+300"),
    "measures_inf": (REWARD, r"the metric 'x' must be a finite number, not -inf"),
    "measures_too_much": (REWARD, r"more than 256 metrics"),
    "measures_without_names": (REWARD, r"a metric's name must be a text of at most 200 characters, not None"),
    "measures_surrogates": (REWARD, r"a metric's name must be a text"),
    "measures_a_list": (REWARD, r"metrics must be a dictionary of numbers, not list"),
    "asks_with_a_generator": (ENV, r"messages must be a list of dictionaries, not repeat"),
    "asks_with_surrogates": (ENV, r"messages\[0\]\['content'\] holds a lone surrogate at character 0"),
    "asks_without_a_role": (ENV, r"messages\[0\] must be a dictionary with a role"),
    "asks_with_much_text": (ENV, r"messages\[0\]\['content'\] .* more than 16777216 characters"),
    "asks_for_no_tokens": (ENV, r"max_tokens must be a whole number of at least 1"),
    "asks_for_half_a_token": (ENV, r"max_tokens must be a whole number of at least 1"),
    "asks_to_stop_at_letters": (ENV, r"stop must be a list of non-empty texts"),
    "asks_to_stop_at_nothing": (ENV, r"stop must be a list of non-empty texts"),
    "asks_with_strange_tools": (ENV, r"tools\[0\] is of type builtin_function_or_method, which is not JSON"),
    "asks_without_end": (ENV, r"the episode has sent 300 requests to the model"),
}
"""Kind and message of deeds that affect only their own rollout; rollouts next to them continue."""
if (
    os.geteuid() == 0 and platform.machine() == "x86_64"
):  # On other systems the guard in the kernel is not available, see `process.guard`.
    everybody = ("signals_everybody", "signals_the_orchestrator", "signals_the_orchestrators_group")
    parent = (
        *("kills_its_parent", "terminates_its_parents_group", "signals_its_parent_by_its_folder"),
        *("signals_its_parent_by_a_socket", "signals_its_parent_by_ioctl", "signals_its_parent_by_32_bit_call"),
        "limits_its_parents_processor_time",
    )
    for guarded in (*everybody, "signals_the_orchestrator_by_descriptor", *parent):
        ONE_ROLLOUT[guarded] = (ENV, r"run\(\) raised PermissionError: .*Operation not permitted")
NOTHING = (
    *("stops_the_loop", "cancels_all_tasks", "background_task_exits", "callback_exits", "replaces_exception_handlers"),
    *(
        "floods_its_output",
        "starts_endless_threads",
        "lets_a_fork_return",
        "answers_for_others",
        "clears_the_environment",
    ),
    *("removes_its_folder", "brings_a_ghost", "scores_a_decimal", "closes_standard_streams", "replaces_task_factory"),
    *("changes_settings", "replaces_json", "replaces_the_clock", "replaces_asyncio"),
)
"""Deeds without consequences, in this order: the last ones leave state that the next process does not have."""
HELD_UP = r"did not answer for \d+\.\d s: code in it computes or waits without awaiting; it is at File .* in "
WHOLE_PROCESS: dict[str, tuple[str, str]] = {
    "exits_at_once": ("crash", "its process exited with code 3"),
    "exits_as_if_all_were_well": ("crash", "its process exited with code 0"),
    "aborts": ("crash", r"was killed by SIGABRT at File .* in aborts"),
    "reads_address_zero": ("crash", r"was killed by SIGSEGV at File "),
    "kills_itself": ("crash", "was killed by SIGKILL"),
    "terminates_its_group": ("crash", "was killed by SIGTERM"),
    "kills_its_parent": ("crash", "was killed by SIGKILL"),
    "terminates_its_parents_group": ("crash", "was killed by SIGTERM"),
    "sets_an_alarm": ("crash", "was killed by SIGALRM"),
    "closes_all_descriptors": ("crash", "closed (descriptors of the process|its connection)"),
    "garbles_its_connection": ("crash", r"broke the protocol \(it sent an invalid message"),
    "sends_what_is_malformed": ("crash", r"broke the protocol \(its message 'played' is malformed \(OverflowError"),
    "closes_its_connection": ("crash", "closed its connection"),
    "shuts_its_connection": ("crash", "closed its connection"),
    "becomes_another_program": ("crash", "closed its connection"),
    "forks_without_end": ("crash", r"was ended because it ran \d\d processes \(the limit is 20\)"),
    "computes_for_ever": ("hang", HELD_UP + "computes_for_ever"),
    "waits_for_a_lock_for_ever": ("hang", HELD_UP + "waits_for_a_lock_for_ever"),
    "stops_itself": ("hang", r"did not answer for \d+\.\d s: it was stopped by a signal"),
    "holds_the_interpreters_lock": (
        "hang",
        r"did not answer for \d+\.\d s: code in it holds the interpreter's lock",
    ),
    "takes_questions_for_its_end": ("hang", r"did not answer for \d+\.\d s: code in it computes"),
    "leaks": ("memory", r"used 0\.\d+ GiB, more than memoryGib allows"),
    "leaves_a_child_without_environment": ("crash", "exited with code 3"),
    "leaves_a_child_and_kills_its_parent": ("crash", "was killed by SIGKILL"),
    "stops_its_parent_and_exits": ("hang", "did not answer for"),
    "leaves_an_unseen_child_and_kills_its_group": ("crash", "was killed by SIGKILL"),
}
if "kills_its_parent" in ONE_ROLLOUT:
    for guarded in ("kills_its_parent", "terminates_its_parents_group"):
        del WHOLE_PROCESS[guarded]
    for guarded in ("leaves_a_child_and_kills_its_parent", "leaves_an_unseen_child_and_kills_its_parent"):
        WHOLE_PROCESS[guarded] = ("crash", "exited with code 3")
    WHOLE_PROCESS["stops_its_parent_and_exits"] = ("crash", "exited with code 3")
"""Kind and message of deeds that end the process; other rollouts are replayed."""


class Model:
    """Model that replies at once, but to a neighbour only on permission."""

    def __init__(self) -> None:
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def complete(self, messages: Sequence[Message], **_: Any) -> Reply:
        if messages[-1]["content"] == "neighbour":
            self.asked.set()
            await self.may.wait()
        return Reply("<>")


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", before(FOLDER))
        patch.setenv("TESTS_MARK", MARK)
        patch.setattr(supervised, "FIRST_BACKOFF_SECONDS", 0.01)
        patch.setattr(supervised, "MAX_BACKOFF_SECONDS", 0.01)
        patch.setattr(life, "CLOSE_SECONDS", 1.0)
        patch.setattr(life, "MAX_PROCESSES", 20)
        patch.setattr(life, "STACK_SECONDS", 60.0)
        patch.setattr(talk, "GRACE_SECONDS", 0.5)
        yield


@asynccontextmanager
async def run_environment(workers: int = 1, limits: Limits = LIMITS) -> AsyncIterator[IsolatedEnvironment]:
    logs = [Log(None) for _ in range(workers)]
    environment = IsolatedEnvironment("bad", Command("hostile:hostile", {}, variables=("TESTS_MARK",)), limits, logs)
    await environment.start()
    supervising = asyncio.create_task(environment.run())
    yield environment
    assert not supervising.done(), "the run would have ended"
    supervising.cancel()
    environment.close()
    assert find_children() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hostile() -> AsyncIterator[IsolatedEnvironment]:
    async with run_environment() as environment:
        yield environment


def life_of(environment: IsolatedEnvironment) -> Life:
    found = environment.workers[0].life
    assert isinstance(found, Life)
    return found


def play_task(
    environment: IsolatedEnvironment, name: str, model: Model | None = None, timeout: float = UNREACHED_SECONDS
) -> Any:
    task = environment.tasks("train")[NAMES.index(name)]
    return environment.play(task, model or Model(), timeout_seconds=timeout, reward_seconds=UNREACHED_SECONDS)


def find_children() -> list[int]:
    """Return the processes that a deed left behind."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and MARK.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


async def play_with_neighbor(
    environment: IsolatedEnvironment, name: str, timeout: float
) -> tuple[Played | EpisodeError, Any]:
    """Return the result of a deed, and of a rollout next to it."""
    model = Model()
    neighbour = asyncio.ensure_future(play_task(environment, "neighbour", model))
    await model.asked.wait()
    try:
        result: Played | EpisodeError = await play_task(environment, name, timeout=timeout)
    except EpisodeError as error:
        result = error
    model.may.set()
    (found,) = await asyncio.gather(neighbour, return_exceptions=True)
    return result, found


@pytest.mark.parametrize("name", ONE_ROLLOUT)
async def test_deed_fails_only_its_own_rollout(hostile: IsolatedEnvironment, name: str) -> None:
    restarts = hostile.metrics()["restarts"]
    error, neighbour = await play_with_neighbor(hostile, name, 1 if name == "swallows_its_end" else UNREACHED_SECONDS)
    assert isinstance(error, EpisodeError)
    kind, message = ONE_ROLLOUT[name]
    assert (error.kind, error.death) == (kind, 0), error
    assert re.search(message, error.message, re.DOTALL), error.message[:500]
    assert isinstance(neighbour, Played)
    assert len(str(error)) < 3000
    assert hostile.metrics()["restarts"] == restarts


@pytest.mark.parametrize("name", NOTHING)
async def test_harmless_deed_has_no_consequence(hostile: IsolatedEnvironment, name: str) -> None:
    found, neighbour = await play_with_neighbor(hostile, name, UNREACHED_SECONDS)
    assert isinstance(found, Played), found
    assert (found.task_id, found.score.reward) == (name, 1.0)
    assert isinstance(neighbour, Played), neighbour
    assert neighbour.task_id == "neighbour"
    assert isinstance(await play_task(hostile, "good"), Played)
    own = life_of(hostile)._mark
    await wait_for_async(lambda: len(processes_with(MARK_VARIABLE, own)) == 2)  # The keeper and its child.


@pytest.mark.parametrize("name", WHOLE_PROCESS)
async def test_process_ending_deed_fails_once_and_others_are_replayed(hostile: IsolatedEnvironment, name: str) -> None:
    kind, message = WHOLE_PROCESS[name]
    if kind == "hang":  # Only a hang needs a short limit: all other deeds return in time, even on a busy machine.
        await wait_for_async(lambda: hostile.workers[0].up)
        life_of(hostile).limits = replace(LIMITS, hang_seconds=2.0)
    error, neighbour = await play_with_neighbor(hostile, name, UNREACHED_SECONDS)
    assert isinstance(error, EpisodeError)
    assert (error.kind, error.task_id) == (kind, f"train[{NAMES.index(name)}]"), error
    assert re.search(message, error.message), error.message
    assert isinstance(neighbour, EpisodeError)
    assert (neighbour.death, neighbour.kind, neighbour.message) == (error.death, kind, error.message)
    knows = name not in ("leaks", "closes_its_connection", "shuts_its_connection", "closes_all_descriptors")
    assert (error.bystander, neighbour.bystander) == (False, knows)
    assert find_children() == []
    assert isinstance(await play_task(hostile, "good"), Played)


async def test_busy_environment_is_not_reported_as_hanging() -> None:
    """Two hundred scores of 20 ms each run in sequence: the event loop is late, but each of its calls is short."""
    async with run_environment() as environment:
        model, began = Model(), time.monotonic()
        playing = [asyncio.ensure_future(play_task(environment, "scores_slowly", model)) for _ in range(200)]
        found = await asyncio.gather(*playing, return_exceptions=True)
        assert [one for one in found if not isinstance(one, Played)] == []
        assert environment.metrics()["restarts"] == 0
        assert environment.metrics()["stall_seconds"] < (time.monotonic() - began) / 2


async def test_broken_shared_state_ends_with_its_process(hostile: IsolatedEnvironment) -> None:
    restarts = hostile.metrics()["restarts"]
    model = Model()
    neighbour = asyncio.ensure_future(play_task(hostile, "neighbour", model))
    await model.asked.wait()
    with pytest.raises(EpisodeError, match="its task list is gone"):
        await play_task(hostile, "breaks_what_all_use")
    for _ in range(supervised.MAX_FAILURES - 1):
        with pytest.raises(EpisodeError, match="its task list is gone"):
            await play_task(hostile, "good")
    await wait_for_async(lambda: hostile.metrics()["restarts"] == restarts + 1)
    assert isinstance(await play_task(hostile, "good"), Played)
    model.may.set()
    (found,) = await asyncio.gather(neighbour, return_exceptions=True)
    assert "its task list is gone" in str(found), "it was played to its end where it was"


async def test_orchestrator_validates_scores_itself() -> None:
    """An environment may have changed the validation code in its process."""
    living = Life(Command("hostile:hostile", {}, variables=("TESTS_MARK",)), LIMITS, Log(None))
    told = {"task_id": "x", "messages": [], "replies": 1, "info": {}, "metrics": {}}
    for number, reward in enumerate((1e300, float("nan"), "1")):
        result: asyncio.Future[Played] = asyncio.get_running_loop().create_future()
        living._rollouts[number] = talk._Rollout(TaskRef("train", 0), Model(), result)
        living._handle_message({"op": "played", "rollout": number, "reward": reward, **told})
        error = result.exception()
        assert isinstance(error, EpisodeError)
        assert (error.kind, error.task_id) == ("reward", "train[0]")


async def test_workers_share_rollouts_and_restart_separately() -> None:
    async with run_environment(workers=3) as environment:
        models = [Model() for _ in range(6)]
        playing = [asyncio.ensure_future(play_task(environment, "neighbour", model)) for model in models]
        for model in models:
            await model.asked.wait()
        assert [worker.life.in_flight for worker in environment.workers] == [2, 2, 2]
        with pytest.raises(EpisodeError, match="exited with code 3"):
            await play_task(environment, "exits_at_once")
        for model in models:
            model.may.set()
        found = await asyncio.gather(*playing, return_exceptions=True)
        assert sum(isinstance(one, Played) for one in found) == 4
        assert sum(isinstance(one, EpisodeError) and one.bystander for one in found) == 2
        await wait_for_async(lambda: all(worker.up for worker in environment.workers))
        assert environment.metrics()["restarts"] == 1


@pytest.mark.parametrize(
    ("id", "says"),
    [
        ("hostile:exits_at_start", r"exits_at_start\(\) raised SystemExit\(4\)"),
        ("exits_when_imported:environment", r"importing 'exits_when_imported' failed with SystemExit\(5\)"),
        ("hostile:nameless", r"its id cannot be read|OwnBaseException: no id"),
    ],
)
async def test_environment_that_exits_during_load_is_reported(id: str, says: str) -> None:
    environment = IsolatedEnvironment("bad", Command(id, {}), LIMITS, [Log(None)])
    with pytest.raises(RoleError, match=says):
        await environment.start()
    environment.close()


async def test_processes_end_with_a_killed_orchestrator(tmp_path: Path) -> None:
    code = HOLDER.format(name="lives_on", index=NAMES.index("lives_on"))
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await wait_for_async(lambda: len(find_children()) == 1)
    holder.kill()
    await holder.wait()
    await wait_for_async(lambda: find_children() == [])


HOLDER = """
import asyncio
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.stage import TaskRef

async def main():
    life = Life(Command("hostile:hostile", {{}}, variables=("TESTS_MARK",)), Limits(), Log(None))
    await life.start()
    await life.play(TaskRef("train", {index}), None, timeout_seconds=60, reward_seconds=60)

asyncio.run(main())
"""
