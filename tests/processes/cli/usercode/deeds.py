"""Environment and loss that misbehave while they load; only `good` behaves well."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlrun.environments.protocol import Environment
from rlrun.environments.registry import load_environment


def good() -> Environment:
    return load_environment("reverse-text", {"length": 5})


def make(deed: str, note: str = "") -> Environment:
    if deed == "ends":
        os._exit(0)
    if deed == "exits":
        sys.exit(0)
    if deed == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if note:
            Path(note).touch()
        while True:
            time.sleep(1)
    if deed == "computes":
        while True:
            pass
    if deed == "crashes":
        ctypes.string_at(0)
    if deed == "floods":
        while True:
            print("x" * 10_000)
    if deed == "raises":
        raise KeyError("row 9")
    if deed == "cancels":
        raise asyncio.CancelledError
    if deed == "interrupts":
        raise KeyboardInterrupt
    if deed == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if deed == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "forks":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(note).write_text(str(child.pid))
    return good()


def loss(inputs: object, *, sharpness: float) -> object:
    return inputs
