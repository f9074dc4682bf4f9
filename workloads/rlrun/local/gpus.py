"""GPUs of this machine: samples of their use for the launcher's record, selection for a run, and locks.

Locks prevent two runs from using the same GPU. A lock is a kernel lock (`flock`) on a file in a folder that all users share. Launcher and
roles hold it together, so it ends with the last of them, however they end, and no file has to be removed. The file's text names the holder.
It is used only in messages, because it may be left over from an ended run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import PreflightError
from rlrun.local.process_plan import GpuId, gpus_wanted, split_gpus
from rlrun.protocol.files.launcher_record import GpuUse, mean_share
from rlrun.runtime import exit_codes
from rlrun.runtime.nvml import IDLE_BELOW, SAMPLE_SECONDS, Gpus, Sample, gpus_here

Ids = Sequence[int | str]


class GpuMeter:
    """Thread that samples the GPUs of each role until `close`. Without NVML there are no samples, and no error.

    Args:
        roles: GPUs of each role, by index or UUID.
        gpus: function that opens a role's GPUs. It is called in the thread, because a driver may take seconds to answer.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        roles: Mapping[str, Ids],
        gpus: Callable[[Ids], Gpus | None] = gpus_here,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._closed = clock, threading.Event()
        self._use: Mapping[str, GpuUse] = {}
        self._idle: dict[str, tuple[float, float]] = {}
        """Idle GPU-seconds and all sampled GPU-seconds of each role."""
        wanted = {role: ids for role, ids in roles.items() if ids}
        if wanted:
            threading.Thread(target=self._sample_gpus, args=(wanted, gpus), name="gpus", daemon=True).start()

    def _sample_gpus(self, roles: Mapping[str, Ids], gpus: Callable[[Ids], Gpus | None]) -> None:
        sources = {role: source for role, ids in roles.items() if (source := gpus(ids)) is not None}
        before = self._clock()
        while sources and not self._closed.wait(SAMPLE_SECONDS):
            with suppress(Exception):  # a broken driver affects only these numbers
                samples, now = {role: source.sample_gpus() for role, source in sources.items()}, self._clock()
                self.add_samples(samples, now - before)
                before = now

    def add_samples(self, samples: Mapping[str, Sequence[Sample]], seconds: float) -> None:
        """Add samples.

        Args:
            samples: samples of each role's GPUs.
            seconds: time since the previous samples.
        """
        self._use = {role: self._update_use(role, found, seconds) for role, found in samples.items() if found}

    def _update_use(self, role: str, samples: Sequence[Sample], seconds: float) -> GpuUse:
        utilizations = [sample.utilization for sample in samples if sample.utilization is not None]
        idle, total = self._idle.get(role, (0.0, 0.0))
        idle, total = (
            idle + seconds * sum(one < IDLE_BELOW for one in utilizations),
            total + seconds * len(utilizations),
        )
        self._idle[role] = idle, total
        used, size = sum(one.used_bytes for one in samples), sum(one.size_bytes for one in samples)
        return GpuUse(len(samples), mean_share(utilizations), used, size, idle / total if total else None)

    def document(self) -> dict[str, Any]:
        """Return the last samples by role, in the format of the record."""
        return {role: asdict(use) for role, use in self._use.items()}

    def close(self) -> None:
        """Stop sampling."""
        self._closed.set()


VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
LOCKS_VARIABLE = "RLRUN_GPU_LOCKS"
"""Environment variable with another folder for the locks."""
LOCKS = Path("/tmp/rlrun-gpus")
_DRIVER, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/dev")
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
_TEXT_MAX = 4096
_ALLOCATE = "allocate"
"""File whose lock is held while a run tries GPUs, so that two runs do not block each other."""


@dataclass(frozen=True)
class Machine:
    """UUIDs of this machine's GPUs in CUDA's order. None for a GPU whose UUID the driver does not report."""

    uuids: Sequence[str | None]

    @classmethod
    def here(cls, driver: Path = _DRIVER, devices: Path = _DEVICES) -> Machine:
        """Return the GPUs that this process could use, without loading a library. In a container these are its assigned GPUs."""
        found: list[str | None] = []
        for file in sorted(driver.glob("*/information")):
            match = re.search(r"^GPU UUID:\s*(\S+)", file.read_text(errors="replace"), re.MULTILINE)
            found.append(match[1] if match is not None and "?" not in match[1] else None)
        nodes = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        return cls(found if len(found) == len(nodes) else [None] * len(nodes))

    def visible_gpus(self, variables: Mapping[str, str]) -> list[GpuId]:
        """Return the GPUs that a run may use, as written in `CUDA_VISIBLE_DEVICES`. Without the variable: all, by index.

        Raises:
            PreflightError: the variable contains a GPU twice or one that does not exist.
        """
        text = variables.get(VISIBLE_VARIABLE)
        if text is None:
            return list(range(len(self.uuids)))
        named: list[GpuId] = []
        for word in filter(None, map(str.strip, text.split(","))):
            if word == "-1":  # CUDA ignores the rest of the list
                break
            try:
                gpu = parse_gpu(word)
            except ValueError as error:
                raise PreflightError(f"{VISIBLE_VARIABLE} ({text}): {error}") from None
            if isinstance(gpu, int) and gpu >= len(self.uuids):
                raise PreflightError(
                    f"{VISIBLE_VARIABLE} ({text}): this machine has no GPU {gpu}, only {len(self.uuids)} GPUs; "
                    "correct the variable or unset it",
                    exit_codes.UNAVAILABLE,
                )
            named.append(gpu)
        keys = [self.key(gpu) for gpu in named]
        if len(set(keys)) < len(keys):
            raise PreflightError(f"{VISIBLE_VARIABLE} ({text}) contains a GPU twice; list each GPU once")
        return named

    def key(self, gpu: GpuId) -> str:
        """Return the unique name of a GPU for all ways to write it: its UUID if it is known."""
        if isinstance(gpu, int):
            known = self.uuids[gpu] if gpu < len(self.uuids) else None
            return known or f"index-{gpu}"
        fitting = [uuid for uuid in self.uuids if uuid is not None and uuid.startswith(gpu)]
        return fitting[0] if len(fitting) == 1 else gpu

    def chosen_gpus(self, asked: Sequence[GpuId] | None, visible: Sequence[GpuId]) -> list[GpuId] | None:
        """Return the GPUs of an option, written as in `visible_gpus`. Unknown GPUs are returned unchanged."""
        if asked is None:
            return None
        names = {self.key(gpu): gpu for gpu in visible}
        return [names.get(self.key(gpu), gpu) for gpu in asked]


@dataclass(frozen=True)
class Holder:
    """A run that uses a GPU."""

    pid: int
    run: str
    folder: str

    def __str__(self) -> str:
        return f"run {self.run} in {self.folder} (process {self.pid})"


class GpuLocks:
    """Locks of GPUs, by their keys.

    Args:
        folder: folder of the lock files of all runs on this machine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def here(cls, variables: Mapping[str, str]) -> GpuLocks:
        """Return the locks of this machine."""
        return cls(Path(variables.get(LOCKS_VARIABLE) or LOCKS))

    @contextmanager
    def hold_allocation(self) -> Iterator[None]:
        """Prevent other runs from trying GPUs during the `with` block."""
        file = self._open_lock(_ALLOCATE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def take_lock(self, key: str, *, shared: bool) -> int | None:
        """Try to take a GPU's lock. Returns a descriptor that holds it until all its copies are closed, or None if the GPU is in use.

        Raises:
            PreflightError: the folder cannot be used; the message contains the folder and the fix.
        """
        file = self._open_lock(key)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file

    def write_holder(self, file: int, holder: Holder) -> None:
        """Write the holder into a lock file. A file of another user can be locked but not written; then it has no holder."""
        with suppress(OSError):
            writing = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            try:
                os.write(writing, json.dumps(vars(holder)).encode())
            finally:
                os.close(writing)

    def read_holder(self, key: str) -> Holder | None:
        """Return the holder that a lock file contains, or None."""
        file = self._open_lock(key)
        try:
            return Holder(**json.loads(os.pread(file, _TEXT_MAX, 0)))
        except (OSError, ValueError, TypeError):
            return None
        finally:
            os.close(file)

    def _open_lock(self, key: str) -> int:
        # Two attempts: a file of another user in a sticky folder must not be opened with O_CREAT (fs.protected_regular).
        path = self._folder / f"{re.sub(r'[^0-9A-Za-z-]', '_', key)}.lock"
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True, exist_ok=True)
                self._folder.chmod(0o1777)
            with suppress(FileExistsError):
                created = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(created, 0o666)
                return created
            opened = os.open(path, flags)
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                os.close(opened)
                raise OSError(0, "it is not a regular file")
            return opened
        except OSError as error:
            raise PreflightError(
                f"{path}: cannot open the lock of a GPU: {error.strerror}; make {self._folder} writable for all users, or set "
                f"another folder in {LOCKS_VARIABLE}",
                exit_codes.UNAVAILABLE,
            ) from None


@dataclass(frozen=True)
class Claim:
    """GPUs of a run, reserved while the descriptors are open."""

    trainer: Sequence[GpuId] = ()
    inference: Sequence[GpuId] = ()
    descriptors: Sequence[int] = ()
    """Descriptors of the locks, which the roles inherit."""


@contextmanager
def claim_gpus(
    config: RunConfig,
    trainer_ids: Sequence[GpuId] | None,
    inference_ids: Sequence[GpuId] | None,
    *,
    share: bool,
    machine: Callable[[], Machine] = Machine.here,
    variables: Mapping[str, str] = os.environ,
) -> Iterator[Claim]:
    """Reserve GPUs for a run's roles until the end of the `with` block.

    Args:
        config: configuration of the run.
        trainer_ids: GPUs of the trainer. None: free GPUs.
        inference_ids: GPUs of the engines. None: free GPUs.
        share: whether to use GPUs that other runs use, too.
        machine: function that returns the machine's GPUs.
        variables: environment variables.

    Raises:
        PreflightError: there are too few GPUs, or other runs use them; the message contains these runs.
    """
    if not any(gpus_wanted(config)) and not trainer_ids and not inference_ids:
        yield Claim()
        return
    with _allocated_gpus(machine(), config, (trainer_ids, inference_ids), share=share, variables=variables) as claim:
        yield claim


@contextmanager
def _allocated_gpus(
    machine: Machine,
    config: RunConfig,
    asked: tuple[Sequence[GpuId] | None, Sequence[GpuId] | None],
    *,
    share: bool,
    variables: Mapping[str, str],
) -> Iterator[Claim]:
    # All visible GPUs are locked, then those that this run does not need are released again: this way the choice is consistent.
    locks, visible = GpuLocks.here(variables), machine.visible_gpus(variables)
    ids = machine.chosen_gpus(asked[0], visible), machine.chosen_gpus(asked[1], visible)
    mine: list[int] = []
    try:
        with locks.hold_allocation():
            taken = {gpu: locks.take_lock(machine.key(gpu), shared=share) for gpu in visible}
            mine = [file for file in taken.values() if file is not None]
            busy = [] if share else [gpu for gpu, file in taken.items() if file is None]
            claim = _divide_gpus(config, visible, ids, busy, tell=lambda gpus: _busy_message(gpus, machine, locks))
            used = {file for gpu, file in taken.items() if gpu in (*claim.trainer, *claim.inference)}
            for file in [file for file in mine if file not in used]:
                mine.remove(file)
                os.close(file)
            for file in mine:
                locks.write_holder(file, Holder(os.getpid(), config.trainer.name, config.trainer.output_dir))
        yield replace(claim, descriptors=tuple(mine))
    finally:
        for file in mine:
            os.close(file)


def _divide_gpus(
    config: RunConfig,
    visible: Sequence[GpuId],
    ids: tuple[Sequence[GpuId] | None, Sequence[GpuId] | None],
    busy: Sequence[GpuId],
    *,
    tell: Callable[[Sequence[GpuId]], str],
) -> Claim:
    """Assign GPUs that are not in use to the roles. A GPU of an option is never replaced by another one."""
    named = [gpu for one in ids for gpu in one or ()]
    if taken := [gpu for gpu in visible if gpu in busy and gpu in named]:
        raise PreflightError(
            f"{tell(taken)}; wait for its end, choose other GPUs, or share them with --share-gpus",
            exit_codes.UNAVAILABLE,
        )
    try:
        trainer, inference = split_gpus(config, [gpu for gpu in visible if gpu not in busy], *ids)
    except ValueError as error:
        others = f". {tell(busy)}; wait for its end, or share GPUs with --share-gpus" if busy else ""
        raise PreflightError(f"{error}{others}", exit_codes.UNAVAILABLE) from None
    return Claim(trainer, inference)


def parse_gpu(word: str) -> GpuId:
    """Parse the index or UUID of a GPU.

    Raises:
        ValueError: the text is neither.
    """
    word = word.strip()
    if word.isascii() and word.isdecimal():
        return int(word)
    if _UUID.fullmatch(word):
        return word
    raise ValueError(f"{word!r} is neither the index of a GPU nor its UUID (`nvidia-smi -L`)")


def gpu_ids(text: str) -> list[GpuId]:
    """Parse the comma-separated GPUs of an option.

    Raises:
        argparse.ArgumentTypeError: a part is neither an index nor a UUID.
    """
    try:
        return [parse_gpu(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _busy_message(busy: Sequence[GpuId], machine: Machine, locks: GpuLocks) -> str:
    messages = []
    for gpu in sorted(busy, key=str):
        holder = locks.read_holder(machine.key(gpu))
        messages.append(f"GPU {gpu} is used by {holder or 'another run'}")
    return ", ".join(messages)
