"""Refusal at start if the chat template cannot continue a conversation that an environment may continue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import EnvironmentConfig, SamplingConfig
from rlrun.orchestrator.main import play_turns
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.tiny_model import make_tokenizer

ONE_TURN = (
    "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
)
DROPS_QUESTIONS = "{% for m in messages %}{% if m['role'] == 'assistant' or loop.first %}{{ m['content'] }}<eos>{% endif %}{% endfor %}"


def play(template: str, *, single_turn: bool) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    environments = [EnvironmentConfig.model_validate({"id": "calculator"})]
    config = OrchestratorConfig.model_construct(environments=environments, sampling=SamplingConfig())
    environment: Any = SimpleNamespace(single_turn=single_turn)
    play_turns(config, [Arena(environments[0], environment, ())], ChatTokens(tokenizer))


@pytest.mark.parametrize(
    ("template", "reason"),
    [(ONE_TURN, "refuses the conversation: one question only"), (DROPS_QUESTIONS, "drops a message with role user")],
)
def test_template_without_second_turn_is_refused(template: str, reason: str) -> None:
    with pytest.raises(RoleError, match=reason) as error:
        play(template, single_turn=False)
    assert str(error.value).startswith(
        "environments[0] (calculator) may need several turns, but the model's chat template cannot render a second turn"
    )
    assert error.value.code == exit_codes.CONFIGURATION


@pytest.mark.parametrize("template", [ONE_TURN, DROPS_QUESTIONS])
def test_single_turn_environments_accept_any_template(template: str) -> None:
    play(template, single_turn=True)
