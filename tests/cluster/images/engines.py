"""The two programs that build images: docker where it works, else buildah, as root and without a daemon."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tests.cluster.cache import cache_root
from tests.cluster.errors import ClusterError
from tests.cluster.packages import SEARCH_PATH, install
from tests.cluster.progress import Say

from .base import BASE_PACKAGES, base_key, base_script

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SETTINGS = ("/etc/pip.conf", "/etc/uv/uv.toml")
"""The machine's settings of package indexes: a build sees them, an image does not keep them."""
INDEX_ARGUMENTS = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX")
DOCKER_BASE = "debian:bookworm-slim"
BUILD_TIMEOUT_S = 3600.0
LOG_LINES = 25


class Engine(Protocol):
    """Builds images and saves them."""

    def base(self) -> dict[str, str]:
        """The build arguments that name the base image. Quick: makes nothing."""

    def prepare(self, say: Say) -> None:
        """See to the base image.

        Raises:
            ClusterError: it cannot be had.
        """

    def build(self, context: Path, reference: str, values: Mapping[str, str], log: Path) -> None:
        """Build `context/Dockerfile` and call the result `reference`.

        Raises:
            ClusterError: the build failed; the end of its log is in the message.
        """

    def save(self, reference: str, archive: Path, log: Path) -> None:
        """Write an image as an uncompressed archive of docker's format.

        Raises:
            ClusterError: it cannot be written.
        """

    def remove(self, reference: str) -> None:
        """Forget an image, if it is there."""


def choose(docker_works: Callable[[], bool], say: Say) -> Engine:
    """Docker if it works, else buildah."""
    if docker_works():
        return Docker()
    return Buildah(cache_root() / "buildah", say)


def docker_works() -> bool:
    """Whether there is a docker that answers and has the base image or can get it."""
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

    def base(self) -> dict[str, str]:
        return {"BASE_IMAGE": DOCKER_BASE, "SYSTEM_PACKAGES": " ".join(BASE_PACKAGES)}

    def prepare(self, say: Say) -> None:
        """Nothing: `docker_works` has the base image."""

    def build(self, context: Path, reference: str, values: Mapping[str, str], log: Path) -> None:
        command = ["docker", "build", "--tag", reference, *_build_arguments(values), str(context)]
        _run(command, log, {**os.environ, "DOCKER_BUILDKIT": "1"})

    def save(self, reference: str, archive: Path, log: Path) -> None:
        _run(["docker", "save", "--output", str(archive), reference], log)

    def remove(self, reference: str) -> None:
        subprocess.run(["docker", "image", "rm", reference], capture_output=True)


class Buildah:
    """Builds with buildah in a folder of its own. Every call has its own mount namespace, so no mount outlives it."""

    def __init__(self, folder: Path, say: Say) -> None:
        """Find the programs, install them when that is possible.

        Args:
            folder: holds the layers and the caches of builds.

        Raises:
            ClusterError: this is not root, or the programs cannot be had.
        """
        missing = [name for name in ("buildah", "debootstrap") if shutil.which(name, path=SEARCH_PATH) is None]
        if os.geteuid() != 0:
            raise ClusterError("images are built by docker, which does not work here, or by buildah as root: sudo")
        if missing:
            if shutil.which("apt-get") is None:
                raise ClusterError(f"images need docker, or {' and '.join(missing)} from the distribution")
            say(f"apt-get install {' '.join(missing)}")
            install(missing)
        self._folder = folder
        self._program = [
            *("unshare", "--mount", "buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")),
            *("--storage-driver", "overlay"),
        ]
        self._environment = {**os.environ, "PATH": SEARCH_PATH, "TMPDIR": str(folder / "tmp")}

    def base(self) -> dict[str, str]:
        return {"BASE_IMAGE": f"localhost/rlrun-base:{base_key()}", "SYSTEM_PACKAGES": ""}

    def prepare(self, say: Say) -> None:
        self._share_package_cache()
        reference = self.base()["BASE_IMAGE"]
        if self._has(reference):
            return
        say(f"base image from the distribution's packages: {' '.join(BASE_PACKAGES)}")
        command = ["unshare", "--mount", "sh", "-euc", base_script(self._program[2:], reference)]
        _run(command, self._folder / "base.log", self._environment)

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
        _run(command, log, self._environment)

    def save(self, reference: str, archive: Path, log: Path) -> None:
        command = [*self._program, "push", reference, f"docker-archive:{archive}:{reference}"]
        _run(command, log, self._environment)

    def remove(self, reference: str) -> None:
        subprocess.run([*self._program, "rmi", reference], capture_output=True, env=self._environment)

    def _has(self, reference: str) -> bool:
        command = [*self._program, "inspect", "--type", "image", reference]
        return subprocess.run(command, capture_output=True, env=self._environment).returncode == 0

    def _share_package_cache(self) -> None:
        """Let builds use the packages that uv has downloaded on this machine: buildah looks for a cache by its id here."""
        own = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv").resolve()
        own.mkdir(parents=True, exist_ok=True)
        link = self._folder / "tmp" / "buildah-cache" / "rlrun-uv"
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(own)


def _build_arguments(values: Mapping[str, str]) -> list[str]:
    given = {name: os.environ[name] for name in INDEX_ARGUMENTS if os.environ.get(name)}
    return [word for name, value in {**values, **given}.items() for word in ("--build-arg", f"{name}={value}")]


def _run(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            code = subprocess.run(
                command, stdout=output, stderr=output, env=environment, timeout=BUILD_TIMEOUT_S
            ).returncode
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{command[0]} took more than {BUILD_TIMEOUT_S:.0f} s: see {log}") from None
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise ClusterError(f"building an image failed with exit code {code}. The end of {log}:\n{tail}")
