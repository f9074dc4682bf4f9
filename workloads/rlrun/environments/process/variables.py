"""Environment variables of an environment's process: an allow-list, and the names that the manifest adds to it.

The orchestrator's variables contain the run's key and possibly tokens of its pod or of the user's shell. Therefore a variable is passed
on only if it is listed in the allow-list, in `environments[].variables` or in an argument of the environment. A name with `*` at its end
matches all variables with this prefix.
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
"""All variables except RLRun's own: for code that has them in the run, too, and for an environment with its own container."""
_OWN = (LAUNCH_VARIABLE, FILE_VARIABLE, REVISIONS_VARIABLE)

_OF_THIS_CONTAINER = ("HOME", "TMPDIR", "TMP", "TEMP", "HOSTNAME", "SHELL", "XDG_*")
"""Variables whose values are folders of this process's container."""


def for_another_container(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values are also valid in another container of the same image."""
    return {
        name: value
        for name, value in variables.items()
        if not any(matches(name, pattern) for pattern in _OF_THIS_CONTAINER)
    }


def passed_variables(variables: Mapping[str, str], named: Iterable[str]) -> dict[str, str]:
    """Return the variables that an environment's process gets.

    Args:
        variables: variables of this process.
        named: names in addition to the allow-list; `EVERYTHING` for all variables.
    """
    names = tuple(named)
    return {name: value for name, value in variables.items() if name in _OWN or is_passed(name, names)}


def named_by(id: str, args: Mapping[str, object]) -> tuple[str, ...]:
    """Return the variables that an environment's arguments require: keys of judges, and the hub's token for environments that read the hub.

    Args:
        id: id of the environment.
        args: arguments of the environment.
    """
    names = [*names_in_arguments(id, args)]
    if id == "dataset" and SERVED & {*_list_texts(args.get("reward")), *_list_texts(args.get("reward_by_source"))}:
        names.append(str(ServedArgs.model_fields[KEY_ARGUMENT].default))
    return tuple(names)


def _list_texts(value: object) -> Iterator[str]:
    """Yield the texts in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _list_texts(part)


def withheld_hint(message: str, withheld: Collection[str]) -> str:
    """Return advice on an error that contains the name of a variable which was not passed on, or "".

    Args:
        message: message of the error.
        withheld: names of variables that this process has and the environment's process does not have.
    """
    words = set(re.findall(r"\w+", message))
    names = sorted(words & {name for name in withheld if not name.startswith(RESERVED_VARIABLES)})
    if not names:
        return ""
    return (
        f" (environments get only listed variables of the orchestrator: if the code needs it, "
        f"set environments[].variables: [{', '.join(names)}])"
    )
