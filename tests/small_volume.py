"""A small volume that a test can fill and make read-only. Nothing stays mounted, whatever the result of the test."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SmallVolume:
    """A tmpfs in a separate mount namespace, which exists as long as the process that holds it."""

    def __init__(self, folder: Path, size: str) -> None:
        self._folder = folder
        rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        # `cat` ends with the test's end of the pipe, and the namespace with it.
        script = f"mount -t tmpfs -o size={size} tmpfs {folder} && echo mounted && exec cat"
        command = ["unshare", *rights, "--mount", "--propagation", "private", "sh", "-c", script]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"mounted\n", "a tmpfs cannot be mounted in a namespace of its own"
        rights = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.enter = ["nsenter", "--target", str(self._holder.pid), *rights, "--mount"]
        """Prefix of a command that has to see the volume at `folder`."""
        self.root = Path(f"/proc/{self._holder.pid}/root{folder}")
        """Path of the volume for the test."""

    def fill(self, *, leave: int = 0) -> None:
        """Fill the volume except for `leave` bytes."""
        with (self.root / "ballast").open("wb", buffering=0) as file:
            with suppress(OSError):
                while True:
                    file.write(b"\0" * 4096)
            file.truncate(file.tell() - leave)

    def empty(self) -> None:
        """Free the space."""
        (self.root / "ballast").unlink()

    def remount(self, options: str, seconds: float = 60.0) -> None:
        """Change the mount, after all files are closed for writing."""
        command = [*self.enter, "mount", "-o", f"remount,{options}", str(self._folder)]
        deadline = time.monotonic() + seconds
        while True:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return
            assert time.monotonic() < deadline, f"{done.stderr}\nopen for writing: {self._writers()}"
            time.sleep(0.05)

    def _writers(self) -> list[str]:
        """Return processes that have a file of the volume open for writing."""
        device, found = self.root.stat().st_dev, []
        for entry in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                flags = int((entry.parents[1] / "fdinfo" / entry.name).read_text().split("flags:")[1].split()[0], 8)
                if entry.stat().st_dev == device and flags & (os.O_WRONLY | os.O_RDWR):
                    command = (entry.parents[1] / "cmdline").read_text().replace("\0", " ").strip()
                    found.append(f"{command}: {entry.readlink()}")
        return found

    def close(self) -> None:
        """Remove the volume."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait()


@contextmanager
def small_volume(folder: Path, size: str) -> Iterator[SmallVolume]:
    """Provide a volume of `size`, in the syntax of mount, for the block; `folder` is created."""
    folder.mkdir()
    volume = SmallVolume(folder, size)
    try:
        yield volume
    finally:
        volume.close()
