"""The trainer's loop, the same on every rank, over one run or over several that share the model.

    start    choose the base checkpoint, write the attempt's file, load, publish the base version
    loop     rank 0 looks who has something to do, and all ranks do it: a step of one run, a run that joins, leaves or ends
    stop     asked by a signal, all ranks leave together: between two micro-batches, while they wait, or at the end of what they write;
             then the last finished step of every run is saved

Runs take turns step by step, those alone whose batch is there. An exception in a guest's work ends the guest, in the trainer's own run it
ends the process. See `run` for a run's state and work, and `tenants` for admission.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loguru import logger

from rlrun.algorithms import Mixture
from rlrun.config.roles import TrainerConfig
from rlrun.protocol import exit_codes
from rlrun.protocol.attempts import Attempt, attempt_of, read_attempt
from rlrun.protocol.failures import RoleError
from rlrun.protocol.paths import RunPaths
from rlrun.protocol.shared import SlotState
from rlrun.protocol.storage import Volume
from rlrun.trainer.channel.batch_feed import TICK_SECONDS, Feed, LiveFeed, ReplayFeed, cut_metrics
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.checkpoints import resume
from rlrun.trainer.engines_beside import EnginesBeside
from rlrun.trainer.learning.objective import bind_objective
from rlrun.trainer.modeling.shared_model import load_policy, model_source
from rlrun.trainer.ranks.group import Group, process_group
from rlrun.trainer.ranks.phases import Phases
from rlrun.trainer.ranks.stop import Stop, StopAgreed
from rlrun.trainer.run import Slot
from rlrun.trainer.tenants.isolation import Isolation, tell_all, to_blame
from rlrun.trainer.tenants.requests import Guests
from rlrun.trainer.turns import next_turn

GUEST_SILENCE_SECONDS = 120.0
"""A guest whose orchestrator asks for nothing for so long has lost it, and makes room."""
Order = dict[str, Any]
"""What all ranks do next: JSON, as rank 0 broadcasts it."""


def run(
    config: TrainerConfig,
    *,
    attempt: int,
    api_key: str,
    replay: Path | None = None,
    config_hash: str = "",
    stop: Stop | None = None,
) -> int:
    """Train to the last step.

    Args:
        config: the role's resolved configuration.
        attempt: this attempt's number, new in the run's folder.
        api_key: guards the channel to the orchestrator.
        replay: train on the recorded batches of this folder; there is no orchestrator then.
        config_hash: of the run's configuration, kept in attempt file and manifests.
        stop: what signals ask; None: nobody asks.

    Returns:
        The exit code: 0, or 128 + n when signal n ended the run early.

    Raises:
        RoleError: what went wrong, for a person, with the exit code.
    """
    objective = bind_objective(config)  # a wrong name is told before anything is loaded
    if config.colocated:
        EnginesBeside(config.engine_urls, api_key).wait_until_asleep()  # before this process has anything of the GPUs
    with process_group(config.gpus_per_replica, config.parallelism) as group:
        return _Trainer(config, objective, attempt, api_key, replay, config_hash, group, stop or Stop()).run()


class _Trainer:
    """One rank of the process. What only rank 0 has is None elsewhere."""

    def __init__(
        self,
        config: TrainerConfig,
        objective: Mixture,
        attempt: int,
        api_key: str,
        replay: Path | None,
        config_hash: str,
        group: Group,
        stop: Stop,
    ) -> None:
        self.config, self.group, self.stop, self.number = config, group, stop, attempt
        self.news = threading.Event()
        self._engines = EnginesBeside(config.engine_urls, api_key) if config.colocated else None
        self.place = 0
        """Places passed so far where ranks agree; the same on all of them."""
        self.channel: Channel | None = None
        self.phases = Phases.of_group(group.rank, group.world_size)
        feed = self._open_feed(api_key, replay) if group.leads else None
        paths = RunPaths(Path(config.output_dir))
        begun = self._begin_attempt(paths, config_hash, replay)
        # A checkpoint holds what is trained: the weights that adapters leave as they are come from the model.
        begins = begun.base_step == 0 and begun.origin is None
        if self.channel is not None:
            self.channel.phase("loading")
        self.phases.say("loading", begun.base_step)
        source = model_source(config, paths, group)
        self.policy = load_policy(config, source, group, with_weights=config.lora is not None or begins)
        own = self._slot(config, objective, begun, paths.root, self.channel, feed, replay=replay is not None)
        self.own: Slot | None = own
        """The run that the process was started for, until it is over."""
        self.slots = [own]
        """All runs, in the order in which they came."""
        self.seats: dict[str, int] = {}
        """Number of each guest's slot, from 1."""
        self.last: str | None = None
        """Who trained the last step."""
        self.size = 1 if config.lora is None or replay is not None else config.lora.slots
        self.isolation = Isolation(group) if self.size > 1 else None
        self.guests = (
            Guests(config, world_size=group.world_size, api_key=api_key) if group.leads and self.size > 1 else None
        )

    def _open_feed(self, api_key: str, replay: Path | None) -> Feed:
        if replay is not None:
            return ReplayFeed(replay)
        paths, number = RunPaths(Path(self.config.output_dir)), self.number
        self.channel = Channel.listen(
            attempt=number,
            api_key=api_key,
            host=self.config.host,
            port=self.config.port,
            batch_path=lambda step: paths.batch(step, number),
            news=self.news,
        )
        self.channel.ranks = self.phases.others
        return LiveFeed(self.channel)

    def _begin_attempt(self, paths: RunPaths, config_hash: str, replay: Path | None) -> Attempt:
        """Rank 0 decides and writes; the others read what it wrote."""
        group = self.group
        if group.leads:
            begun = Volume(paths.root, say=logger.warning).insist(
                "begin the attempt",
                lambda: resume.begin(
                    paths,
                    self.config,
                    attempt=self.number,
                    world_size=group.world_size,
                    config_hash=config_hash,
                    with_orchestrator=replay is None,
                    log=logger.warning,
                ),
            )
            logger.info(
                f"attempt {self.number}: {group.world_size} ranks ({group.dims}) on {group.device.type}, from {_start(begun)}"
            )
            if replay is not None:
                cut_metrics(paths, begun.base_step)
        group.barrier()
        return read_attempt(paths.attempt_file(self.number))

    def _slot(
        self,
        config: TrainerConfig,
        objective: Mixture,
        attempt: Attempt,
        folder: Path,
        channel: Channel | None,
        feed: Feed | None,
        *,
        replay: bool = False,
        label: str = "",
    ) -> Slot:
        return Slot(
            config,
            attempt,
            self.policy,
            objective,
            output_dir=folder,
            replay=replay,
            channel=channel,
            feed=feed,
            agree=self._agree_to_stop,
            tell=self.phases.say,
            label=label,
            engines=self._engines,
        )

    def run(self) -> int:
        """All steps of all runs; returns the exit code."""
        with ExitStack() as stack:
            if self.channel is not None:
                stack.callback(self.channel.close)
            try:
                self._run()
            except StopAgreed:
                return self._save_and_end()
        return exit_codes.OK

    def _run(self) -> None:
        assert self.own is not None
        self.own.begin()
        self.stop.allow_time(self.config.checkpoint.grace_period_seconds, self.group.neighbours())
        if self.channel is not None:
            self.channel.stop = self.stop.join
        while True:
            self._agree_to_stop()
            order = self.group.broadcast(self._next_order() if self.group.leads else None)
            if order["do"] == "end":
                return
            self._carry_out(order)

    # ---- rank 0 decides

    def _next_order(self) -> Order:
        """What is to be done now, or nothing when a tick has passed: ranks that wait see then that they are asked to stop."""
        deadline = time.monotonic() + TICK_SECONDS
        while True:
            self.news.clear()
            order = self._change() or self._arrival() or self._turn()
            if order is not None:
                return order
            if not self.slots and (self.guests is None or not self.guests.pending()):
                return {"do": "end"}
            if (left := deadline - time.monotonic()) <= 0:
                return {"do": "wait"}
            self.news.wait(left)

    def _change(self) -> Order | None:
        """What has become of a run that has a slot."""
        for slot in self.slots:
            over = slot.stage == "finished" and slot.over()
            error = slot.problem() or (slot.end() if over else None)
            if error is not None:
                if slot is self.own:
                    raise error
                return _drop(slot, "Failed", str(error), error.code)
            again = slot.save_again()  # asked in every round: it is what tells of a refusal too
            if slot.stage == "finished" or slot.trained():
                if again:
                    return {"do": "save", "run": slot.name}
                if slot.unsaved() is not None and not over:
                    continue
            if slot.stage == "training" and slot.trained():
                return {"do": "finish", "run": slot.name}
            if over:
                return {"do": "close", "run": slot.name}
            if slot.stage == "leaving" and slot.left():
                return _drop(slot, "Left", "it has asked to leave, or its orchestrator is gone")
        return None

    def _arrival(self) -> Order | None:
        """What the requests say: who leaves, and who joins."""
        if self.guests is None:
            return None
        self.guests.look()
        joined = {slot.name: slot.number for slot in self.slots if slot is not self.own}
        for change in self.guests.changes(joined):
            slot = self._named(change.run)
            if change.at_once:
                return _drop(slot, "Left", change.reason)
            if slot.stage == "training":
                return {"do": "leave", "run": slot.name}
        for slot in self.slots:
            if slot is not self.own and slot.stage == "training" and slot.silence() > GUEST_SILENCE_SECONDS:
                logger.warning(f"run {slot.name}: its orchestrator has asked for nothing for {slot.silence():.0f} s")
                return {"do": "leave", "run": slot.name}
        guest = self.guests.next(joined, free=len(joined) + 1 < self.size)
        if guest is None:
            return None
        config = guest.config.model_dump(mode="json")
        return {"do": "join", "config": config, "attempt": asdict(guest.attempt), "folder": str(guest.folder)}

    def _turn(self) -> Order | None:
        """The next step: of the run after the one that trained last, among those whose batch is there."""
        ready = {slot.name for slot in self.slots if slot.stage == "training" and slot.ready()}
        run = next_turn([slot.name for slot in self.slots], self.last, ready)
        if run is None:
            return None
        path = self._named(run).next_batch()
        if path is None:
            return None
        return {"do": "step", "run": run, "path": str(path), "save": self._named(run).save_again()}

    # ---- all ranks carry it out

    def _carry_out(self, order: Order) -> None:
        match order["do"]:
            case "join":
                self._join(order)
            case "step":
                self.last = order["run"]
                path, save = Path(order["path"]), bool(order["save"])
                self._alone(self._named(order["run"]), lambda slot: slot.step(path, save=save))
            case "save":
                self._alone(self._named(order["run"]), Slot.save)
            case "finish":
                self._alone(self._named(order["run"]), Slot.finish)
            case "leave":
                self._alone(self._named(order["run"]), Slot.leave)
            case "close":
                self._close(self._named(order["run"]))
            case "drop":
                self._part(self._named(order["run"]), order["state"], order["reason"], order["code"])

    def _alone(self, slot: Slot, act: Callable[[Slot], None]) -> bool:
        """Let one run do something; what fails in a guest ends that guest. Returns whether it did not fail.

        Raises:
            StopAgreed: all ranks are to stop.
            Exception: what failed was the trainer's own run's, or not the same on all ranks.
        """
        try:
            act(slot)
        except StopAgreed:
            raise
        except Exception as error:
            if slot is self.own:
                raise
            failure = self._contain(slot.name, slot.number, error)
            self._part(slot, "Failed", str(failure), failure.code)
            return False
        return True

    def _contain(self, run: str, attempt: int, error: Exception) -> RoleError:
        """Make the model fit for the other runs again; returns the error for a person.

        Raises:
            RoleError: the ranks are not at the same place, so no run can go on here.
        """
        assert self.isolation is not None
        failure = error if isinstance(error, RoleError) else RoleError(f"{type(error).__name__}: {error}")
        if not isinstance(error, RoleError):
            logger.opt(exception=error).error(f"run {run} failed")
        if not self.isolation.contained(error, self.place):
            if to_blame(error):
                tell_all(RunPaths(Path(self.config.output_dir)), run, attempt, failure)
            raise RoleError(
                f"run {run} failed on some ranks alone, so that all runs have to start again: {failure}", failure.code
            ) from error
        self.policy.reset()
        return failure

    def _join(self, order: Order) -> None:
        config, attempt = TrainerConfig.model_validate(order["config"]), attempt_of(order["attempt"])
        folder = Path(order["folder"])
        paths = RunPaths(folder)
        channel = feed = None
        if self.channel is not None:
            channel = self.channel.beside(
                config.name, attempt=attempt.attempt, batch_path=lambda step: paths.batch(step, attempt.attempt)
            )
            feed = LiveFeed(channel)
        try:
            slot = self._slot(config, bind_objective(config), attempt, folder, channel, feed, label=f"{config.name}: ")
        except Exception as error:
            failure = self._contain(config.name, attempt.attempt, error)
            self.policy.adapters.forget(config.name)
            if channel is not None:
                channel.close()
            self._answer(config.name, attempt.attempt, "Refused", reason=str(failure), exit_code=failure.code)
            return
        self.slots.append(slot)
        if self._alone(slot, Slot.begin):
            seat = min(set(range(1, self.size)) - set(self.seats.values()))
            self.seats[slot.name] = seat
            self._answer(slot.name, slot.number, "Joined", slot=seat, step=slot.progress.step)
            if self.group.leads:
                logger.info(f"{slot.name}: from {_start(attempt)}")

    def _close(self, slot: Slot) -> None:
        """A run is over, with all its files."""
        if slot is self.own:
            self._forget(slot)
            slot.close(wait=True)
        else:
            self._part(slot, "Left", "it is over")

    def _part(self, slot: Slot, state: SlotState, reason: str, code: int = exit_codes.OK) -> None:
        """Take a guest's slot."""
        self._answer(slot.name, slot.number, state, step=slot.progress.step, reason=reason, exit_code=code)
        self._forget(slot)
        slot.close(wait=state == "Left")
        if slot.channel is not None:
            slot.channel.close()

    def _forget(self, slot: Slot) -> None:
        self.slots.remove(slot)
        self.seats.pop(slot.name, None)
        if slot is self.own:
            self.own = None

    def _answer(self, run: str, attempt: int, state: SlotState, **about: Any) -> None:
        if self.guests is not None:
            self.guests.answer(run, attempt, state, **about)

    def _named(self, run: str) -> Slot:
        return next(slot for slot in self.slots if slot.name == run)

    # ---- the end

    def _agree_to_stop(self) -> None:
        """Raise `StopAgreed` on all ranks as soon as one was asked to stop; all of them call this together.

        No rank ever leaves on its own: the others would wait for it in their next collective.
        """
        self.place += 1
        asked = self.group.maxima({"stop": float(self.stop.asked), "signal": float(self.stop.number or 0)})
        if asked["stop"]:
            self.stop.join(int(asked["signal"]) or None)
            raise StopAgreed

    def _save_and_end(self) -> int:
        """Make the checkpoint of the last finished step of every run complete; returns the exit code."""
        why = f"stopped by {self.stop.why}"
        saved = [slot for slot in list(self.slots) if self._alone(slot, Slot.leave)]
        for slot in saved:
            self._alone(slot, lambda one: one.complete(why))
            if slot is not self.own:  # its orchestrator would wait for a trainer that does not come back
                code, step = exit_codes.ATTEMPT_TAKEN, slot.progress.step
                self._answer(slot.name, slot.number, "Left", step=step, reason=f"it was {why}", exit_code=code)
        return self.stop.exit_code


def _start(attempt: Attempt) -> str:
    """Where an attempt starts, for the log."""
    if attempt.base_attempt is not None:
        return f"the checkpoint of step {attempt.base_step}"
    return "the model" if attempt.origin is None else f"another run's checkpoint {attempt.origin.path}"


def _drop(slot: Slot, state: SlotState, reason: str, code: int = exit_codes.OK) -> Order:
    return {"do": "drop", "run": slot.name, "state": state, "reason": reason, "code": code}
