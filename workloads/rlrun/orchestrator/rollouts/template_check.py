"""What a model's chat template must be able to write: checked when the orchestrator starts, and by `rlrun validate` if the model is here.

The check of a command line needs the tokenizer, so it is made in a process of its own (`local.inputs.template_pieces`).
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
        RoleError: there is none, or its chat template is of no use.
    """
    try:
        return ChatTokens.load(source, revision=revision, trust_remote_code=trust_remote_code)
    except (TemplateError, OSError, ValueError, KeyError) as error:
        reason = f"a file of it has no {error}" if isinstance(error, KeyError) else str(error)
        raise RoleError(
            f"model: the tokenizer of {show_source(source)} cannot be used: {reason}", exit_codes.DATA
        ) from error


def check_turns(place: str, template: ChatTemplate) -> str | None:
    """Play a conversation of two turns, and a tool turn.

    Args:
        place: environment that may ask more than once, in messages.
        template: the chat template with the environment's arguments.

    Returns:
        A warning if tools cannot be written, else None.

    Raises:
        RoleError: the template cannot continue a conversation.
    """
    try:
        template.play_turns()
    except TemplateError as error:
        message = f"{place} may ask several times, and the model cannot play a second turn: {error}"
        raise RoleError(message, exit_codes.CONFIGURATION) from error
    if template.tool_form is None:
        return f"{place}: the chat template cannot write a tool turn; episodes that offer tools will fail"
    return None


def check_template(*, folder: str, trust_remote_code: bool, environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Check the chat template of a model as the orchestrator does at its start.

    Args:
        folder: folder of the model.
        trust_remote_code: whether the tokenizer may run its own code.
        environments: `place`, `id`, `args` and `template_arguments` of each; `here`: whether it can be loaded on this machine.

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
                notices.append(f"{error}. It is not loaded on this machine: if it asks once only, ignore this")
            elif _may_ask_again(environment["id"], environment["args"]):
                raise
            continue
        if warning is not None and (not environment["here"] or _may_ask_again(environment["id"], environment["args"])):
            notices.append(warning)
    return notices


def _may_ask_again(id: str, args: Mapping[str, object]) -> bool:
    """Whether an environment may ask more than once. False for one that cannot be loaded: another check reports it."""
    try:
        environment = load_environment(id, args)
    except EnvironmentLoadError:
        return False
    return not (isinstance(environment, TellsTurns) and environment.single_turn is True)
