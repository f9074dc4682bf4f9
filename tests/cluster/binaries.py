"""The binaries of a cluster and their sources: a given folder, the cache, the official release, `go build`."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .cache import cache_root, locked
from .downloads import DownloadError, Release
from .errors import ClusterError
from .preparation import golang
from .progress import Progress, duration

MODULES = Path(__file__).parent / "kube"  # one Go module for each tool, pinned by its go.mod and go.sum
OLDEST_GO = (1, 26)
"""Oldest Go that builds the tools. README and the GitHub workflow name it as well; no go.mod requires a newer one."""
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
GITHUB = "https://github.com"


@dataclass(frozen=True)
class Tool:
    """One Go module below `kube/` and the binaries built from it.

    Attributes:
        name: the module's folder.
        module: the upstream module; its version in go.mod is the tool's version.
        package: argument of `go build`.
        commands: names of the binary.
        version_flags: linker flags that set the version the binary reports; `{version}` without the `v`, `{minor}` its
            second part, `{client}` the second part of the Kubernetes version of its client library.
        releases: the official release of each command, if its project publishes checksums.
    """

    name: str
    module: str = ""
    package: str = "."
    commands: tuple[str, ...] = ()
    version_flags: str = ""
    releases: dict[str, Release] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The Go module."""
        return MODULES / self.name

    @property
    def version(self) -> str:
        """Pinned version without its `v`; empty for the tool that is only our own code."""
        found = re.search(rf"{re.escape(self.module)} v(\S+)", (self.folder / "go.mod").read_text())
        return found[1] if self.module and found else ""

    @property
    def version_text(self) -> str:
        """Name and version, for messages."""
        return f"{self.name} {self.version}".strip()


def _kubernetes(command: str) -> Release:
    url = f"https://dl.k8s.io/release/v{{version}}/bin/linux/{ARCH}/{command}"
    return Release(url, url + ".sha256")


KUBE_COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
_HELM_KUBERNETES = " ".join(
    f"-X helm.sh/helm/v3/pkg/{package}.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/{package}.k8sVersionMinor={{client}}"
    for package in ("chartutil", "lint/rules")
)
"""Linker flags of helm's own Makefile: without them `helm template` renders for Kubernetes 1.20."""
_HELM = f"https://get.helm.sh/helm-v{{version}}-linux-{ARCH}.tar.gz"
_ETCD = f"{GITHUB}/etcd-io/etcd/releases/download/v{{version}}"
_COREDNS = f"{GITHUB}/coredns/coredns/releases/download/v{{version}}/coredns_{{version}}_linux_{ARCH}.tgz"
_VERSION = "k8s.io/component-base/version"

TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "kube",
            "k8s.io/kubernetes",
            commands=KUBE_COMMANDS,
            version_flags=f"-X {_VERSION}.gitVersion=v{{version}} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor={{minor}}",
            releases={command: _kubernetes(command) for command in KUBE_COMMANDS},
        ),
        Tool(
            "etcd",
            "go.etcd.io/etcd/server/v3",
            "go.etcd.io/etcd/server/v3",
            ("etcd",),
            releases={
                "etcd": Release(
                    f"{_ETCD}/etcd-v{{version}}-linux-{ARCH}.tar.gz",
                    f"{_ETCD}/SHA256SUMS",
                    f"etcd-v{{version}}-linux-{ARCH}/etcd",
                )
            },
        ),
        Tool(
            "coredns",
            "github.com/coredns/coredns",
            commands=("coredns",),
            releases={"coredns": Release(_COREDNS, _COREDNS + ".sha256", "coredns")},
        ),
        Tool("kwok", "sigs.k8s.io/kwok", "sigs.k8s.io/kwok/cmd/kwok", ("kwok",)),
        Tool(
            "helm",
            "helm.sh/helm/v3",
            "helm.sh/helm/v3/cmd/helm",
            ("helm",),
            version_flags="-X helm.sh/helm/v3/internal/version.version=v{version} " + _HELM_KUBERNETES,
            releases={"helm": Release(_HELM, _HELM + ".sha256sum", f"linux-{ARCH}/helm")},
        ),
        Tool("pause", commands=("pause",)),
        Tool("gitops", "github.com/argoproj/argo-cd/v3", commands=("gitops",)),
        Tool("kueue", "sigs.k8s.io/kueue", "sigs.k8s.io/kueue/cmd/kueue", ("kueue",)),
    )
}

OF_TESTS = ("gitops",)
"""Tools that no cluster needs. They are built before the tests, because a cold build takes longer than the limit of a
test."""
BY_HAND = ("kueue",)
"""Tools of tests that CI does not run."""


def find(*names: str, progress: Progress) -> dict[str, Path]:
    """Get the tools `names`, each from its first available source.

    Returns:
        The path of every command of these tools.

    Raises:
        ClusterError: a tool is not available and cannot be built.
    """
    commands: dict[str, Path] = {}
    for name in names:
        tool = TOOLS[name]
        with locked(
            f"binary-{name}", waiting=progress.step(f"{tool.version_text}: waits for another process that gets it")
        ):
            folder = _find_given(tool) or _cached(tool) or _downloaded(tool, progress) or _built(tool, progress)
        commands |= {command: folder / command for command in tool.commands}
    return commands


def linker_flags(tool: Tool) -> str:
    """Return `version_flags` with the versions of the tool's go.mod."""
    minor = tool.version.split(".")[1] if tool.version else ""
    client = ""
    if "{client}" in tool.version_flags:
        found = re.search(r"k8s\.io/client-go v0\.(\d+)", (tool.folder / "go.mod").read_text())
        if found is None:
            raise ClusterError(f"{tool.folder / 'go.mod'} names no k8s.io/client-go")
        client = found[1]
    return tool.version_flags.format(version=tool.version, minor=minor, client=client)


def module_key(tool: Tool) -> str:
    """Return twelve hex digits of a hash over the inputs of the binary, without the compiler: go.mod, go.sum, the Go
    source, the flags."""
    digest = hashlib.sha256(f"{tool.package} {tool.version_flags} {ARCH}".encode())
    for path in sorted(tool.folder.iterdir()):
        if path.suffix in (".mod", ".sum", ".go"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _complete(tool: Tool, folder: Path) -> bool:
    return all(os.access(folder / command, os.X_OK) for command in tool.commands)


def _find_given(tool: Tool) -> Path | None:
    given = os.environ.get("RLRUN_KUBE_BIN")
    return Path(given).resolve() if given and _complete(tool, Path(given)) else None


def _cache_folder(tool: Tool, origin: str) -> Path:
    return cache_root() / "bin" / f"{tool.name}-{module_key(tool)}-{origin}"


def _cached(tool: Tool) -> Path | None:
    go = go_version()
    folders = [_cache_folder(tool, "release"), *([_cache_folder(tool, f"go{go}")] if go else [])]
    return next((folder for folder in folders if _complete(tool, folder)), None)


def _downloaded(tool: Tool, progress: Progress) -> Path | None:
    if not tool.releases:
        return None
    folder = _cache_folder(tool, "release")
    contents: dict[str, bytes] = {}
    try:
        with progress.step(
            f"{tool.version_text}: download", lambda: f"{len(contents)} of {len(tool.releases)} files done"
        ):
            for command, release in tool.releases.items():
                contents[command] = release.fetch(tool.version)
    except DownloadError as reason:
        progress(f"{tool.name}: no release download ({reason})")
        return None
    with _replacing(folder) as new:
        for command, content in contents.items():
            (new / command).write_bytes(content)
            (new / command).chmod(0o755)
    progress(f"{tool.name} {tool.version} downloaded")
    return folder


def go_version() -> str:
    """Return the version of the Go on PATH ("1.26.8"), empty without one."""
    if shutil.which("go") is None:
        return ""
    answer = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, env=golang.environment())
    return answer.stdout.strip().removeprefix("go")


def _built(tool: Tool, progress: Progress) -> Path:
    version = go_version()
    if not version or tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_GO:
        needed = ".".join(map(str, OLDEST_GO))
        raise ClusterError(
            f"{tool.name} is neither in RLRUN_KUBE_BIN nor in {cache_root() / 'bin'}, cannot be downloaded, and "
            f"{'Go ' + version if version else 'no Go'} is on PATH: install Go {needed} or later (https://go.dev/dl), "
            f"or set RLRUN_KUBE_BIN to a folder that holds {', '.join(tool.commands)}"
        )
    progress(f"go build {tool.version_text} (the first time takes minutes)")
    folder = _cache_folder(tool, f"go{version}")
    flags = f"-s -w {linker_flags(tool)}".strip()
    program = golang.Program(tool.version_text, tool.folder, tool.package, flags)
    began = progress.seconds
    with _replacing(folder) as new:
        golang.build(program, new / tool.name, progress)
        for name in tool.commands:
            if name != tool.name:
                (new / name).symlink_to(tool.name)
    progress(f"{tool.version_text} built in {duration(progress.seconds - began)}")
    return folder


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` at the end, or not at all after an error. The caller holds the tool's
    lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name.split('-')[0]}-*"):  # remains of a killed process
        shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    new.chmod(0o755)
    try:
        yield new
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
