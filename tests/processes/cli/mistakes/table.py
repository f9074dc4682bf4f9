"""Table of mistakes: each is reported before slow work, in one line with the place, the value and the fix."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.commands import COMMANDS, OPTIONS
from tests.processes.cli.mistakes.files import FILES, SYNTAX
from tests.processes.cli.mistakes.formats import FORMATS
from tests.processes.cli.mistakes.manifests import MANIFESTS
from tests.processes.cli.mistakes.mistake import Mistake
from tests.processes.cli.mistakes.models import MODELS
from tests.processes.cli.mistakes.newcomers import NEWCOMERS
from tests.processes.cli.mistakes.places import PLACES
from tests.processes.cli.mistakes.rules import RULES
from tests.processes.cli.mistakes.secrets import SECRETS
from tests.processes.cli.mistakes.shapes import SHAPES
from tests.processes.cli.mistakes.texts import TEXTS
from tests.processes.cli.mistakes.tools import ROLES, TOOLS
from tests.processes.cli.mistakes.values import VALUES

MISTAKES: Sequence[Mistake] = (
    *(*COMMANDS, *FILES, *SYNTAX, *MANIFESTS, *OPTIONS, *ROLES, *TOOLS),
    *(*SHAPES, *VALUES, *FORMATS, *PLACES, *TEXTS, *RULES, *SECRETS, *MODELS, *NEWCOMERS),
)
