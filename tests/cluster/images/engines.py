"""The two programs that build images: docker if it works, else buildah, as root and without a daemon."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.cluster.cache import cache_root, full_disk_advice
from tests.cluster.errors import ClusterError
from tests.cluster.packages import SEARCH_PATH, install
from tests.cluster.preparation import commands
from tests.cluster.preparation.output import image_state, is_disk_full, last_line
from tests.cluster.progress import Progress

from .base import BASE_PACKAGES, base_key, base_script

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SETTINGS = ("/etc/pip.conf", "/etc/uv/uv.toml")
"""Settings of package indexes on this machine: builds use them, images do not contain them."""
INDEX_ARGUMENTS = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX")
DOCKER_BASE = "debian:bookworm-slim"
BUILD_TIMEOUT_S = 3600.0
BUILD_VARIABLES = {"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
"""Variables of docker's builds. `docker save` names a provenance attestation without saving it, so that kind cannot load the archive
(kubernetes-sigs/kind#3795)."""
LOG_LINES = 25


class Engine(Protocol):
    """Builds images and saves them."""

    def base(self) -> dict[str, str]:
        """Return the build arguments that name the base image, without building it."""

    def prepare(self) -> None:
        """Make the base image if it is missing.

        Raises:
            ClusterError: it is not available.
        """

    def build(self, context: Path, reference: str, values: Mapping[str, str], log: Path) -> None:
        """Build `context/Dockerfile` as `reference`.

        Raises:
            ClusterError: the build failed; the message has the end of its log.
        """

    def save(self, reference: str, archive: Path, log: Path) -> None:
        """Write an image as an uncompressed archive of docker's format.

        Raises:
            ClusterError: it cannot be written.
        """

    def remove(self, reference: str) -> None:
        """Delete an image, if it exists."""


def choose(docker_works: Callable[[], bool], progress: Progress) -> Engine:
    """Return docker if it works, else buildah."""
    if docker_works():
        return Docker(progress)
    return Buildah(cache_root() / "buildah", progress)


def docker_works() -> bool:
    """Return whether docker answers and has the base image or can pull it."""
    if shutil.which("docker") is None:
        return False
    if subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode != 0:
        return False
    have = subprocess.run(["docker", "image", "inspect", DOCKER_BASE], capture_output=True, timeout=30)
    if have.returncode == 0:
        return True
    try:
        return (
            subprocess.run(["docker", "pull", "--quiet", DOCKER_BASE], capture_output=True, timeout=120).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


class Docker:
    """Builds with docker's own cache and gets the base image from its registry."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def base(self) -> dict[str, str]:
        return {"BASE_IMAGE": DOCKER_BASE, "SYSTEM_PACKAGES": " ".join(BASE_PACKAGES)}

    def prepare(self) -> None:
        """Do nothing: `docker_works` has pulled the base image."""

    def build(self, context: Path, reference: str, values: Mapping[str, str], log: Path) -> None:
        command = ["docker", "build", "--tag", reference, *_build_arguments(values), str(context)]
        _run(command, log, self._progress, reference, {**os.environ, **BUILD_VARIABLES})

    def save(self, reference: str, archive: Path, log: Path) -> None:
        _save(["docker", "save", "--output", str(archive), reference], archive, log, self._progress)

    def remove(self, reference: str) -> None:
        subprocess.run(["docker", "image", "rm", reference], capture_output=True)


class Buildah:
    """Builds with buildah in a separate folder. Every call has its own mount namespace, so no mount survives it."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        """Find the programs, and install them if possible.

        Args:
            folder: folder for layers and build caches.
            progress: receiver of lines about installations and builds.

        Raises:
            ClusterError: this is not root, or the programs are not available.
        """
        missing = [name for name in ("buildah", "debootstrap") if shutil.which(name, path=SEARCH_PATH) is None]
        if os.geteuid() != 0:
            raise ClusterError("images are built by docker, which does not work here, or by buildah as root: sudo")
        if missing:
            if shutil.which("apt-get") is None:
                raise ClusterError(f"images need docker, or {' and '.join(missing)} from the distribution")
            progress(f"apt-get install {' '.join(missing)}")
            install(missing, progress)
        self._folder, self._progress = folder, progress
        self._program = [
            *("unshare", "--mount", "buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")),
            *("--storage-driver", "overlay"),
        ]
        self._environment = {**os.environ, "PATH": SEARCH_PATH, "TMPDIR": str(folder / "tmp")}

    def base(self) -> dict[str, str]:
        return {"BASE_IMAGE": f"localhost/rlrun-base:{base_key()}", "SYSTEM_PACKAGES": ""}

    def prepare(self) -> None:
        self._share_package_cache()
        subprocess.run(
            [*self._program, "rm", "--all"], capture_output=True, env=self._environment
        )  # remains of a killed build
        reference = self.base()["BASE_IMAGE"]
        if self._has(reference):
            return
        self._progress(f"base image from the distribution's packages: {' '.join(BASE_PACKAGES)}")
        command = ["unshare", "--mount", "sh", "-euc", base_script(self._program[2:], reference)]
        log = self._folder / "base.log"
        log.unlink(missing_ok=True)
        _run(command, log, self._progress, "of the base", self._environment, last_line)

    def build(self, context: Path, reference: str, values: Mapping[str, str], log: Path) -> None:
        volumes = [
            *([str(CERTIFICATES)] if CERTIFICATES.exists() else []),
            *(path for path in SETTINGS if Path(path).exists()),
        ]
        system_certificates = {"UV_SYSTEM_CERTS": "1"} if CERTIFICATES.exists() else {}
        command = [
            *(
                *self._program,
                "bud",
                "--layers",
                "--force-rm",
                "--isolation",
                "chroot",
                "--network",
                "host",
                "--pull-never",
            ),
            *(word for path in volumes for word in ("--volume", f"{path}:{path}:ro")),
            *(*_build_arguments({**values, **system_certificates}), "--tag", reference, str(context)),
        ]
        _run(command, log, self._progress, reference, self._environment)

    def save(self, reference: str, archive: Path, log: Path) -> None:
        command = [*self._program, "push", reference, f"docker-archive:{archive}:{reference}"]
        _save(command, archive, log, self._progress, self._environment)

    def remove(self, reference: str) -> None:
        subprocess.run([*self._program, "rmi", reference], capture_output=True, env=self._environment)

    def _has(self, reference: str) -> bool:
        command = [*self._program, "inspect", "--type", "image", reference]
        return subprocess.run(command, capture_output=True, env=self._environment).returncode == 0

    def _share_package_cache(self) -> None:
        """Let builds use the packages that uv has downloaded on this machine: buildah finds a cache by its id here."""
        own = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv").resolve()
        own.mkdir(parents=True, exist_ok=True)
        link = self._folder / "tmp" / "buildah-cache" / "rlrun-uv"
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(own)


def _build_arguments(values: Mapping[str, str]) -> list[str]:
    given = {name: os.environ[name] for name in INDEX_ARGUMENTS if os.environ.get(name)}
    return [word for name, value in {**values, **given}.items() for word in ("--build-arg", f"{name}={value}")]


def _save(
    command: Sequence[str],
    archive: Path,
    log: Path,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
) -> None:
    def state(_: str) -> str:
        with suppress(OSError):
            return f"{archive.stat().st_size // 1_000_000} MB written"
        return ""

    _run(command, log, progress, archive.name, environment, state)


def _run(
    command: Sequence[str],
    log: Path,
    progress: Progress,
    name: str,
    environment: Mapping[str, str] | None = None,
    state: Callable[[str], str] = image_state,
) -> None:
    """Run one command of a build.

    Args:
        name: name of the result, such as the reference of the image.

    Raises:
        ClusterError: it failed.
    """
    title = f"image {name.rpartition('/')[2]}"
    code = commands.run(
        command,
        log,
        progress=progress,
        name=title,
        state=state,
        environment=environment,
        timeout=BUILD_TIMEOUT_S,
    )
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        fix = f": {full_disk_advice()}" if is_disk_full(tail) else ""
        raise ClusterError(f"{title}: {command[0]} failed with exit code {code}{fix}\nThe end of {log}:\n{tail}")
