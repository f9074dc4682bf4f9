"""The part done of a long command, from its output so far: pure functions from text to text."""

import re
from collections.abc import Sequence

WIDTH = 70
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DOWNLOAD = "go: downloading "
_PACKAGE = re.compile(r"[\w.~+-]+(/[\w.~+-]+)*")
_IMAGE_STEP = re.compile(
    r"^(?:\[(\d+)/(\d+)\] )?STEP (\d+)/(\d+): (.*)$|^#\d+ \[(.*?(\d+)/(\d+))\] (.*)$", re.MULTILINE
)


def is_disk_full(text: str) -> bool:
    """Return whether a command reports a full disk."""
    return bool(re.search(r"no space left on device|disk quota exceeded", text, re.IGNORECASE))


def last_line(text: str) -> str:
    """Return the last line that is not empty, cut to `WIDTH` characters."""
    lines = _ESCAPES.sub("", text).replace("\r", "\n").split("\n")
    return next((line.strip()[:WIDTH] for line in reversed(lines) if line.strip()), "")


def packages(text: str) -> list[str]:
    """Return the packages in the output of `go list -deps` or `go build -v`: lines that are an import path and nothing else."""
    return [line for line in text.splitlines() if _PACKAGE.fullmatch(line)]


def modules(text: str) -> int:
    """Count the modules whose download the go command has reported."""
    return sum(line.startswith(_DOWNLOAD) for line in text.splitlines())


def download_state(text: str, required: int) -> str:
    """Describe the downloads of `go list -deps`.

    Args:
        text: its output so far.
        required: modules that go.mod requires; packages of some of them are not needed.
    """
    started = modules(text)
    return f"{started} of at most {required} modules downloaded" if started else "reads the list of packages"


def build_state(text: str, program: Sequence[str]) -> str:
    """Describe the progress of `go build -v`, which prints a package when its compilation starts.

    Args:
        text: its output so far.
        program: all its packages, the main package last; those in Go's build cache are not compiled.
    """
    done = packages(text)
    if done and done[-1] == program[-1]:
        return f"{len(done)} packages compiled, links"
    return f"{len(done)} of at most {len(program)} packages compiled"


def image_state(text: str) -> str:
    """Describe the progress of an image build by buildah or docker: the last step that started, and the last line."""
    found = list(_IMAGE_STEP.finditer(text))
    line = last_line(text)
    if not found:
        return line
    stage, stages, step, steps, _, _, docker_step, docker_steps, _ = found[-1].groups()
    number = f"step {step or docker_step} of {steps or docker_steps}"
    place = f"stage {stage} of {stages}, {number}" if stages else number
    return place if found[-1].end() >= len(text.rstrip()) else f"{place}: {line}"


def without_packages(text: str) -> Sequence[str]:
    """Return the lines of `go build -v` that are messages."""
    names = set(packages(text))
    return [line for line in text.splitlines() if line.strip() and line not in names and not line.startswith(_DOWNLOAD)]
