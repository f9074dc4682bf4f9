"""Responses about rollouts: pages of a step, one rollout, comparison of two rollouts of a group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from rlrun.inspect import trace_rollouts
from rlrun.inspect.source import traced_steps
from rlrun.inspect.trace_rollouts import Row
from rlrun.ui import rollout_answers
from rlrun.ui.run_registry import OpenRun
from rlrun.ui.traces import Filter, IndexRow, Order, TraceIndex

Clean = Callable[[str], str]
"""Function that removes secrets from a text of a model or an environment."""
_DIFF_MAX = 3000
"""Maximum number of words (or lines) that are compared; longer texts are shown unaligned."""
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


@dataclass(frozen=True)
class Source:
    """Trace of a trained step, or of the evaluation of a policy version."""

    step: int | None
    evaluation: int | None

    def trace_path(self, run: OpenRun) -> Path:
        """Return the path of the trace.

        Raises:
            LookupError: neither a step nor an evaluation is set.
        """
        if self.evaluation is not None:
            return run.paths.evaluation_trace(self.evaluation)
        if self.step is None:
            raise LookupError("set the parameter step or evaluation")
        return run.paths.trace(self.step)


def list_traced_steps(run: OpenRun, name: str) -> rollout_answers.TracedSteps:
    """Return the steps and evaluations with a trace. `name`: displayed name of the run."""
    names = [path.name for path in run.paths.traces.iterdir()] if run.paths.traces.is_dir() else []
    versions = [int(found[1]) for name in names if (found := re.fullmatch(r"eval_(\d{8})\.jsonl", name))]
    return rollout_answers.TracedSteps(run=name, spans=_number_spans(traced_steps(names)), evaluations=sorted(versions))


def _number_spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the contiguous spans of ascending numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def rollout_page(
    index: TraceIndex, wanted: Filter, order: Order, clean: Clean, *, offset: int, limit: int
) -> rollout_answers.RolloutPage:
    """Return a page of the selected rollouts."""
    found = index.select_rows(wanted, order)
    rewards = [reward for row in found if isinstance(reward := row["reward"], float)]
    return rollout_answers.RolloutPage(
        total=len(index.rows),
        chosen=len(found),
        offset=offset,
        rows=[row_view(row, clean) for row in found[offset : offset + limit]],
        environments=index.environments,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
    )


def row_view(row: IndexRow, clean: Clean) -> rollout_answers.RolloutRow:
    """Return the list entry of a row of the index."""
    changes = {
        "environment": clean(row["environment"]),
        "task_id": clean(row["task_id"]),
        "prompt": clean(row["prompt"]),
        "answer": clean(row["answer"]),
        "versions": [version for version, _ in row["versions"]],
        "error": clean(row["error"]) if row["error"] else None,
    }
    plain = {name: value for name, value in row.items() if name in rollout_answers.RolloutRow.model_fields}
    return rollout_answers.RolloutRow.model_validate(plain | changes)


def whole_rollout(run: OpenRun, source: Source, number: int) -> tuple[IndexRow, Row]:
    """Return the row of the index and the whole rollout.

    Raises:
        LookupError: the trace has no such rollout.
        FileNotFoundError: the trace does not exist.
    """
    index = run.read_trace_index(source.trace_path(run))
    row = next((row for row in index.rows if row["number"] == number), None)
    if row is None:
        raise LookupError(f"the trace has no rollout {number}")
    with run.fence.open(source.trace_path(run)) as file:
        return row, index.read_rollout(file, number)


def rollout_view(name: str, row: IndexRow, found: Row, clean: Clean) -> rollout_answers.RolloutView:
    """Return one rollout. `name`: displayed name of its run."""
    measures = found.get("metrics")
    named = measures if isinstance(measures, Mapping) else {}
    tools = found.get("tools")
    seconds, version = found.get("seconds"), found.get("dispatch_version")
    return rollout_answers.RolloutView(
        run=name,
        row=row_view(row, clean),
        turns=[_turn_view(turn, clean) for turn in trace_rollouts.list_turns(found)],
        tools=[clean(name) for name in _tool_names(tools if isinstance(tools, list) else [])],
        measures=[
            rollout_answers.Measured(metric=clean(str(name)), value=_read_number(value))
            for name, value in named.items()
        ],
        seconds=_read_number(seconds),
        dispatch_version=version if isinstance(version, int) else None,
    )


def _read_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None


def _tool_names(tools: Sequence[object]) -> Iterator[str]:
    for tool in tools:
        if isinstance(tool, Mapping):
            function = tool.get("function")
            yield str((function if isinstance(function, Mapping) else tool).get("name"))


def _turn_view(turn: trace_rollouts.Turn, clean: Clean) -> rollout_answers.TurnView:
    calls = [rollout_answers.CallView(name=clean(name), arguments=clean(arguments)) for name, arguments in turn.calls]
    return rollout_answers.TurnView(role=turn.role, text=clean(turn.text), calls=calls)


def rollout_difference(
    first: tuple[IndexRow, Row], second: tuple[IndexRow, Row], clean: Clean
) -> rollout_answers.DiffView:
    """Return two rollouts, compared turn by turn.

    Args:
        first: index row and whole rollout.
        second: index row and whole rollout of the other one.
        clean: function that removes secrets.
    """
    pairs = list(zip_longest(trace_rollouts.list_turns(first[1]), trace_rollouts.list_turns(second[1])))
    return rollout_answers.DiffView(
        first=row_view(first[0], clean),
        second=row_view(second[0], clean),
        turns=[list(text_pieces(clean(_turn_text(a)), clean(_turn_text(b)))) for a, b in pairs],
        roles=[(a or b).role for a, b in pairs],
    )


def _turn_text(turn: trace_rollouts.Turn | None) -> str:
    if turn is None:
        return ""
    return "\n".join([turn.text, *(f"{name}({arguments})" for name, arguments in turn.calls)])


def text_pieces(first: str, second: str) -> Iterator[rollout_answers.Piece]:
    """Yield common and different parts of two texts by words, or by lines for long texts. Joined, the parts are the texts."""
    a, b = _WORDS.findall(first), _WORDS.findall(second)
    if max(len(a), len(b)) > _DIFF_MAX:
        a, b = first.splitlines(keepends=True), second.splitlines(keepends=True)
    if max(len(a), len(b)) > _DIFF_MAX:
        a, b = [first], [second]
    for kind, i, j, k, n in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            yield rollout_answers.Piece(side="both", text="".join(a[i:j]))
            continue
        yield from _one_side("first", a[i:j])
        yield from _one_side("second", b[k:n])


def _one_side(side: Literal["first", "second"], words: Sequence[str]) -> Iterator[rollout_answers.Piece]:
    if words:
        yield rollout_answers.Piece(side=side, text="".join(words))
