"""Debian's nginx in front of a page, with the documented configuration."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cluster.cache import cache_root, locked
from tests.cluster.packages import unpack
from tests.support.programs import tree_progress, wait_for_exit
from tests.support.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs/ui.md"
_MAIN = """daemon off;
master_process off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
{servers}
}}
"""


def program() -> Path:
    """Return nginx: from PATH, the cache, or Debian's package.

    Raises:
        ClusterError: the package cannot be downloaded.
    """
    kept = cache_root() / "bin" / "nginx"
    with locked("binary-nginx"):
        if (found := shutil.which("nginx")) is not None:
            return Path(found)
        if not os.access(kept, os.X_OK):
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".nginx-", dir=kept.parent) as scratch:
                (unpack("nginx", Path(scratch)) / "usr/sbin/nginx").rename(kept)
    return kept


def read_documented_configuration() -> str:
    """Return the configuration of the documentation."""
    found = re.search(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def render_server(folder: Path, port: int, target: str) -> str:
    """Return the documented server with another port and target."""
    places = {
        "443": str(port),
        "runs.example.com": "localhost",
        "/etc/nginx/runs": str(folder / "runs"),
        "http://127.0.0.1:8080": target,
    }
    text = read_documented_configuration()
    for name, value in places.items():
        assert text.count(name) in (1, 2), name
        text = text.replace(name, value)
    return text


@contextmanager
def started(nginx: Path, folder: Path, targets: dict[int, str]) -> Iterator[None]:
    """Run nginx with one server per port until the block ends.

    Args:
        nginx: path of the program.
        folder: empty folder for its files.
        targets: address behind each port.
    """
    certify = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    certify += ["-keyout", f"{folder}/runs.key", "-out", f"{folder}/runs.crt", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(certify, check=True, capture_output=True)
    servers = "\n".join(render_server(folder, port, target) for port, target in targets.items())
    (folder / "nginx.conf").write_text(_MAIN.format(folder=folder, servers=servers))
    command = [str(nginx), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            for port in targets:
                _wait_for_port(process, port, folder / "log")
            yield
        finally:
            process.terminate()
            wait_for_exit(process)


def _wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    def listens() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    wait_until(listens, "nginx listens", progress=tree_progress(process.pid), state=log.read_text)
