"""The environment variables that an environment's process gets: an allow-list, and the names that the manifest adds to it.

The orchestrator's own hold the run's key and whatever tokens its pod or its user's shell has. So nothing is inherited that is not named
here, by `environments[].variables`, or by an argument of the environment. A name that ends in `*` stands for all that begin so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from rlrun.config.environment_variables import KEY_ARGUMENT, is_passed, matches, names_in_arguments
from rlrun.config.formats import RESERVED_VARIABLES
from rlrun.diagnostics.stacks import FILE_VARIABLE
from rlrun.environments.rewards.scorers import SERVED
from rlrun.environments.rewards.served import ServedArgs
from rlrun.hub.revisions import VARIABLE as REVISIONS_VARIABLE
from rlrun.runtime.processes import LAUNCH_VARIABLE

EVERYTHING = "*"
"""All variables but RLRun's own: for code that has them in the run, too, and for a container of its own."""
_OWN = (LAUNCH_VARIABLE, FILE_VARIABLE, REVISIONS_VARIABLE)

_OF_THIS_CONTAINER = ("HOME", "TMPDIR", "TMP", "TEMP", "HOSTNAME", "SHELL", "XDG_*")
"""Variables whose values name folders of this process's own container."""


def for_another_container(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that mean the same in another container of the same image."""
    return {
        name: value
        for name, value in variables.items()
        if not any(matches(name, pattern) for pattern in _OF_THIS_CONTAINER)
    }


def passed_variables(variables: Mapping[str, str], named: Iterable[str]) -> dict[str, str]:
    """The variables that a process gets.

    Args:
        variables: of this process.
        named: names that are added to the list above; `EVERYTHING` for all.
    """
    names = tuple(named)
    return {name: value for name, value in variables.items() if name in _OWN or is_passed(name, names)}


def named_by(id: str, args: Mapping[str, object]) -> tuple[str, ...]:
    """Names that an environment's arguments add: those of a judge's key, and the hub's token for shipped ones that read the hub.

    Args:
        id: the environment's.
        args: its arguments.
    """
    names = [*names_in_arguments(id, args)]
    if id == "dataset" and SERVED & {*_list_texts(args.get("reward")), *_list_texts(args.get("reward_by_source"))}:
        names.append(str(ServedArgs.model_fields[KEY_ARGUMENT].default))
    return tuple(names)


def _list_texts(value: object) -> Iterator[str]:
    """Texts in JSON, at any depth."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _list_texts(part)


def withheld_hint(message: str, withheld: Collection[str]) -> str:
    """Advice on an error that names a variable which was not passed; "" when it names none.

    Args:
        message: of the error.
        withheld: names of the variables that this process has and the environment's has not.
    """
    words = set(re.findall(r"\w+", message))
    names = sorted(words & {name for name in withheld if not name.startswith(RESERVED_VARIABLES)})
    if not names:
        return ""
    return (
        f" (environments get no other variables of the orchestrator than those that are named: if its code needs it, "
        f"set environments[].variables: [{', '.join(names)}])"
    )
