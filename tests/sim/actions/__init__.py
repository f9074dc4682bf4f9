"""Actions of histories: a table of actions with two small numbers each, so that any part of a history is a history."""

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
"""Actions of histories with a varying number of engines."""
EVERY: dict[str, Action] = {**ACTIONS, **QUEUE, **ELASTIC, **ENGINES}
"""Actions of all histories, including those of a queue, of an elastic trainer and of engines."""
