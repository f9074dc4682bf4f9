"""Chat template check of `rlrun validate`: same refusals as at the orchestrator's start, if the model's folder is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.environments.process.user_code_check import check_subjects
from rlrun.local.read_inputs import CHECK_ENCODER, template_checks
from rlrun.orchestrator.rollouts.playable_tasks import check_template
from rlrun.orchestrator.sft.sft_attempt import check_encoder
from rlrun.protocol.files.failures import RoleError
from rlrun.trainer.modeling.tiny_model import make_tokenizer

ONE_TURN = (
    "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m['role'] in ('tool', 'system') or '<tool_response>' in m['content'] %}{{ raise_exception('no tools') }}"
    "{% endif %}{{ m['content'] }}<eos>{% endfor %}"
)


def write_model(folder: Path, template: str) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def make_environment(id: str, *, here: bool = True) -> dict[str, Any]:
    return {"place": f"environments[0] ({id})", "id": id, "args": {}, "template_arguments": {}, "here": here}


def check_model_template(folder: Path, *environments: dict[str, Any]) -> list[str]:
    return check_template(folder=str(folder), trust_remote_code=False, environments=environments)


def test_template_without_second_turn_is_refused(tmp_path: Path) -> None:
    problem = r"^environments\[0\] \(calculator\) may need several turns, but .* cannot render a second turn: .*one question only$"
    with pytest.raises(RoleError, match=problem):
        check_model_template(write_model(tmp_path, ONE_TURN), make_environment("calculator"))


def test_single_turn_environments_accept_any_template(tmp_path: Path) -> None:
    assert check_model_template(write_model(tmp_path, ONE_TURN), make_environment("reverse-text")) == []


def test_environment_on_another_machine_gets_a_notice(tmp_path: Path) -> None:
    (notice,) = check_model_template(write_model(tmp_path, ONE_TURN), make_environment("mine:make", here=False))
    assert "cannot render a second turn" in notice
    assert notice.endswith(
        "The environment is not installed on this machine: if it has a single turn, ignore this notice"
    )


def test_template_without_tool_turn_gets_a_notice(tmp_path: Path) -> None:
    folder = write_model(tmp_path, NO_TOOLS)
    warning = (
        "environments[0] (calculator): the chat template cannot render a tool turn; episodes that offer tools will fail"
    )
    assert check_model_template(folder, make_environment("calculator"), make_environment("reverse-text")) == [warning]


def test_template_that_drops_replies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RoleError, match=r"model: the tokenizer of .* is unusable: the chat template drops an assistant message"
    ):
        check_model_template(write_model(tmp_path, "{{ messages[0].content }}"))


def test_irreproducible_template_is_refused_for_fine_tuning(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "{% for m in messages %}{{ 'Ü' + m['content'] }}<eos>{% endfor %}")
    assert check_model_template(folder) == []
    with pytest.raises(RoleError, match="does not reproduce the chat template's text"):
        check_encoder(folder=str(folder), trust_remote_code=False)


def make_spec(folder: Path, **environment: Any) -> RLRunSpec:
    fields = {"group_size": 2} | environment
    return RLRunSpec.model_validate(
        {"task": "RL", "model": {"path": str(folder)}, "sampling": {"max_tokens": 8}, "environments": [fields]}
    )


def test_specification_has_one_template_check(tmp_path: Path) -> None:
    (piece,) = template_checks(make_spec(tmp_path, id="calculator"), set())
    assert piece.key == ("model", "path")
    assert [one["place"] for one in piece.command.args["environments"]] == ["environments[0] (calculator)"]
    (elsewhere,) = template_checks(make_spec(tmp_path, id="mine:make", python="/venv/bin/python"), set())
    assert [one["here"] for one in elsewhere.command.args["environments"]] == [False]
    assert not [*template_checks(make_spec(tmp_path, id="calculator"), {("model", "path")})]
    assert not [*template_checks(make_spec(tmp_path / "none", id="calculator"), set())]


def test_fine_tuning_has_its_own_template_check(tmp_path: Path) -> None:
    fields = {"task": "SFT", "model": {"path": str(tmp_path)}, "data": {"sources": [{"path": "rows.jsonl"}]}}
    (piece,) = template_checks(RLRunSpec.model_validate(fields), set())
    assert (piece.key, piece.command.id) == (("model", "path"), CHECK_ENCODER)


@pytest.mark.full  # Starts a process that imports transformers.
def test_template_check_runs_in_a_process(tmp_path: Path) -> None:
    (piece,) = template_checks(make_spec(write_model(tmp_path, ONE_TURN), id="calculator"), set())
    (refusal,) = check_subjects([(piece.command, piece.limits)])
    assert refusal is not None
    assert "cannot render a second turn" in refusal.message
