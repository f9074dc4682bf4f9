"""`python -m tools.release check|digests`: steps of the release workflow on the checkout. Needs only Python."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = {
    "pyproject.toml": r'^version = "([^"]+)"',
    "workloads/rlrun/__init__.py": r'^__version__ = "([^"]+)"',
    "charts/rlrun-operator/Chart.yaml": r'^(?:version|appVersion): "?([^"\n]+)"?$',
    "charts/rlrun-crds/Chart.yaml": r'^(?:version|appVersion): "?([^"\n]+)"?$',
    "operator/rlrun_operator/settings.py": r'ghcr\.io/rlrun/rlrun-\w+:([^"]+)"',
}
"""Places of the version: file and the pattern that finds it."""
_VALUE = re.compile(r"^\s*(?:image|\w+): (\S+/\S+)$", re.MULTILINE)
_BY_DIGEST = re.compile(r"\S+/[a-z0-9-]+@sha256:[0-9a-f]{64}")
_PUSHED = re.compile(r"^Pushed: (\S+?)(?::[^:/\s]+)?\nDigest: (sha256:[0-9a-f]{64})$", re.MULTILINE)


def disagreements(tag: str, root: Path = ROOT) -> list[str]:
    """Return places whose version differs from that of the tag."""
    wanted = tag.removeprefix("v")
    found = []
    for name, pattern in VERSIONS.items():
        versions = set(re.findall(pattern, (root / name).read_text(), re.MULTILINE))
        if versions != {wanted}:
            found.append(f"{name} says {', '.join(sorted(versions)) or 'nothing'}, the tag {tag}")
    return found


def image_digests(values: str) -> list[str]:
    """Return references by digest of the images in a file of Helm values.

    Raises:
        ValueError: an image has no digest.
    """
    images = _VALUE.findall(values)
    without = [image for image in images if _BY_DIGEST.fullmatch(image) is None]
    if without or not images:
        raise ValueError(f"no digest of {', '.join(without) or 'any image'}: it was not pushed by docker")
    return images


def chart_digests(pushed: str) -> list[str]:
    """Return references by digest of the charts in the output of `helm push`.

    Raises:
        ValueError: no chart was pushed.
    """
    charts = [f"{name}@{digest}" for name, digest in _PUSHED.findall(pushed)]
    if not charts:
        raise ValueError("helm has pushed no chart")
    return charts


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="Helps the release workflow.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="refuse a tag whose version is not everywhere")
    check.add_argument("--tag", required=True)
    listed = commands.add_parser("digests", help="print references to sign, of images or charts")
    source = listed.add_mutually_exclusive_group(required=True)
    source.add_argument("--values", type=Path, help="images.yaml")
    source.add_argument("--charts", type=Path, help="the output of helm push")
    options = parser.parse_args(argv)
    if options.command == "check":
        found = disagreements(options.tag)
        print("\n".join(found) or f"{options.tag}: all versions agree", file=sys.stderr)
        return 1 if found else 0
    try:
        found = (
            image_digests(options.values.read_text()) if options.values else chart_digests(options.charts.read_text())
        )
        print("\n".join(found))
    except ValueError as error:
        print(f"tools.release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
