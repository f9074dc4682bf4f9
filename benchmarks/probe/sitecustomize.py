"""Notes of what a process has to do with trackers: each file that it opens in `PROBE_FOLDER`, each connection to port `PROBE_PORT`.

It takes this folder on `PYTHONPATH` and `PROBE_NOTES`, the file of the notes. What a process writes anywhere it has to open first.
"""

import os
import sys


def _install(notes: str, folder: str, port: int) -> None:
    def note(what: str) -> None:
        file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{os.getpid()} {' '.join(sys.orig_argv[1:4])}: {what}\n".encode())
        os.close(file)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            if path.startswith(folder):
                note(path)
        elif event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][1] == port:
            note(f"port {port}")

    sys.addaudithook(hook)


if os.environ.get("PROBE_NOTES"):
    _install(os.environ["PROBE_NOTES"], os.environ["PROBE_FOLDER"], int(os.environ["PROBE_PORT"]))
