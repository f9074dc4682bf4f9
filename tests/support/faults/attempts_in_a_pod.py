"""Attempts of code in a pod of a cluster to reach other resources: files, secrets, processes, the kernel, shared
memory, the network.

`ATTEMPTS` has a function for each. A refused attempt raises `OSError`; a successful one returns the reached target. It
is one file that uses only the standard library, so that a sandbox, an environment or a pod can run it: `main` prints
the outcomes as JSON.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

REFUSED = {errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT}
"""Errors of a boundary. Other errors mean that the target does not exist."""
PLACES: dict[str, Any] = {}
"""Arguments of the environment: folders of the run, and addresses of other pods."""
ATTEMPTS: dict[str, Callable[[], object]] = {}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_OWN = os.getpid()
_SECONDS = 3.0


class NothingThereError(Exception):
    """The attempt has no target here."""


def attempt(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def register(action: Callable[[], object]) -> Callable[[], object]:
        ATTEMPTS[name] = action
        return action

    return register


def system_call(number: int, *arguments: object) -> int:
    result = int(_LIBC.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def plant(folder: str, name: str = "trio.py") -> str:
    path = Path(folder, name)
    if not path.parent.is_dir():
        raise NothingThereError(str(path.parent))
    path.write_text("raise SystemExit(9)")
    path.unlink()
    return f"wrote {path}"


def others() -> Iterator[int]:
    """Yield processes that are neither this one nor its descendants."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != _OWN:
            with suppress(OSError, IndexError, ValueError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) != _OWN:
                    yield int(entry.name)


def of_each(action: Callable[[int], object]) -> str:
    """Return results of an action on other processes, or raise the last refusal if all refuse it."""
    reached, refusal = [], None
    for pid in others():
        try:
            reached.append(f"{pid}: {str(action(pid))[:60]}")
        except OSError as error:
            if error.errno in REFUSED or refusal is None:
                refusal = error
    if reached:
        return "; ".join(reached)
    if refusal is None:
        raise NothingThereError("no other process is visible")
    raise refusal


def read_start(path: str) -> str:
    with Path(path).open("rb") as file:
        return f"read {len(file.read(4096))} bytes of {path}"


def read_of_each(file: str) -> str:
    """Read a file in the folder of each other process in `/proc`."""
    return of_each(lambda pid: read_start(f"/proc/{pid}/{file}"))


def ask(url: str, method: str = "GET", body: bytes | None = None) -> str:
    """Return the status of an HTTP answer; refusals of the server raise."""
    request = urllib.request.Request(url, data=body, method=method, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return f"{answer.status}: {answer.read(80)!r}"
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise PermissionError(errno.EACCES, f"HTTP {error.code}") from None
        return f"HTTP {error.code}"
    except urllib.error.URLError as error:
        raise OSError(errno.EACCES, f"no connection: {error.reason}") from None
    except OSError as error:
        raise OSError(errno.EACCES, f"no connection: {error}") from None


def connect(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except ConnectionRefusedError:
        return "the way is open, nobody listens"
    except OSError as error:
        raise OSError(errno.EACCES, f"no connection: {error}") from None
    return "connected"


# Folders

for _name, _folder, _file in (
    ("module in the root folder", "/", "trio.py"),
    ("module in the orchestrator's home", "/home/rlrun", "trio.py"),
    ("settings of the orchestrator's home", "/home/rlrun", ".netrc"),
    ("file in /tmp of the orchestrator", "/tmp", "trio.py"),
    ("file in /var/tmp", "/var/tmp", "trio.py"),
    ("module among the installed packages", str(Path(sysconfig.get_path("purelib"))), "trio.py"),
    ("module beside rlrun's own", "/opt/rlrun/lib", "trio.py"),
    ("file in /run", "/run", "planted"),
    ("socket's folder of another environment", "/run/rlrun-environments/0", "planted"),
    ("shared code of containers", "/run/rlrun-environments/code/rlrun", "trio.py"),
    ("configuration of the run", "/etc/rlrun", "run.json"),
    ("file in /etc", "/etc", "ld.so.preload"),
):
    attempt(f"write: {_name}")(partial(plant, _folder, _file))


@attempt("write: file in the run's folder")
def _run_folder() -> object:
    return plant(PLACES["run"], "planted")


@attempt("write: version of the weights")
def _weights() -> object:
    return plant(PLACES["run"] + "/weights", "planted")


@attempt("write: checkpoint")
def _checkpoints() -> object:
    return plant(PLACES["run"] + "/checkpoints", "planted")


@attempt("write: code in the hub's cache")
def _hub_modules() -> object:
    return plant(os.environ.get("HF_HOME", "/nowhere") + "/modules")


@attempt("write: another run's folder on the claim")
def _other_run() -> object:
    return plant(str(Path(PLACES["run"]).parent), "planted")


def a_file_of_the_run() -> Path:
    for path in sorted(Path(PLACES["run"]).glob("*.json*")) if Path(PLACES["run"]).is_dir() else []:
        return path
    raise NothingThereError(PLACES["run"])


@attempt("write: through a link of its own to a file of the run")
def _link() -> object:
    link = Path(tempfile.mkdtemp(), "link")
    link.symlink_to(a_file_of_the_run())
    try:
        with link.open("a"):
            return "opened it for writing"
    finally:
        link.unlink()


@attempt("write: hard link to a file of the run")
def _hard_link() -> object:
    own = Path(PLACES["run"], "planted-link")
    own.hardlink_to(a_file_of_the_run())
    own.unlink()
    return "made a second name"


@attempt("write: mode of a file of the run")
def _mode() -> object:
    a_file_of_the_run().chmod(0o666)
    return "changed the mode"


@attempt("write: truncate a file of the run")
def _truncate() -> object:
    path = a_file_of_the_run()
    os.truncate(path, path.stat().st_size)
    return "truncated to its own length"


@attempt("write: rename a file of the run")
def _rename() -> object:
    path = a_file_of_the_run()
    path.rename(path.with_name("planted"))
    path.with_name("planted").rename(path)
    return "renamed it"


@attempt("write: socket file in /tmp")
def _socket_file() -> object:
    with socket.socket(socket.AF_UNIX) as own:
        own.bind("/tmp/planted.sock")
    Path("/tmp/planted.sock").unlink()
    return "bound a socket"


@attempt("write: mount over a folder in a namespace of its own")
def _mount() -> object:
    system_call(272, 0x10000000 | 0x00020000)  # unshare: CLONE_NEWUSER, CLONE_NEWNS
    result = _LIBC.mount(b"tmpfs", b"/etc/rlrun", b"tmpfs", 0, None)
    if result:
        raise OSError(ctypes.get_errno(), "mount")
    return "mounted over /etc/rlrun"


@attempt("write: device file")
def _device() -> object:
    os.mknod(f"{tempfile.mkdtemp()}/disk", stat.S_IFBLK | 0o600, os.makedev(254, 0))
    return "made a block device"


# Secrets in files and variables


@attempt("secret: the run's key in its own variables")
def _own_variables() -> object:
    found = [name for name in os.environ if "KEY" in name or "TOKEN" in name or "SECRET" in name]
    if not found:
        raise PermissionError(errno.EACCES, "no such variable")
    return found


@attempt("secret: token of the orchestrator's Lease")
def _lease_token() -> object:
    return read_first("/var/run/secrets/rlrun")


@attempt("secret: token of the service account")
def _account_token() -> object:
    return read_first("/var/run/secrets/kubernetes.io")


def read_first(folder: str) -> object:
    if not Path(folder).is_dir():
        raise NothingThereError(folder)
    refusal: OSError | None = None
    for path in sorted(Path(folder).rglob("*")):
        try:
            if path.is_file():
                return read_start(str(path))
        except OSError as error:
            refusal = error
    raise refusal or NothingThereError(folder)


@attempt("secret: token in the hub's cache")
def _hub_token() -> object:
    return read_start(os.environ.get("HF_HOME", "/nowhere") + "/token")


@attempt("secret: settings of other programs in the orchestrator's home")
def _netrc() -> object:
    return read_start("/home/rlrun/.netrc")


@attempt("secret: command lines of other processes")
def _command_lines() -> object:
    shown = of_each(lambda pid: Path(f"/proc/{pid}/cmdline").read_bytes())
    if PLACES.get("canary", "no canary") in shown or "key=" in shown.lower():
        return shown
    raise PermissionError(errno.EACCES, "no command line holds a secret")


@attempt("secret: descriptors that it inherited")
def _inherited() -> object:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(str(entry.readlink()))
    # The environment's own files: its progress file, its program and its private folder.
    own = ("/dev/", "/proc/", "/memfd:rlrun-heartbeat", str(Path.home().parent), sys.prefix)
    odd = [link for link in links if link.startswith("/") and not link.startswith(own)]
    if odd:
        return odd
    raise PermissionError(errno.EACCES, "pipes and devices only")


# Other processes

for _name, _file in (
    ("variables", "environ"),
    ("memory", "mem"),
    ("map of the memory", "maps"),
    ("auxiliary vector", "auxv"),
):
    attempt(f"process: {_name} of another one")(partial(read_of_each, _file))


@attempt("process: root folder of another one")
def _root() -> object:
    return of_each(lambda pid: len(list(Path(f"/proc/{pid}/root/").iterdir())))


@attempt("process: descriptors of another one")
def _descriptors() -> object:
    return of_each(lambda pid: len(list(Path(f"/proc/{pid}/fd").iterdir())))


@attempt("process: tracing another one")
def _trace() -> object:
    return of_each(lambda pid: system_call(101, 0x4206, pid, 0, 0))  # PTRACE_SEIZE does not stop it


@attempt("process: memory of another one by process_vm_readv")
def _vm_read() -> object:
    class Part(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    buffer = ctypes.create_string_buffer(8)
    mine = Part(ctypes.addressof(buffer), 8)
    return of_each(lambda pid: system_call(310, pid, ctypes.byref(mine), 1, ctypes.byref(Part(4096, 8)), 1, 0))


@attempt("process: descriptor of another one by pidfd_getfd")
def _getfd() -> object:
    def take(pid: int) -> int:
        descriptor = system_call(434, pid, 0)
        try:
            return system_call(438, descriptor, 0, 0)
        finally:
            os.close(descriptor)

    return of_each(take)


@attempt("process: signal to another one")
def _signal() -> object:
    return of_each(lambda pid: os.kill(pid, signal.SIGCONT))


@attempt("process: signal by a descriptor")
def _pidfd_signal() -> object:
    def send(pid: int) -> int:
        descriptor = system_call(434, pid, 0)
        try:
            return system_call(424, descriptor, int(signal.SIGCONT), 0, 0)
        finally:
            os.close(descriptor)

    return of_each(send)


@attempt("process: signal to the group of another one")
def _group_signal() -> object:
    groups = {os.getpgid(pid) for pid in others()} - {os.getpgid(0)}
    if not groups:
        raise NothingThereError("no other group is visible")
    for group in groups:
        os.killpg(group, signal.SIGCONT)
    return f"sent to {sorted(groups)}"


@attempt("process: priority of another one")
def _priority() -> object:
    return of_each(lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19))


@attempt("process: limits of another one")
def _limits() -> object:
    return of_each(lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (16, 16)))


@attempt("process: processors of another one")
def _affinity() -> object:
    return of_each(lambda pid: os.sched_setaffinity(pid, os.sched_getaffinity(0)))


@attempt("process: chance of another one to be killed without memory")
def _oom() -> object:
    return of_each(lambda pid: Path(f"/proc/{pid}/oom_score_adj").write_text("1000"))


@attempt("process: namespaces of the first process")
def _namespaces() -> object:
    descriptor = os.open("/proc/1/ns/mnt", os.O_RDONLY)
    try:
        return system_call(308, descriptor, 0)
    finally:
        os.close(descriptor)


# Kernel


@attempt("kernel: setting in /proc/sys")
def _sysctl() -> object:
    Path("/proc/sys/kernel/core_pattern").write_text("|/tmp/x")
    return "wrote core_pattern"


@attempt("kernel: /proc/sysrq-trigger")
def _sysrq() -> object:
    with Path("/proc/sysrq-trigger").open("w"):
        return "opened"


@attempt("kernel: more rights by a program of root")
def _setuid() -> object:
    for folder in ("/usr/bin", "/bin", "/usr/sbin"):
        for path in Path(folder).iterdir():
            with suppress(OSError):
                if path.lstat().st_mode & stat.S_ISUID:
                    done = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False)
                    after = subprocess.run(
                        [sys.executable, "-c", "print(open('/proc/self/status').read())"],
                        capture_output=True,
                        text=True,
                        check=True,
                    ).stdout
                    if "NoNewPrivs:\t1" in after:
                        raise PermissionError(errno.EPERM, f"{path} runs without more rights")
                    return f"{path}: {done.returncode}"
    raise NothingThereError("no such program")


@attempt("kernel: packets of the network device")
def _packets() -> object:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    return "opened a packet socket"


@attempt("kernel: raw IP packets")
def _raw() -> object:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return "opened a raw socket"


@attempt("kernel: addresses of the network device")
def _netlink() -> object:
    done = subprocess.run(
        ["ip", "link", "add", "planted", "type", "dummy"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PermissionError(errno.EPERM, done.stderr.strip()[:60])
    return "made a device"


@attempt("kernel: programs in the kernel (bpf)")
def _bpf() -> object:
    return system_call(321, 0, ctypes.byref(ctypes.create_string_buffer(128)), 128)


@attempt("kernel: another root folder")
def _chroot() -> object:
    os.chroot("/proc")
    return "changed"


@attempt("kernel: the clock")
def _clock() -> object:
    import time

    time.clock_settime(time.CLOCK_REALTIME, time.time())
    return "set"


# Shared memory


@attempt("memory: segments of System V of others")
def _segments() -> object:
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    if lines:
        return lines
    raise NothingThereError("no segment")


@attempt("memory: files of others in /dev/shm")
def _shared_files() -> object:
    found = [str(path) for path in Path("/dev/shm").iterdir()]
    if found:
        return found
    raise NothingThereError("no file")


# Network


def address(role: str) -> str:
    if not PLACES.get(role):
        raise NothingThereError(role)
    return str(PLACES[role])


def ask_role(role: str, port: int, path: str, method: str) -> str:
    """Return the status of a role's answer."""
    return ask(f"http://{address(role)}:{port}{path}", method, b"{}" if method == "POST" else None)


def connect_to_role(role: str, port: int) -> str:
    """Open and close a connection to a role."""
    return connect(address(role), port)


for _name, _role, _port, _path, _method in (
    ("engine: a reply without the key", "inference", 8000, "/v1/completions", "POST"),
    ("engine: its models without the key", "inference", 8000, "/v1/models", "GET"),
    ("engine: pause without the key", "inference", 8000, "/pause", "POST"),
    ("engine: sleep without the key", "inference", 8000, "/sleep", "POST"),
    ("engine: other weights without the key", "inference", 8000, "/rlrun/update", "POST"),
    ("engine: remote call without the key", "inference", 8000, "/collective_rpc", "POST"),
    ("engine: adapter without the key", "inference", 8000, "/v1/load_lora_adapter", "POST"),
    ("trainer: its channel without the key", "trainer", 29600, "/", "GET"),
    ("trainer: a batch without the key", "trainer", 29600, "/batch", "POST"),
    ("trainer: its events without the key", "trainer", 29600, "/events", "GET"),
):
    attempt(f"network: {_name}")(partial(ask_role, _role, _port, _path, _method))


for _name, _role, _port in (
    ("torchrun's store of the trainer", "trainer", 29500),
    ("pods' meeting of the trainer", "trainer", 29601),
    ("metrics of the trainer", "trainer", 9100),
    ("free port of the engine", "inference", 40001),
    ("metrics of the operator", "operator", 8080),
    ("kubelet of a node", "node", 10250),
    ("engine of another run", "other_inference", 8000),
    ("trainer of another run", "other_trainer", 29600),
    ("metadata of a cloud", "metadata", 80),
):
    attempt(f"network: {_name}")(partial(connect_to_role, _role, _port))


@attempt("network: API server without a token")
def _api() -> object:
    import ssl

    context = ssl._create_unverified_context()
    url = f"https://{address('api')}:{PLACES['api_port']}/api/v1/namespaces/{PLACES['namespace']}/secrets"
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS, context=context) as answer:
            return answer.read(200)
    except urllib.error.HTTPError as error:
        raise PermissionError(errno.EACCES, f"HTTP {error.code}") from None
    except OSError as error:
        raise OSError(errno.EACCES, f"no connection: {error}") from None


@attempt("network: port of the orchestrator's metrics taken over")
def _take_port() -> object:
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            own.bind(("0.0.0.0", 9100))
        except OSError as error:
            raise PermissionError(errno.EACCES, str(error)) from None
        own.listen()
        return "listens on 9100"


def listening() -> list[tuple[str, int]]:
    """Return addresses on which processes of this pod listen."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            host, port = fields[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return sorted(set(found))


@attempt("network: ports of its own pod that answer without the key")
def _loopback() -> object:
    reached = {}
    for host, port in listening():
        with suppress(OSError):
            reached[port] = ask(f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/metrics")[:60]
    secret = [port for port, answer in reached.items() if PLACES.get("canary", "no canary") in answer]
    if secret:
        return reached
    raise PermissionError(errno.EACCES, f"nothing secret: {sorted(reached)}")


@attempt("network: named sockets of the kernel")
def _abstract() -> object:
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if line.split()[-1][0] == "@"]
    if names:
        return names
    raise NothingThereError("no such socket")


def outcome(action: Callable[[], object]) -> str:
    try:
        return f"reached: {action()}"
    except NothingThereError as nothing:
        return f"nothing there: {nothing}"
    except OSError as error:
        word = "refused" if error.errno in REFUSED else "nothing there"
        return f"{word}: {error.strerror or error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def try_all() -> dict[str, str]:
    """Return the result of each attempt, each in a separate process because some change their process."""
    found = {}
    for name, action in ATTEMPTS.items():
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            signal.alarm(30)
            os.write(write, outcome(action).encode()[:2000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            found[name] = answer.read().decode(errors="replace") or "ended without an answer"
        os.waitpid(child, 0)
    return found


def main() -> None:
    """Read the places, and optionally the `only` attempt, from standard input. A sandbox forks no process and may end
    this one."""
    PLACES.update(json.loads(sys.stdin.readline() or "{}"))
    only = PLACES.get("only")
    print(json.dumps({only: outcome(ATTEMPTS[only])} if only else try_all()))


if __name__ == "__main__":
    main()
