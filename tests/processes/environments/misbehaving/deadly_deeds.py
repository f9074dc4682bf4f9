"""Deeds that end their process or leave processes behind."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from deeds import HELD, IN_RUN, deed, sockets

# ---- the end of the process


@deed(IN_RUN)
def exits_at_once() -> None:
    os._exit(3)


@deed(IN_RUN)
def exits_as_if_all_were_well() -> None:
    os._exit(0)


@deed(IN_RUN)
def aborts() -> None:
    os.abort()


@deed(IN_RUN)
def reads_address_zero() -> None:
    ctypes.string_at(0)


@deed(IN_RUN)
def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@deed(IN_RUN)
def terminates_its_group() -> None:
    os.killpg(0, signal.SIGTERM)
    time.sleep(60)


@deed(IN_RUN)
def kills_its_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


@deed(IN_RUN)
def terminates_its_parents_group() -> None:
    os.killpg(os.getpgid(os.getppid()), signal.SIGTERM)
    time.sleep(60)


@deed(IN_RUN)
def signals_everybody() -> None:
    os.kill(-1, 0)  # Signal 0 has no effect, but is refused like any other.


@deed(IN_RUN)
def signals_the_orchestrator() -> None:
    keeper = Path("/proc", str(os.getppid()), "stat").read_text()
    os.kill(int(keeper.rpartition(")")[2].split()[1]), 0)


@deed(IN_RUN)
def signals_the_orchestrators_group() -> None:
    keeper = Path("/proc", str(os.getppid()), "stat").read_text()
    os.killpg(os.getpgid(int(keeper.rpartition(")")[2].split()[1])), 0)


@deed(IN_RUN)
def signals_the_orchestrator_by_descriptor() -> None:
    keeper = Path("/proc", str(os.getppid()), "stat").read_text()
    signal.pidfd_send_signal(os.pidfd_open(int(keeper.rpartition(")")[2].split()[1])), 0)


@deed(IN_RUN)
def signals_its_parent_by_its_folder() -> None:
    signal.pidfd_send_signal(os.open(f"/proc/{os.getppid()}", os.O_RDONLY), signal.SIGKILL)


@deed(IN_RUN)
def signals_its_parent_by_a_socket() -> None:
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(ours, fcntl.F_SETOWN, os.getppid())
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC)
    theirs.send(b"x")
    time.sleep(60)


@deed(IN_RUN)
def signals_its_parent_by_ioctl() -> None:
    ours, _ = socket.socketpair()
    fcntl.ioctl(ours, 0x8901, struct.pack("i", os.getppid()))


@deed(IN_RUN)
def limits_its_parents_processor_time() -> None:
    resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))


@deed(IN_RUN)
def signals_its_parent_by_32_bit_call() -> None:
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # push rbx; mov eax, 37 (kill); mov ebx, PID; mov ecx, 9; int 0x80; pop rbx; ret
    code.write(b"\x53\xb8\x25\0\0\0\xbb" + struct.pack("<I", os.getppid()) + b"\xb9\x09\0\0\0\xcd\x80\x5b\xc3")
    number = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    if number < 0:
        raise OSError(-number, os.strerror(-number))
    time.sleep(60)


@deed(IN_RUN)
def sets_an_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(60)


@deed(IN_RUN)
def closes_all_descriptors() -> None:
    os.closerange(0, 10_000)


@deed(IN_RUN)
def garbles_its_connection() -> None:
    for descriptor in sockets():
        os.write(descriptor, b"\x00garbage\n")
    time.sleep(60)


@deed(IN_RUN)
def sends_what_is_malformed() -> None:
    for descriptor in sockets():
        os.write(descriptor, b'{"op":"played","rollout":1e999}\n')
    time.sleep(60)


@deed(IN_RUN)
async def closes_its_connection() -> None:
    for descriptor in sockets():
        os.close(descriptor)
    await asyncio.sleep(60)


@deed(IN_RUN)
async def shuts_its_connection() -> None:
    for descriptor in sockets():
        socket.socket(fileno=os.dup(descriptor)).shutdown(socket.SHUT_RDWR)
    await asyncio.sleep(60)


@deed(IN_RUN)
def becomes_another_program() -> None:
    os.execv("/bin/sleep", ["sleep", "600"])


@deed(IN_RUN)
def forks_without_end() -> None:
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    time.sleep(600)


@deed(IN_RUN)
def computes_for_ever() -> None:
    while True:
        sum(range(1000))


@deed(IN_RUN)
def waits_for_a_lock_for_ever() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@deed(IN_RUN)
def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@deed(IN_RUN)
def holds_the_interpreters_lock() -> None:
    while True:
        ctypes.PyDLL(None).sleep(600)


@deed(IN_RUN)
def takes_questions_for_its_end() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    while True:
        time.sleep(3600)  # In the event loop: it blocks the loop like a computation, but uses no core.


@deed(IN_RUN)
async def leaks() -> None:
    for _ in range(60):  # More than the limit allows, and less than the size at which an allocation fails.
        HELD.append(bytearray(b"x" * 8_000_000))
        await asyncio.sleep(0.005)
    await asyncio.Event().wait()


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)", os.environ.get("TESTS_MARK", "")]


def _let_go(environment: dict[str, str] | None) -> None:
    """Start a process in its own session whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen(SLEEP, start_new_session=True, env=environment, stdin=-3, stdout=-3, stderr=-3)
        os._exit(0)
    os.wait()


def _signal_parent_or_exit(number: int) -> None:
    try:
        os.kill(os.getppid(), number)
    except PermissionError:
        os._exit(3)


@deed(IN_RUN)
def leaves_a_child_without_environment() -> None:
    _let_go({})
    os._exit(3)


@deed(IN_RUN)
def leaves_a_child_and_kills_its_parent() -> None:
    _let_go({})
    time.sleep(1.0)  # The keeper has seen the child by now.
    _signal_parent_or_exit(signal.SIGKILL)
    time.sleep(600)


@deed(IN_RUN)
def stops_its_parent_and_exits() -> None:
    _let_go({})
    _signal_parent_or_exit(signal.SIGSTOP)
    while True:
        sum(range(1000))


@deed(IN_RUN)
async def lives_on() -> None:
    _let_go({})
    await asyncio.sleep(60)


@deed(IN_RUN)
def leaves_an_unseen_child_and_kills_its_parent() -> None:
    _let_go({})
    _signal_parent_or_exit(signal.SIGKILL)
    time.sleep(60)


@deed(IN_RUN)
def leaves_an_unseen_child_and_kills_its_group() -> None:
    _let_go({})
    os.killpg(0, signal.SIGKILL)
