"""The graph of imports between the modules of a source tree. Pure."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

Graph = Mapping[str, frozenset[str]]
"""Modules that a module imports anywhere in its text, by its dotted name, including imports for types."""


def read_graph(sources: Mapping[str, str]) -> Graph:
    """Build the graph of `sources`: texts by dotted name, a package's `__init__` under the package's name."""
    return {name: frozenset(_imports(text, sources.keys())) - {name} for name, text in sources.items()}


def _imports(text: str, modules: Collection[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                name = whole if whole in modules else node.module
                if name in modules:
                    yield name


def arrows(graph: Graph, package: str) -> set[tuple[str, str]]:
    """Return imports with both ends inside `package`; its own `__init__` counts."""
    inside = {name for name in graph if name == package or name.startswith(f"{package}.")}
    return {(name, other) for name in inside for other in graph[name] & inside}


def room_arrows(graph: Graph, package: str, folders: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return pairs of different folders in `package` with an import from the first to the second.

    Args:
        graph: graph of imports.
        package: dotted name of a package.
        folders: folder of each module, by the module's name.
    """
    pairs = {(folders[name], folders[other]) for name, other in arrows(graph, package)}
    return {(room, other) for room, other in pairs if room != other}


def both_ways(graph: Graph) -> Graph:
    """Return the graph with each arrow in both directions."""
    found = {name: set(others) for name, others in graph.items()}
    for name, others in graph.items():
        for other in others:
            found[other].add(name)
    return {name: frozenset(others) for name, others in found.items()}


def shortest_chain(graph: Graph, starts: Collection[str], goals: Collection[str]) -> list[str]:
    """Return modules of the shortest path of imports from `starts` to `goals`; empty without a path."""
    ways = [[start] for start in sorted(starts)]
    seen = set(starts)
    for way in ways:
        if way[-1] in goals:
            return way
        following = sorted(graph[way[-1]] - seen)
        seen.update(following)
        ways += [[*way, name] for name in following]
    return []


def longest_chain(graph: Graph, starts: Collection[str], goals: Collection[str]) -> int:
    """Return the number of files on the longest path of imports from `starts` to `goals`, 0 without a path.

    A cycle counts as one place with all of its files, because a reader of one of them has to read the others.
    """
    place = _places(graph)
    weight: dict[str, int] = {}
    for name in graph:
        weight[place[name]] = weight.get(place[name], 0) + 1
    onward: dict[str, set[str]] = {name: set() for name in weight}
    for name, others in graph.items():
        onward[place[name]] |= {place[other] for other in others} - {place[name]}
    ends = {place[goal] for goal in goals if goal in place}
    lengths: dict[str, int] = {}

    def length(name: str) -> int:
        if name not in lengths:
            further = max(map(length, onward[name]), default=0)
            lengths[name] = weight[name] + further if further or name in ends else 0
        return lengths[name]

    return max((length(place[start]) for start in starts if start in place), default=0)


def circles(graph: Graph) -> list[list[str]]:
    """Return sets of modules that import each other, each sorted."""
    members: dict[str, list[str]] = {}
    for name, representative in sorted(_places(graph).items()):
        members.setdefault(representative, []).append(name)
    return [names for names in members.values() if len(names) > 1]


def _places(graph: Graph) -> dict[str, str]:
    """Return a representative of each module's strongly connected component (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    open_ones: list[str] = []
    place: dict[str, str] = {}

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        open_ones.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other not in place:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            while name not in place:
                place[open_ones.pop()] = name

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return place
