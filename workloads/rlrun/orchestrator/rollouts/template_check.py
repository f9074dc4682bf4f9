"""Checks of a model's chat template at the start of the orchestrator, and in `rlrun validate` if the model is on this
machine.

The check of the command line needs the tokenizer, so it runs in a separate process (`local.inputs.template_pieces`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlrun.environments.protocol import TellsTurns
from rlrun.environments.registry import EnvironmentLoadError, load_environment
from rlrun.hub.repository import show_source
from rlrun.orchestrator.rollouts.chat_template import ChatTemplate, TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


def load_tokens(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatTokens:
    """Load the policy's tokenizer.

    Raises:
        RoleError: the tokenizer is missing or its chat template is unusable.
    """
    try:
        return ChatTokens.load(source, revision=revision, trust_remote_code=trust_remote_code)
    except (TemplateError, OSError, ValueError, KeyError) as error:
        reason = f"one of its files lacks the key {error}" if isinstance(error, KeyError) else str(error)
        raise RoleError(
            f"model: the tokenizer of {show_source(source)} is unusable: {reason}", exit_codes.DATA
        ) from error


def check_turns(place: str, template: ChatTemplate) -> str | None:
    """Render a conversation of two turns, and a tool turn.

    Args:
        place: field of the multi-turn environment, for messages.
        template: chat template with the environment's arguments.

    Returns:
        Warning if tool turns are unsupported, otherwise None.

    Raises:
        RoleError: the template cannot continue a conversation.
    """
    try:
        template.play_turns()
    except TemplateError as error:
        message = f"{place} may need several turns, but the model's chat template cannot render a second turn: {error}"
        raise RoleError(message, exit_codes.CONFIGURATION) from error
    if template.tool_form is None:
        return f"{place}: the chat template cannot render a tool turn; episodes that offer tools will fail"
    return None


def check_template(*, folder: str, trust_remote_code: bool, environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Check the chat template of a model in the same way as the orchestrator at its start.

    Args:
        folder: folder of the model.
        trust_remote_code: whether the tokenizer may run its own code.
        environments: `place`, `id`, `args` and `template_arguments` of each environment; `here`: whether it can be
            loaded on this machine.

    Returns:
        Notices for people.

    Raises:
        RoleError: the run would be refused at its start.
    """
    chat = load_tokens(folder, trust_remote_code=trust_remote_code)
    notices: list[str] = []
    for environment in environments:
        try:
            template = chat.called_with(environment["template_arguments"]).template
        except TemplateError:
            continue  # `local.inputs.check_template_arguments` reports it
        try:
            warning = check_turns(environment["place"], template)
        except RoleError as error:
            if not environment["here"]:
                notices.append(
                    f"{error}. The environment is not installed on this machine: if it has a single turn, ignore this notice"
                )
            elif _may_ask_again(environment["id"], environment["args"]):
                raise
            continue
        if warning is not None and (not environment["here"] or _may_ask_again(environment["id"], environment["args"])):
            notices.append(warning)
    return notices


def _may_ask_again(id: str, args: Mapping[str, object]) -> bool:
    """Return whether an environment may need several turns. False for one that cannot be loaded, which another check
    reports.
    """
    try:
        environment = load_environment(id, args)
    except EnvironmentLoadError:
        return False
    return not (isinstance(environment, TellsTurns) and environment.single_turn is True)
