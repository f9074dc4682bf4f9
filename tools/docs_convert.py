"""The reference page of `rlrun convert`: results for other projects' example files, and every key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rlrun.convert.conversion import AREAL, AREAL_SFT, VERL, VERL_SFT, Converted, Dialect
from rlrun.convert.draft import KINDS
from rlrun.convert.tables.other_trainers import other_trainers
from rlrun.convert.tables.row import Row
from tools.convert_corpus import converted
from tools.docs_resource import NOTE, cells, page
from tools.documented import documentation_rows

_SOURCES: Sequence[tuple[str, Sequence[Dialect], str]] = (
    ("verl", (VERL, VERL_SFT), "verl (github.com/volcengine/verl and verl-project/verl)"),
    ("areal", (AREAL, AREAL_SFT), "AReaL (github.com/inclusionAI/AReaL)"),
)


def convert_page() -> str:
    """Return a table of files and a table of keys for each trainer."""
    lines = [
        NOTE,
        "",
        "# Keys and files of other trainers in `rlrun convert`",
        "",
        "How to use it: [conversion](../convert.md). Keys of PRIME-RL are on a separate [page](prime-rl.md).",
        "",
        "Each key has one outcome: *taken* (its value becomes a field's value, or matches the behavior of RLRun), *mapped* (it",
        "determines fields after a conversion or with other keys), *default* (it has no value), *dropped* (it has no field; the",
        "reason is reported), or *refused* (RLRun cannot do this run). A key without a row is refused, unless its block does not",
        "affect training (engines' options, launchers, trackers): then it is *unknown*, and reported on standard error. `~key`",
        "on the command line removes a key.",
    ]
    for name, dialects, title in _SOURCES:
        documented = dialects[0].name
        lines += ["", f"## Files of {title}", ""]
        lines += ["Facts of these files, with 1,000 rows where the number is not known, are converted by a test.", ""]
        lines += ["| file | keys | " + " | ".join(KINDS) + " | outcome |", "|---|---|" + "---|" * len(KINDS) + "---|"]
        lines += [_file(title, result) for title, _, result in converted(name)]
        lines += ["", f"## Documentation of {documented}", "", "Overrides that it shows, over one of these files.", ""]
        lines += [*documentation_rows(documented)]
        for dialect in dialects:
            lines += ["", f"## Keys of {dialect.name}", "", *_keys(dialect)]
    lines += [
        "",
        "## Other trainers",
        "",
        "Files of these trainers are not converted. `rlrun convert` calls them by their name, with this table.",
    ]
    for trainer in other_trainers():
        lines += ["", f"### {trainer.name}", "", f"| key of {trainer.name} | field below `spec` |", "|---|---|"]
        lines += [cells(f"`{one.key}`", f"`{one.field}`{f' ({one.note})' if one.note else ''}") for one in trainer.keys]
    return page(lines)


def _file(title: str, result: Converted) -> str:
    counts = Counter(fate.kind for fate in result.fates)
    outcome = "; ".join(
        f"refused: `{fate.setting.key}={fate.setting.value}`: {fate.note}" for fate in result.refused[:1]
    )
    outcome = outcome or "; ".join(["converted", *(f"to add: {line}" for line in result.missing)])
    return cells(f"`{title}`", str(len(result.fates)), *(str(counts[kind] or "") for kind in KINDS), outcome)


def _keys(dialect: Dialect) -> Iterable[str]:
    yield from (
        f"`*` matches any text; the first matching row applies. {_aliases(dialect)}",
        "",
    )
    yield from ("| key | field | meaning, or reason without a field |", "|---|---|---|")
    listed: dict[tuple[str, str], list[Row]] = {}
    for row in dialect.rows:
        if not row.to and not row.fine:
            listed.setdefault((row.how, row.note), []).append(row)
        else:
            yield _row(row, f"`{row.key}`")
    for rows in listed.values():
        yield _row(rows[0], ", ".join(f"`{row.key}`" for row in rows))


def _row(row: Row, keys: str) -> str:
    what = "refused: " if row.how == "refuse" else ""
    fine = ", ".join(
        f"`{str(value).lower() if value is None or isinstance(value, bool) else value}`" for value in row.fine
    )
    accepted = f" (but {fine} equals the behavior of RLRun)" if fine else ""
    fields = ", ".join(f"`{name}`" for name in row.to.split(", ")) if row.to else ""
    return cells(keys, fields, f"{what}{row.note}{accepted}")


def _aliases(dialect: Dialect) -> str:
    names = ", ".join(f"`{old}` is `{new}`" for old, new in dialect.aliases.items())
    return f"Keys with another name in other releases: {names}." if names else ""
