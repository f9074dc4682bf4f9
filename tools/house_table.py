"""A table of the structure and size of the source code, for two git revisions.

    python -m tools.house_table --before 653f209 --after HEAD [--write]

It counts the shipped code, `operator/rlrun_operator` and `workloads/rlrun`, as committed in git.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.import_graph import Graph, arrows, both_ways, circles, longest_chain, read_graph, room_arrows, shortest_chain
from tools.source_measures import COMPLEX, MAX_FUNCTION_LINES, MAX_PARAMETERS, PRONOUNS, Measures, measure

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/house.md"
TREES = ("operator", "workloads")
"""Folders that hold the packages."""
LARGE_PACKAGES = ("rlrun.trainer", "rlrun.orchestrator", "rlrun_operator")
MAX_MODULES = 16
"""Largest number of modules of a folder."""
_LOSS = re.compile(r"^def cispo\(", re.MULTILINE)
_EVENT = re.compile(r"^    @kopf\.on\.event\(", re.MULTILINE)
_APPLY = re.compile(r"^    async def apply\(self, manifest\b", re.MULTILINE)
_PRESETS = re.compile(r"^PRESETS\b.* = ", re.MULTILINE)


@dataclass(frozen=True)
class House:
    """One revision's shipped sources.

    Attributes:
        sources: text by dotted name.
        folders: folder below the tree's top, by dotted name.
        graph: of imports.
        total: measures of all files.
    """

    sources: Mapping[str, str]
    folders: Mapping[str, str]
    graph: Graph
    total: Measures

    @classmethod
    def of(cls, files: Mapping[str, str]) -> House:
        """Read texts by path, as `workloads/rlrun/api/spec.py`; files other than Python are left out."""
        sources, folders = {}, {}
        for path, text in files.items():
            below = PurePosixPath(path).relative_to(PurePosixPath(path).parts[0])
            if below.suffix == ".py":
                parts = below.with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                sources[name], folders[name] = text, str(below.parent)
        total = sum(map(measure, sources.values()), Measures())
        return cls(sources, folders, read_graph(sources), total)

    def modules(self) -> Counter[str]:
        """Number of modules by folder, without `__init__`."""
        return Counter(folder for name, folder in self.folders.items() if name != folder.replace("/", "."))

    def defining(self, pattern: re.Pattern[str]) -> list[str]:
        """Return modules whose text matches the pattern."""
        return [name for name, text in self.sources.items() if pattern.search(text)]

    def users(self, modules: Sequence[str]) -> list[str]:
        """Return modules that import one of these."""
        return [name for name, imported in self.graph.items() if not imported.isdisjoint(modules)]


Row = tuple[str, object]


def rows(house: House) -> list[Row]:
    """Return measures of a revision with their names, in the order of the table."""
    modules, total = house.modules(), house.total
    return [
        ("modules", modules.total()),
        ("folders with modules", len(modules)),
        ("modules of the fullest folder", max(modules.values(), default=0)),
        (f"folders of more than {MAX_MODULES} modules", sum(count > MAX_MODULES for count in modules.values())),
        ("modules whose file name another module has too", _namesakes(house)),
        ("shipped lines", total.lines),
        ("functions", total.functions),
        (f"functions over {MAX_FUNCTION_LINES} lines", total.long_functions),
        (f"functions with more than {MAX_PARAMETERS} parameters", total.many_parameters),
        (f"functions of complexity D or worse (>= {COMPLEX})", total.complex_functions),
        ("uses of `Any`", total.anys),
        ("docstrings", total.docstrings),
        ("docstrings that open with a bare pronoun", total.bare_docstrings),
        *(row for package in LARGE_PACKAGES for row in _arrows(house, package)),
        ("circles of imports", len(circles(house.graph))),
        *_chains(house),
    ]


def _namesakes(house: House) -> int:
    stems = Counter(
        name.rpartition(".")[2] for name, folder in house.folders.items() if name != folder.replace("/", ".")
    )
    return sum(count for stem, count in stems.items() if count > 1 and stem != "__main__")


def _arrows(house: House, package: str) -> list[Row]:
    inside = arrows(house.graph, package)
    crossing = sum(house.folders[name] != house.folders[other] for name, other in inside)
    return [
        (f"`{package}`: arrows between modules", len(inside)),
        (f"`{package}`: of these from one folder into another", crossing),
        (f"`{package}`: arrows between folders", len(room_arrows(house.graph, package, house.folders))),
    ]


def _chains(house: House) -> list[Row]:
    presets, losses = house.defining(_PRESETS), house.defining(_LOSS)
    events, clients = house.defining(_EVENT), house.defining(_APPLY)
    entry = ["rlrun.trainer.__main__"]
    return [
        (
            "files from a preset to its loss, the shortest way",
            len(shortest_chain(both_ways(house.graph), presets, losses)),
        ),
        ("files from the trainer's entry to a loss, the longest way", longest_chain(house.graph, entry, losses)),
        ("files from an event to its manifest, the shortest way", len(shortest_chain(house.graph, events, clients))),
        ("files from an event to its manifest, the longest way", longest_chain(house.graph, events, clients)),
    ]


DEFINITIONS = f"""\
A module is a `.py` file that is no `__init__`. A function's lines run from `def` to its last, docstring included; `self` and `cls` are no
parameters; complexity is counted as radon does, nested functions on their own. Docstrings are those of modules, classes, functions and
attributes; one opens with a bare pronoun where its first word is one of
{", ".join(f"`{word}`" for word in ("Of", *PRONOUNS))}.
An arrow is one module that imports another, once, wherever the import stands. From one folder into another: the two lie in different
folders. Between folders: pairs of different folders with at least one such arrow.
A way follows imports from file to file, both ends counted; 0: there is none. A preset names its loss by a string, so that way follows
imports in either direction, from the table `PRESETS` to the function `cispo`. An event comes in where `kopf.on.event` is; a manifest goes
out where the client's `apply` is.
"""


def table(before: House, after: House, revisions: tuple[str, str]) -> str:
    """Return Markdown of two revisions."""
    lines = [f"| | {revisions[0]} | {revisions[1]} |", "|---|---|---|"]
    lines += [f"| {name} | {old} | {new} |" for (name, old), (_, new) in zip(rows(before), rows(after), strict=True)]
    old, new = before.modules(), after.modules()
    lines += ["", f"Modules per folder:\n\n| folder | {revisions[0]} | {revisions[1]} |", "|---|---|---|"]
    lines += [f"| `{folder}` | {old[folder] or ''} | {new[folder] or ''} |" for folder in sorted(old | new)]
    return "\n".join(lines) + "\n"


def read_revision(revision: str, root: Path = ROOT) -> dict[str, str]:
    """Return the shipped Python files of a revision, by path.

    Raises:
        subprocess.CalledProcessError: git does not know the revision.
    """
    command = ["git", "-C", str(root), "archive", "--format=tar", revision, *TREES]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        wanted = [member for member in members if member.isfile() and member.name.endswith(".py")]
        contents = {member.name: members.extractfile(member) for member in wanted}
        return {name: content.read().decode() for name, content in contents.items() if content is not None}


def _short(revision: str, root: Path = ROOT) -> str:
    command = ["git", "-C", str(root), "rev-parse", "--short=7", revision]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the table.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.house_table", description="table of two revisions' sources")
    parser.add_argument("--before", default="653f209", help="git revision of the left column")
    parser.add_argument("--after", default="HEAD", help="git revision of the right column")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    try:
        names = _short(options.before), _short(options.after)
        text = table(House.of(read_revision(names[0])), House.of(read_revision(names[1])), names)
    except subprocess.CalledProcessError as error:
        print(f"error: {str(error.stderr).strip()}", file=sys.stderr)
        return 2
    command = f"`python -m tools.house_table --before {options.before} --after {options.after} --write`"
    page = f"# Where things live\n\n{command}\n\n{DEFINITIONS}\n{text}"
    if options.write:
        RESULT.write_text(page)
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
