"""Print the start state of a program, then end in a given way: `python -m tests.processes.stub.harness.start_report WAY`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path


def _print_late(text: str) -> None:
    time.sleep(0.05)
    print(text, flush=True)


def report() -> dict[str, object]:
    """Return properties of this process that programs may depend on."""
    handlers = {
        name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGTERM", "SIGINT", "SIGPIPE", "SIGCHLD")
    }
    return {
        "name": __name__,
        "arguments": sys.argv[1:],
        "folder": str(Path.cwd()),
        "path": sys.path,
        "variables": dict(os.environ),
        "stdin": sys.stdin.read(),
        "handlers": handlers,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "umask": os.umask(0o22),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": sorted(file.name for file in Path("/proc/self/fd").iterdir() if int(file.name) < 3),
        "torch": sys.modules.get("torch", "not imported"),
        "warnings": sys.warnoptions,
    }


if __name__ == "__main__":
    print(json.dumps(report(), sort_keys=True), flush=True)
    atexit.register(_print_late, "at exit")
    threading.Thread(target=_print_late, args=("of a thread",)).start()
    match sys.argv[1]:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        case "at-once":
            os._exit(5)
        case "code":
            sys.exit(78)
        case "text":
            sys.exit("a last word")
