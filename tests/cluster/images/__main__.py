"""`python -m tests.cluster.images build [trainer inference operator stub] [--push-to DIR]`."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress

from .builder import IMAGES, build


def main(argv: Sequence[str] | None = None) -> int:
    """Build; prints one line per image: name, reference, archive. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.images", description="Container images of this checkout."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build what is missing")
    building.add_argument(
        "names", nargs="*", default=[], metavar="NAME", help=f"some of {', '.join(IMAGES)}; default: all"
    )
    building.add_argument("--push-to", type=Path, metavar="DIR", help="also put the archives into DIR, as NAME.tar")
    options = parser.parse_args(argv)
    try:
        progress = Progress(lambda line: print(line, file=sys.stderr, flush=True))
        images = build(options.names or IMAGES, progress=progress)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for image in images.values():
        print(f"{image.name:<10} {image.reference}  {image.archive}")
        if options.push_to is not None:
            options.push_to.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image.archive, options.push_to / f"{image.name}.tar")
    return 0


if __name__ == "__main__":
    sys.exit(main())
