"""Checks of a verifiers 0.1 environment at load: whether it is supported, and which of its rows are the same task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlrun.environments.adapters.verifiers_errors import VerifiersLoadError
from rlrun.environments.protocol import Task

if TYPE_CHECKING:
    import verifiers as vf

_ELSEWHERE = {
    "SandboxMixin": "needs sandboxes of Prime",
    "SandboxEnv": "needs sandboxes of Prime",
    "CliAgentEnv": "has its own agent program, in a sandbox",
    "RLMEnv": "has its own agent program",
    "BrowserEnv": "needs a browser service",
    "OpenEnvEnv": "needs sandboxes of Prime",
}
"""Classes of verifiers whose rollouts run outside this process, with the reason."""
OWN_SAMPLING = ("max_tokens", "max_completion_tokens", "stop")
"""Sampling arguments of an environment that are applied to its requests."""
_NO_SAMPLING: dict[str, object] = {"n": 1, "extra_body": {}}
"""Sampling arguments that verifiers sets by default."""


def check_environment(env: vf.Environment) -> None:
    """Reject an environment that is not supported. The members of an `EnvGroup` are checked, too.

    Raises:
        VerifiersLoadError: contains the reason, the value and the fix.
    """
    for name, member in _list_members(env, ""):
        try:
            _check_member(member)
        except VerifiersLoadError as error:
            raise VerifiersLoadError(f"{name}{error}") from None


def _list_members(env: vf.Environment, name: str) -> Iterator[tuple[str, vf.Environment]]:
    if not (inner := getattr(env, "env_map", None)):
        yield name, env
        return
    for member_name, member in inner.items():
        yield from _list_members(member, f"{name}{member_name}: ")


def _check_member(env: vf.Environment) -> None:
    name = type(env).__name__
    for base in type(env).__mro__:
        if base.__name__ in _ELSEWHERE and base.__module__.startswith("verifiers."):
            raise VerifiersLoadError(
                f"{name} is a {base.__name__}, which {_ELSEWHERE[base.__name__]}; only environments that run in process are supported"
            )
    if env.message_type != "chat":
        raise VerifiersLoadError(f"message_type is {env.message_type!r}; only 'chat' is supported")
    if not env.score_rollouts:
        raise VerifiersLoadError("score_rollouts is False, so there is nothing to train on: set it to True")
    for key, value in env.sampling_args.items():
        if key not in OWN_SAMPLING and value != _NO_SAMPLING.get(key):
            raise VerifiersLoadError(
                f"sampling_args has {key} {value!r}; remove it and set environments[].sampling ({', '.join(OWN_SAMPLING)} are allowed)"
            )
    rubrics = [*_list_rubrics(env.rubric)]
    groups = [function for rubric in rubrics for function in rubric._get_group_reward_func_names()]
    if groups:
        raise VerifiersLoadError(
            f"its rubric scores whole groups ({', '.join(groups)}), but rollouts are scored one by one: use rewards of single rollouts "
            "(algorithm.advantage compares the rollouts of a group)"
        )
    own = any("score_rollout" in vars(base) for rubric in rubrics for base in _own_bases(type(rubric)))
    if not own and not any(weight for rubric in rubrics for weight in rubric.weights):
        raise VerifiersLoadError("its rubric has no reward with a weight other than 0, so there is nothing to train on")


def _list_rubrics(rubric: vf.Rubric) -> Iterator[vf.Rubric]:
    if inner := getattr(rubric, "rubrics", None):
        for member in inner:
            yield from _list_rubrics(member)
    else:
        yield rubric


def _own_bases(kind: type) -> Iterator[type]:
    """Classes of a rubric that are not defined by verifiers."""
    return (base for base in kind.__mro__ if not base.__module__.startswith("verifiers."))


def check_row(row: Mapping[str, object]) -> None:
    """Reject a row whose task verifiers cannot read.

    Raises:
        ValueError: contains the reason and the fix.
    """
    task = row.get("task")
    if isinstance(task, str) and not task.lstrip().startswith("{"):
        raise ValueError(
            f"task is {task!r}, but verifiers 0.1.14 does not accept a plain text there: remove or rename the column"
        )


def task_digests(tasks: Sequence[Task]) -> dict[str, str]:
    """Return the digest that determines the split of each task, by the task's id. Tasks with equal digests are in the same split.

    If all rows with a prompt have the same answer, the digest covers only the prompt, so existing splits stay the same. Rows with one
    prompt and several answers are different tasks (in a guessing game only the answer differs). If the answers are also equal, the
    digest covers all columns.
    """
    prompts = {task.id: json.dumps(task.prompt) for task in tasks}
    answers: dict[str, set[str | None]] = {}
    for task in tasks:
        answers.setdefault(prompts[task.id], set()).add(task.answer)
    asked = {
        task.id: prompt if len(answers[prompt := prompts[task.id]]) == 1 else json.dumps([prompt, task.answer])
        for task in tasks
    }
    if len(set(asked.values())) < 2:
        return {task.id: str(task.info["row"]) for task in tasks}
    return {id: hashlib.sha256(text.encode()).hexdigest() for id, text in asked.items()}


def own_sampling(env: vf.Environment, row: Mapping[str, object]) -> dict[str, object]:
    """Return the sampling arguments for a row's requests, from its environment or from its member of an `EnvGroup`."""
    info = row.get("info")
    route = info.get("env_id") if isinstance(info, Mapping) and getattr(env, "env_map", None) else None
    for name in [route] if isinstance(route, str) else route or ():
        env = env.env_map[name]
    return {key: env.sampling_args[key] for key in OWN_SAMPLING if env.sampling_args.get(key) is not None}
