"""The first process of the rack and of each machine: sets up the namespaces, starts the daemons, reaps processes.

Run as `python -I -S init.py SPEC` in new network, mount and PID namespaces; SPEC is the JSON of `spec.Spec`. It uses
only the standard library, so that a machine starts in a few hundredths of a second. It ends only by SIGKILL.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MS_BIND, MS_REC, MS_MOVE, MS_SHARED, MS_PRIVATE = 0x1000, 0x4000, 0x2000, 1 << 20, 1 << 18
TICK_S = 0.05  # also the time within which a new volume folder becomes writable; no pod starts faster
RESTART_DELAY_S = 1.0
LINK_TIMEOUT_S = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Call mount(2)."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    if _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def bind(handle: int, target: str) -> None:
    """Make the folder that `handle` has open appear at `target`."""
    Path(target).mkdir(parents=True, exist_ok=True)
    mount(f"/proc/self/fd/{handle}", target, flags=MS_BIND | MS_REC)


def mount_all(spec: dict[str, Any]) -> None:
    """Mount the machine's own folders over the host's. All sources are opened first, because a mount may hide them."""
    handles = {path: os.open(path, os.O_PATH) for path in [*spec["keep"], *spec["mounts"].values()]}
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", "/run", "tmpfs", data="mode=755")
    for folder in ("/run/lock", "/run/netns", "/run/cgroup"):
        Path(folder).mkdir()
    # sysfs shows the network devices of the namespace that mounted it; the cgroup mounts below it are moved to the new
    # one.
    mount("/sys/fs/cgroup", "/run/cgroup", flags=MS_BIND | MS_REC)
    mount("sysfs", "/sys", "sysfs")
    mount("/run/cgroup", "/sys/fs/cgroup", flags=MS_MOVE)
    for target, source in spec["mounts"].items():
        bind(handles[source], target)
    for path in spec["keep"]:
        if not Path(path).exists() or not os.path.samestat(os.fstat(handles[path]), Path(path).stat()):
            bind(handles[path], path)
    for handle in handles.values():
        os.close(handle)
    for number, (path, text) in enumerate(spec["masks"].items()):
        mask = Path(f"/run/mask-{number}")
        mask.write_text(text)
        mount(str(mask), path, flags=MS_BIND)
    mount("", "/", flags=MS_REC | MS_SHARED)  # volumes that the kubelet mounts must reach the pods' namespaces


def configure_network(spec: dict[str, Any]) -> None:
    """Run the lines of `ip` at once, and those of `ip_linked` after the link from outside exists."""
    run_ip(spec["ip"])
    deadline = time.monotonic() + LINK_TIMEOUT_S
    while not Path("/sys/class/net", spec["link"]).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no link {spec['link']} after {LINK_TIMEOUT_S:.0f} s")
        time.sleep(0.01)
    run_ip(spec["ip_linked"])
    for name, value in spec["sysctl"].items():
        file = Path("/proc/sys", name.replace(".", "/"))
        if file.exists():  # without br_netfilter or IPv6 these files do not exist
            file.write_text(value)


def run_ip(lines: list[str]) -> None:
    """Run `ip -batch`."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True)


class Daemons:
    """Starts each daemon when the file that it waits for exists, restarts it after its end, and stops it on request.

    The folder `control` is the interface to the host: `stopped` lists stopped daemons, `NAME.pid` contains the id (in
    this PID namespace) of each running daemon.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._daemons = spec["daemons"]
        self._control = Path(spec["control"])
        self._logs = Path(spec["logs"])
        self._running: dict[int, str] = {}
        self._earliest: dict[str, float] = {}
        for stale in self._control.glob("*.pid"):
            stale.unlink()

    def tick(self) -> None:
        """Reap processes, then start and stop daemons as requested."""
        self._reap()
        stopped = self._stopped()
        for pid, name in self._running.items():
            if name in stopped:
                os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons:
            name, gate = daemon["name"], daemon["after"]
            due = time.monotonic() >= self._earliest.get(name, 0.0)
            if name not in self._running.values() and name not in stopped and due and (not gate or Path(gate).exists()):
                self._start(name, daemon)

    def _stopped(self) -> list[str]:
        try:
            return (self._control / "stopped").read_text().split()
        except FileNotFoundError:  # the host may remove it at any moment
            return []

    def _start(self, name: str, daemon: dict[str, Any]) -> None:
        with (self._logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                daemon["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **daemon["environment"]},
                start_new_session=True,
            )
        process.returncode = 0  # `_reap` waits for every child; subprocess must not
        self._running[process.pid] = name
        new = self._control / f".{name}.pid"
        new.write_text(str(process.pid))
        new.rename(self._control / f"{name}.pid")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if name := self._running.pop(pid, None):
                (self._control / f"{name}.pid").unlink(missing_ok=True)
                self._earliest[name] = time.monotonic() + RESTART_DELAY_S
                print(f"{name} ended: {os.waitstatus_to_exitcode(status)}", flush=True)


def open_new_volumes(folder: Path) -> None:
    """Make new volume folders writable for every user, because the provisioner makes them for root only."""
    for volume in folder.iterdir():
        try:
            if volume.stat().st_mode & 0o7777 == 0o750:
                volume.chmod(0o1777)
        except FileNotFoundError:  # the provisioner may delete folders at any moment
            continue


def main() -> None:
    """Set up, then supervise until SIGKILL."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    ctypes.CDLL(None).sethostname(spec["hostname"].encode(), len(spec["hostname"]))
    mount_all(spec)
    for path, text in spec["files"].items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    configure_network(spec)
    (Path(spec["control"]) / "up").touch()
    daemons = Daemons(spec)
    while True:
        # The end of this process would end the whole machine, so an error in one pass, such as a full disk, is retried
        # in the next.
        try:
            daemons.tick()
            if spec["volumes"]:
                open_new_volumes(Path(spec["volumes"]))
        except OSError as error:
            print(f"init: {error}", flush=True)
        time.sleep(TICK_S)


if __name__ == "__main__":
    main()
