"""The script of a stub run: durations, faults, and learning speed of the policy."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Literal, Self

from loguru import logger
from pydantic import Field, ValidationError, model_validator

from rlrun.config.base import Config
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.ranks.stop import Stop

VARIABLE = "STUB_SCRIPT"
FILE = "stub.json"
FAULTS_FOLDER = "stub"
"""Folder in the run's folder with records of past faults of engines."""
REQUESTS_FILE = "requests.jsonl"
"""File in that folder with the requests to engines."""
WAIT_SECONDS = 0.02
"""Time between two polls for the file of a fault that waits."""

Seconds = Annotated[float, Field(ge=0, le=86400)]
ExitCode = Annotated[int, Field(ge=0, le=255)]


class TrainerFault(Config):
    """A fault in a trainer pod. It happens in every attempt that matches."""

    attempt: Annotated[int, Field(ge=1)] | None = None
    """Attempt of the fault. Default: each."""
    step: Annotated[int, Field(ge=0)]
    """Step of the fault, after its batch has arrived; 0: at the start, after the attempt's file is written."""
    pod: Annotated[int, Field(ge=0)] = 0
    """Ordinal of the trainer pod."""
    action: Literal["exit", "sigkill", "hang", "wait", "slow_step", "slow_save", "disk_full"]
    """exit: end with `code`. sigkill: end as if the kernel killed it. hang: do nothing until a signal comes. wait:
    train only after `file` exists. slow_step, slow_save: take `seconds` longer, for the step or for its checkpoint.
    disk_full: its checkpoint, and later ones for `seconds`, find a full volume."""
    code: ExitCode = 1
    """Exit code of `exit`."""
    seconds: Seconds = 5.0
    """Duration of `slow_step`, `slow_save` and `disk_full`."""
    file: Path | None = None
    """File of `wait`; the author of the fault creates it."""

    @model_validator(mode="after")
    def _fields_fit_the_action(self) -> Self:
        if self.action in ("slow_save", "disk_full") and (self.pod or not self.step):
            raise ValueError(
                f"{self.action} needs pod 0, which saves, and a step from 1; got pod {self.pod}, step {self.step}"
            )
        if (self.action == "wait") is (self.file is None):
            raise ValueError(f"wait, and nothing else, needs file; got {self.action} with file {self.file}")
        return self


class InferenceFault(Config):
    """A fault in an engine during the hand-over of a version; the first `times` engines that reach it have it."""

    version: Annotated[int, Field(ge=0)]
    """The policy version."""
    action: Literal["exit", "sigkill", "hang", "slow_update", "fail_update", "slow", "answer_500"]
    """exit, sigkill: the process ends. hang: the engine does not answer any more. slow_update: the hand-over takes
    `seconds` longer. fail_update: loading breaks half-way, so the server stops. slow, answer_500: for `seconds` after
    the hand-over each token takes ten times as long, or each request fails."""
    code: ExitCode = 1
    """Exit code of `exit`."""
    seconds: Seconds = 5.0
    """Duration of `slow_update`, `slow` and `answer_500`."""
    times: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of times in the whole run: a restarted engine receives the same version again."""


class TrainerScript(Config):
    """The trainer's part."""

    start_seconds: Seconds = 0.0
    """Time for loading the model."""
    step_seconds: Seconds = 0.05
    """Time for training on one batch."""
    faults: list[TrainerFault] = Field(default_factory=list, max_length=1000)
    """Faults of the trainer."""


class InferenceScript(Config):
    """The engine's part."""

    start_seconds: Seconds = 0.0
    """Time until the server answers."""
    token_seconds: Seconds = 0.001
    """Time for sampling one token of every continuation of a request."""
    update_seconds: Seconds = 0.0
    """Time for loading weights."""
    record_requests: bool = False
    """Whether to append the parameters of each request to `stub/requests.jsonl` in the run's folder."""
    faults: list[InferenceFault] = Field(default_factory=list, max_length=1000)
    """Faults of the engines."""


class PolicyScript(Config):
    """Quality of the policy: the probability of the right character at each position."""

    first: Annotated[float, Field(gt=0, lt=1)] = 0.35
    """Probability of version 0."""
    last: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Probability that it approaches."""
    half_life_steps: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    """Steps that halve the distance to `last`."""


class Script(Config):
    """The whole script."""

    trainer: TrainerScript = TrainerScript()
    """Durations and faults of the trainer."""
    inference: InferenceScript = InferenceScript()
    """Durations and faults of each engine."""
    policy: PolicyScript = PolicyScript()
    """Learning curve of the policy."""


def load_script(run_folder: Path) -> Script:
    """Return the script of the environment, else of the run's folder, else one without faults.

    Raises:
        RoleError: it is not JSON or has a wrong field; the message has source, field, value and the expected form.
    """
    text, source = os.environ.get(VARIABLE), VARIABLE
    if not text:
        file = run_folder / FILE
        try:
            text, source = file.read_text(), str(file)
        except FileNotFoundError:
            return Script()
        except (OSError, ValueError) as error:
            raise RoleError(f"{file} cannot be read: {error}", exit_codes.CONFIGURATION) from None
    try:
        return Script.model_validate(json.loads(text))
    except ValidationError as error:
        problems = [_problem(dict(entry)) for entry in error.errors(include_url=False)]
        raise RoleError(f"{source}: {'; '.join(problems)}", exit_codes.CONFIGURATION) from None
    except ValueError as error:
        raise RoleError(f"{source} is not JSON: {error}", exit_codes.CONFIGURATION) from None


def _problem(entry: dict[str, object]) -> str:
    location = entry["loc"]
    assert isinstance(location, tuple)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    value = json.dumps(entry["input"], default=str)
    return f"{path or 'the script'} is {value[:100]}: {entry['msg']}"


def end(action: str, code: int) -> None:
    """Carry out `exit`, `sigkill` and `hang`, from any thread; ignore other actions."""
    if action == "exit":
        os._exit(code)
    if action == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    while action in ("sigkill", "hang"):
        time.sleep(3600)


def apply_faults(faults: list[TrainerFault], *, attempt: int, step: int, pod: int, stop: Stop) -> None:
    """Execute a trainer pod's faults of this moment, except those of saving. A signal ends a hanging pod at once,
    without saving."""
    for fault in faults:
        if fault.attempt in (None, attempt) and (fault.step, fault.pod) == (step, pod):
            if fault.action in ("slow_save", "disk_full"):
                continue
            logger.warning(f"script: {fault.action} in attempt {attempt}, step {step}, pod {pod}")
            if fault.action == "slow_step":
                time.sleep(fault.seconds)
            while fault.file is not None and not fault.file.exists():
                time.sleep(WAIT_SECONDS)
            if fault.action == "hang":
                stop.allow_time(0.0)
            end(fault.action, fault.code)


def claim(run_folder: Path, fault: int, times: int) -> bool:
    """Return whether engine fault number `fault` happens now: at most `times` times in the whole run, over all
    processes.

    If this engine cannot write to the volume, it happens every time.
    """
    folder = run_folder / FAULTS_FOLDER
    for number in range(times):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"inference-{fault}.{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        except OSError:
            return True
        return True
    return False
