"""`python -m tests.cluster`: commands for clusters by hand."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import api
from .errors import ClusterError
from .images import IMAGES
from .preparation.entry import RESUME, report_errors
from .preparation.prepare import prepare
from .progress import Progress, terminal
from .provider import PROVIDERS, detect_provider


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("--name", default=api.DEFAULT_NAME, help="name of the cluster (default: %(default)s)")
        return made

    up = command("up", "Bring a cluster up; of one that is up, say so.")
    up.add_argument("--nodes", type=int, default=2, help="nodes that run containers; 0 for fake nodes alone")
    up.add_argument("--provider", choices=PROVIDERS, help="default: $RLRUN_PROVIDER, else the first that works")
    up.add_argument("--no-kwok", dest="kwok", action="store_false", help="without fake nodes")
    up.add_argument("--image", type=Path, action="append", default=[], metavar="ARCHIVE", help="load before the start")
    up.add_argument("--tie", action="store_true", help="stay, and end the cluster when this command is interrupted")
    command("down", "Take a cluster down; of none, say so.")
    command("status", "Show all clusters, and the nodes of one.")
    command("kubeconfig", "Print the path of the kubeconfig.")
    load = command("load-image", "Make docker archives usable in the cluster, or in the next one when it is not up.")
    load.add_argument("archives", type=Path, nargs="+", metavar="ARCHIVE")
    prepare = command("prepare", "Do the slow part of `up`: packages, binaries, the pause image.")
    prepare.add_argument("--images", action="store_true", help="also build and unpack the images of this checkout")
    prepare.add_argument(
        "--tests", action="store_true", help="also get what tests use beside a cluster: Argo CD's code, Prometheus"
    )
    command("standing", "Print which clusters there are, for `check-clean --since`.")
    clean = command("check-clean", "Fail when anything of any cluster is left on this machine.")
    clean.add_argument(
        "--since", type=Path, metavar="FILE", help="but of those in what `standing` had printed into FILE"
    )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. An error is one message on stderr and exit status 1."""
    options = parser().parse_args(arguments)
    interrupted = RESUME if options.command == "prepare" else ""
    return report_errors(lambda: COMMANDS[options.command](options), interrupted=interrupted)


def _up(options: argparse.Namespace) -> int:
    progress = Progress(screen=terminal())
    cluster = api.up(
        options.name,
        nodes=options.nodes,
        kwok=options.kwok,
        images=options.image,
        provider=options.provider,
        tie=options.tie,
        progress=progress,
    )
    progress(f"cluster {cluster.name} ({cluster.provider}) is ready. To use it:")
    print(f"export KUBECONFIG={cluster.kubeconfig}\nexport PATH={cluster.bin}:$PATH")
    if options.tie:
        print("It ends with this command: press Ctrl-C.", flush=True)
        try:
            sys.stdin.read()
        finally:
            api.down(options.name, progress=progress)
    return 0


def _down(options: argparse.Namespace) -> int:
    if not api.down(options.name, progress=Progress()):
        print(f"cluster {options.name} is not up: nothing to do")
    return 0


def _status(options: argparse.Namespace) -> int:
    for name in api.names():
        cluster = api.find(name)
        print(f"{name:12} {api.recorded_provider(name):10} {'up' if cluster else 'down, remains on disk'}")
    cluster = api.find(options.name)
    if cluster is None:
        print(f"cluster {options.name} is not up")
        return 1
    print(f"KUBECONFIG={cluster.kubeconfig}\n{cluster.kubectl('get', 'nodes', '-o', 'wide')}", end="")
    return 0


def _kubeconfig(options: argparse.Namespace) -> int:
    print(api.attach(options.name).kubeconfig)
    return 0


def _load_image(options: argparse.Namespace) -> int:
    progress = Progress(screen=terminal())
    cluster = api.find(options.name)
    if cluster is not None:
        cluster.load_image(*options.archives)
        progress(f"loaded into cluster {cluster.name}")
        return 0
    if detect_provider(None) != "native":
        raise ClusterError(f"cluster {options.name} is not up: bring it up first, only the native provider can wait")
    from .native import golden

    golden.add(options.archives, progress)
    progress("in place for the next cluster")
    return 0


def _prepare(options: argparse.Namespace) -> int:
    progress = Progress(screen=terminal())
    prepare(progress, images=IMAGES if options.images else (), tests=options.tests)
    progress("everything that a cluster needs is in place")
    return 0


def _standing(_: argparse.Namespace) -> int:
    from .native.leftovers import standing

    print(json.dumps(standing()))
    return 0


def _check_clean(options: argparse.Namespace) -> int:
    from .native.leftovers import left_since

    before = json.loads(options.since.read_text()) if options.since else {}
    found = left_since(before)
    if before:
        print(f"stood before and is let be: {', '.join(sorted(before))}")
    print(json.dumps(found, indent=1) if found else "nothing is left of any cluster")
    return 1 if found else 0


COMMANDS = {
    "up": _up,
    "down": _down,
    "status": _status,
    "kubeconfig": _kubeconfig,
    "load-image": _load_image,
    "prepare": _prepare,
    "standing": _standing,
    "check-clean": _check_clean,
}

if __name__ == "__main__":
    sys.exit(main())
