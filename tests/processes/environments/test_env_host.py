"""Environments in their own containers: the host is a process and the socket a file, as in a pod."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.environments import Episode, EpisodeError, Message, Reply, Score
from rlrun.environments.process import isolated, supervised
from rlrun.environments.process.isolated import IsolatedEnvironment
from rlrun.environments.process.life import Command, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.stage import Played
from rlrun.orchestrator.rollouts.environment_pool import host_of, make_environment
from rlrun.pod.pod_command import main
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime.bootstrap import HOST_MODULE, SHARED_SOCKET_VARIABLE, SOCKETS_VARIABLE, START, module_command
from tests.support.programs import children_progress, wait_for_async, wait_for_exit
from tests.support.python_path import before
from tests.support.waiting import UNREACHED_SECONDS, result_of

LIMITS = Limits(
    start_seconds=UNREACHED_SECONDS, memory_bytes=400 * 1024**2, hang_seconds=UNREACHED_SECONDS, look_seconds=0.05
)
MISBEHAVING = "misbehaving:misbehaving"
FOLDER = str(Path(__file__).parent / "misbehaving")
sys.path.insert(0, FOLDER)
from comparing import DEEDS as COMPARISONS  # noqa: E402
from misbehaving import ASYNC, DEEDS  # noqa: E402

NAMES = [*DEEDS, *ASYNC]


class Echo:
    """Model that returns the prompt."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def complete(self, messages: Sequence[Message], **_: Any) -> Reply:
        if self.error is not None:
            raise self.error
        return Reply(f"<{messages[-1]['content']}>", "stop")


class Slow(Echo):
    """Model that never replies."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def complete(self, messages: Sequence[Message], **_: Any) -> Reply:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


class Container:
    """Container of an environment, started and restarted as the kubelet does."""

    def __init__(self, socket: Path) -> None:
        self.socket, self.code = socket, socket.parent / "code"
        assert main(["share-code", str(self.code)]) == 0
        self.start()

    def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": before(FOLDER), "HOME": str(self.socket.parent / "home")}
        command = [sys.executable, "-c", START, str(self.code / "rlrun"), HOST_MODULE, str(self.socket)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def kill(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return wait_for_exit(self.process)


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    monkeypatch.setattr(supervised, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(isolated, "KNOCK_SECONDS", 0.05)
    found = Container(tmp_path / "sockets" / "bad.sock")
    yield found
    if found.process.poll() is None:
        assert found.kill(signal.SIGTERM) == 0


@asynccontextmanager
async def run_environment(container: Container, id: str = MISBEHAVING) -> AsyncIterator[IsolatedEnvironment]:
    environment = IsolatedEnvironment("bad", Command(id, {}), LIMITS, [Log(None)], container.socket)
    try:
        await environment.start()
        supervising = asyncio.create_task(environment.run())
        yield environment
        supervising.cancel()
    finally:
        environment.close()


async def play_task(environment: IsolatedEnvironment, name: str, model: Echo | None = None) -> Played:
    task = environment.tasks("train")[NAMES.index(name)]
    playing = environment.play(
        task, model or Echo(), timeout_seconds=UNREACHED_SECONDS, reward_seconds=UNREACHED_SECONDS
    )
    return await result_of(playing, f"the end of the episode {name}", progress=children_progress)


async def test_container_episodes_play_and_failures_stay_isolated(container: Container) -> None:
    async with run_environment(container) as environment:
        good = await play_task(environment, "good")
        assert good.score.reward == 1.0
        refused = ValueError("the engine is gone")
        with pytest.raises(EpisodeError) as caught:
            await play_task(environment, "good", Echo(refused))
        assert (caught.value.kind, caught.value.__cause__) == ("model", refused)
        with pytest.raises(EpisodeError, match="exited with code 3") as caught:
            await play_task(environment, "exits")
        assert caught.value.kind == "crash"
        assert (await play_task(environment, "good")).score.reward == 1.0
        await wait_for_async(lambda: environment.metrics()["memory_gib"] > 0)
        assert environment.metrics()["restarts"] == 1


async def test_container_compares_groups_and_identifies_failing_group(container: Container) -> None:
    group = [Played("t", Episode([{"role": "assistant", "content": reply}], 1), Score(1.0)) for reply in ("a", "bcd")]
    deadlines = {"timeout_seconds": UNREACHED_SECONDS, "reward_seconds": UNREACHED_SECONDS}
    async with run_environment(container, "comparing:comparing") as environment:
        tasks = {deed: environment.tasks("train")[i] for i, deed in enumerate(COMPARISONS)}
        found = await environment.compare(tasks["good"], group, **deadlines)
        assert [score.reward for score in found] == [2.0, 4.0]
        beside = asyncio.create_task(environment.compare(tasks["sleeps"], group, **deadlines))
        await wait_for_async(lambda: environment.workers[0].life.in_flight == 1)
        with pytest.raises(EpisodeError, match="exited with code 3") as caught:
            await environment.compare(tasks["exits"], group, **deadlines)
        assert not caught.value.bystander
        with pytest.raises(EpisodeError, match="exited with code 3") as caught:
            await beside
        assert caught.value.bystander


async def test_process_end_is_reported_before_rollout_ends(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a rollout that is sent in between is lost with a process that has already ended."""
    told, real = list[str](), isolated.Remote._handle_message

    def handle(self: isolated.Remote, document: Any) -> None:
        told.append(document["op"])
        real(self, document)

    monkeypatch.setattr(isolated.Remote, "_handle_message", handle)
    async with run_environment(container) as environment:
        with pytest.raises(EpisodeError, match="exited with code 3") as caught:
            await play_task(environment, "exits")
        assert caught.value.death == 1
    assert next(op for op in told if op in ("died", "failed")) == "died"


@pytest.mark.parametrize("deed", ["exits", "dies_late"])
async def test_culprit_of_process_end_is_reported_by_container(container: Container, deed: str) -> None:
    """Otherwise innocent rollouts count as failures, and five ends by one task end the run."""
    async with run_environment(container) as environment:
        model, asked = Slow(), Slow()
        beside = asyncio.ensure_future(play_task(environment, "slow", model))
        await wait_for_async(model.asked.is_set, "the first question")
        culprit = asyncio.ensure_future(play_task(environment, deed, asked))
        if deed == "dies_late":
            await wait_for_async(asked.asked.is_set, "the question of the culprit")
            culprit.cancel()
        with pytest.raises(EpisodeError, match="exited with code 3") as caught:
            await beside
        assert (caught.value.bystander, caught.value.death) == (True, 1)
        await asyncio.gather(culprit, return_exceptions=True)
        await wait_for_async(lambda: [NAMES[task.index] for task in environment._record.accused] == [deed])


async def test_restarted_container_is_used_again(container: Container) -> None:
    async with run_environment(container) as environment:
        await play_task(environment, "good")
        waits = asyncio.create_task(play_task(environment, "waits"))
        await wait_for_async(lambda: bool(environment.workers[0].life._rollouts))
        container.kill()
        with pytest.raises(EpisodeError, match="was in a container that ended"):
            await waits
        container.start()
        assert (await play_task(environment, "good")).score.reward == 1.0


async def test_unresponsive_host_is_abandoned(container: Container) -> None:
    async with run_environment(container) as environment:
        waits = asyncio.create_task(play_task(environment, "waits"))
        life = environment.workers[0].life
        assert isinstance(life, isolated.Remote)
        await wait_for_async(lambda: bool(life._rollouts))
        life._limits = replace(LIMITS, hang_seconds=0.3)
        container.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(EpisodeError, match=r"whose first process did not answer for \d+\.\d s") as caught:
                await waits
        finally:
            container.process.send_signal(signal.SIGCONT)
        assert (caught.value.kind, caught.value.death) == ("hang", 1)
        assert (await play_task(environment, "good")).score.reward == 1.0


async def test_container_load_error_is_reported(container: Container) -> None:
    with pytest.raises(RoleError, match="no_such_module"):
        async with run_environment(container, "no_such_module:environment"):
            pass


async def test_missing_container_is_reported_with_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "KNOCK_SECONDS", 0.01)
    limits = Limits(start_seconds=0.05)
    environment = IsolatedEnvironment("bad", Command("x", {}), limits, [Log(None)], tmp_path / "none.sock")
    with pytest.raises(RoleError, match=r"no container answered at .*none\.sock within 0\.05 seconds"):
        await environment.start()


async def test_link_in_place_of_socket_is_refused(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_environment(container):
        pass  # The target of the link exists and accepts connections.
    link = tmp_path / "link"
    link.symlink_to(container.socket)
    monkeypatch.setattr(isolated, "KNOCK_SECONDS", 0.01)
    environment = IsolatedEnvironment("bad", Command(MISBEHAVING, {}), Limits(start_seconds=0.05), [Log(None)], link)
    with pytest.raises(
        RoleError, match=r"no container answered at .*link within .* \(Socket operation on non-socket\)"
    ):
        await environment.start()


async def test_socket_is_writable_by_its_group(container: Container) -> None:
    async with run_environment(container):
        assert stat.S_IMODE(container.socket.stat().st_mode) == 0o660


@pytest.fixture
def shared_container(tmp_path: Path) -> Iterator[Path]:
    """Socket of the container that several environments share."""
    socket = tmp_path / "sockets" / "shared.sock"
    process = subprocess.Popen(
        module_command("rlrun.pod", ["environments", str(socket)]),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": before(FOLDER), "HOME": str(tmp_path / "home")},
        stdin=subprocess.DEVNULL,
    )
    yield socket
    process.terminate()
    assert wait_for_exit(process) == 0


async def test_shared_container_separates_variables_and_logs_of_environments(
    shared_container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_TOKEN", "secret-of-the-first")
    found = {}
    for name, variables in (("first", ["TEAM_TOKEN"]), ("second", [])):
        config = EnvironmentConfig(id="telling:telling", name=name, variables=variables, isolation="Container")
        environment = make_environment(config, tmp_path / "logs", shared_container)
        try:
            await environment.start()
            seconds = {"timeout_seconds": UNREACHED_SECONDS, "reward_seconds": UNREACHED_SECONDS}
            found[name] = (await environment.play(environment.tasks("train")[0], Echo(), **seconds)).episode.info
            assert environment.digest
        finally:
            environment.close()
    assert found["first"]["TEAM_TOKEN"] == "secret-of-the-first"
    assert "TEAM_TOKEN" not in found["second"]
    log = tmp_path / "logs" / "environment-first.log"
    await wait_for_async(
        lambda: log.exists() and "printed by an environment: \N{GREEK SMALL LETTER ALPHA}" in log.read_text()
    )


def test_environments_use_containers_only_in_a_pod() -> None:
    both = [EnvironmentConfig(id="a"), EnvironmentConfig(id="b", image="b:1")]
    in_pod = {SOCKETS_VARIABLE: "/run/e"}
    assert [host_of(both, i, in_pod) for i in (0, 1)] == [None, Path("/run/e/1/socket")]
    assert [host_of(both, i, {}) for i in (0, 1)] == [None, None]
    shared = {SHARED_SOCKET_VARIABLE: "/run/s"} | in_pod
    three = [EnvironmentConfig(id="a"), EnvironmentConfig(id="c", isolation="Process"), both[1]]
    assert [host_of(three, i, shared) for i in (0, 1, 2)] == [Path("/run/s"), None, Path("/run/e/2/socket")]
    assert host_of(three, 0, in_pod) is None


def test_failed_copy_of_code_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["share-code", str(tmp_path / "file" / "code")]) == 10
    assert "rlrun-pod: cannot copy this package to" in capsys.readouterr().err
