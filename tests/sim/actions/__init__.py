"""What may happen in a history: a table of actions, each of two small numbers, so that any part of a history is a history."""

from __future__ import annotations

from tests.sim.actions.action import Action
from tests.sim.actions.basics import BASICS
from tests.sim.actions.children import CHILDREN
from tests.sim.actions.elastic import ELASTIC, LEFT_OUT
from tests.sim.actions.engines import ENGINES
from tests.sim.actions.operators import OPERATORS
from tests.sim.actions.queue import QUEUE
from tests.sim.actions.refusals import REFUSALS

ACTIONS: dict[str, Action] = {**BASICS, **CHILDREN, **REFUSALS, **OPERATORS}
RESIZED: dict[str, Action] = {name: one for name, one in (ACTIONS | ELASTIC).items() if name not in LEFT_OUT}
"""Actions of histories of an elastic trainer."""
SCALED: dict[str, Action] = {name: one for name, one in (ACTIONS | ENGINES).items() if name not in LEFT_OUT}
"""Actions of histories of engines whose number changes."""
EVERY: dict[str, Action] = {**ACTIONS, **QUEUE, **ELASTIC, **ENGINES}
"""Actions of every history, those of an operator with a queue, of an elastic trainer and of engines included."""
