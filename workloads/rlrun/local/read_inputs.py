"""Checks of a run's input before anything starts: the model's folder, its chat template, and the rows of the data."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlrun.api.resource import RLRunSpec
from rlrun.config.families import explain_engine_dtype
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.data import DataConfig, DataSetConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.rollout import EnvironmentConfig, Sampling, unread_argument
from rlrun.config.models.run_config import RunConfig
from rlrun.environments.process.life import Command, Limits
from rlrun.hub.folder_weights import weights_problem
from rlrun.hub.refused_models import format_refusal, read_config
from rlrun.local.user_code import CodeCheck, Finding, limits_of
from rlrun.protocol.files.volume_faults import show_size

READ_SECONDS = 20.0
"""Time limit for reading rows. Further rows of a large data set are checked when they are trained on."""
MAX_BAD_ROWS = 10
"""Largest number of bad rows that are reported for one data set."""
# Functions that need packages which the command line does not import. Each runs in its own process (`user_code.CodeCheck`).
COUNT_PROMPTS = "rlrun.orchestrator.rollouts.playable_tasks:count_unplayable"
CHECK_TEMPLATE = "rlrun.orchestrator.rollouts.playable_tasks:check_template"
CHECK_ENCODER = "rlrun.orchestrator.sft.sft_attempt:check_encoder"
TEMPLATE_LIMITS = Limits(start_seconds=180.0, memory_bytes=16 * 1024**3)
"""Limits of the check of a template.

If the template cannot render several turns, the check loads the environments, because a single-turn environment does not need them.
"""
DATA_SETS = ("dataset", "gsm8k")
"""Ids of environments with data rows, whose prompts are sent to the model without changes. Not data sets of fine-tuning."""
_PARTS = (("config.json", "config.json"), ("weights (*.safetensors)", "*.safetensors"), ("tokenizer", "token*"))


def check_model_folder(model: ModelConfig, *, here: bool, key: Key = ("model", "path")) -> Iterator[Finding]:
    """Yield findings about `model.path`.

    Args:
        model: model to check.
        here: whether the run will run on this machine. Otherwise a missing absolute path is only a notice, because it may exist in the
            run's pods.
        key: manifest field of the model.
    """
    if model.path is None:
        return
    folder = Path(model.path)
    if not folder.exists():
        yield _absent_path(key, model.path, "folder", here=here)
    elif not folder.is_dir():
        yield Finding(key, f"{model.path} is a file; it must be a Hugging Face model folder")
    elif not os.access(folder, os.R_OK | os.X_OK):
        yield Finding(key, f"{model.path} cannot be read by this user; change its permissions")
    elif (refusal := format_refusal(folder, model.path)) is not None:
        yield Finding(key, refusal)
    else:
        lacking = [name for name, pattern in _PARTS if not any(folder.glob(pattern))]
        if lacking:
            yield Finding(
                key,
                f"{model.path} has no {', no '.join(lacking)}; it must be a Hugging Face model folder "
                "(`rlrun tiny-model DIR` creates a tiny one)",
            )
        elif problem := _config_problem(folder / "config.json"):
            yield Finding(key, problem)


def check_model_weights(model: ModelConfig, *, key: Key = ("model", "path")) -> Iterator[Finding]:
    """Yield a finding about an incomplete or unreadable weights file in a model folder of this machine.

    The trainer's proof (`proved_models`) would find most of them too, but its process imports torch and transformers for 5 s of CPU time.

    Call this only if `check_model_folder` and `fit.report.why_untrainable` have no finding: for a model that the trainer cannot train,
    the weights do not matter.
    """
    if model.path is not None and (problem := weights_problem(Path(model.path))) is not None:
        yield Finding(key, problem)


def check_engine_dtype(model: ModelConfig, *, gpus: int) -> Iterator[Finding]:
    """Yield a finding about a number format in which engines with `gpus` GPUs cannot serve a model of this machine."""
    config = read_config(Path(model.path)) if model.path is not None else None
    if (fault := explain_engine_dtype(config or {}, model.dtype, gpus=gpus)) is not None:
        yield Finding(("model", "dtype"), fault)


def check_template_arguments(
    model: ModelConfig, environments: Sequence[EnvironmentConfig], sampling: Sampling, evaluation: Sampling | None
) -> Iterator[Finding]:
    """Yield findings about `chatTemplateArguments` that the model's template does not use. Models that are not here are skipped."""
    template = _chat_template(model)
    if template is None:
        return
    places: list[tuple[Key, Sampling | None]] = [(("sampling",), sampling), (("evaluation", "sampling"), evaluation)]
    places += [(("environments", i, "sampling"), e.sampling) for i, e in enumerate(environments)]
    for key, one in places:
        if one is not None and (problem := unread_argument(one.chat_template_arguments, template)):
            yield Finding((*key, "chat_template_arguments"), problem)


def _chat_template(model: ModelConfig) -> str | None:
    """Return the text of a model's chat template, or None if the model is not on this machine or has no template."""
    if model.tiny is not None:
        from rlrun.trainer.modeling.character_tokenizer import CHAT_TEMPLATE

        return CHAT_TEMPLATE
    if model.path is None:
        return None
    try:
        file = Path(model.path) / "chat_template.jinja"
        if file.is_file():
            return file.read_text()
        found = json.loads((Path(model.path) / "tokenizer_config.json").read_bytes()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None  # the tokenizer is unusable: the orchestrator reports the reason
    # Several named templates are a list. Its text is sufficient for a search for names of arguments.
    return found if found is None or isinstance(found, str) else json.dumps(found)


def prompt_checks(spec: RLRunSpec, wrong: Collection[Key]) -> Iterator[CodeCheck]:
    """Yield the check that counts too long or refused prompts, for each environment in `DATA_SETS`.

    A `CodeCheck` runs as a command in its own process. Without the model's folder on this machine no check is yielded, because it needs
    the tokenizer.

    Args:
        spec: specification of the run.
        wrong: fields that already have a problem.
    """
    model = spec.model
    if (
        spec.task != "RL"
        or model.path is None
        or ("model", "path") in wrong
        or not (folder := Path(model.path).absolute()).is_dir()
    ):
        return
    for index, environment in enumerate(spec.environments):
        if environment.id not in DATA_SETS or environment.python is not None or environment.image is not None:
            continue
        sampling = environment.sampling or spec.sampling
        args = {
            "id": environment.id,
            "args": environment.args,
            "folder": str(folder),
            "trust_remote_code": model.trust_remote_code,
            "seq_len": spec.seq_len,
            "template_arguments": sampling.chat_template_arguments,
        }
        yield CodeCheck(
            ("environments", index, "args"), Command(COUNT_PROMPTS, args, kind="check"), limits_of(environment)
        )


def template_checks(spec: RLRunSpec, wrong: Collection[Key]) -> Iterator[CodeCheck]:
    """Yield the check of the chat template, which runs as a command in its own process, if the model's folder is on this machine.

    Args:
        spec: specification of the run.
        wrong: fields that already have a problem.
    """
    model = spec.model
    if model.path is None or ("model", "path") in wrong or not (folder := Path(model.path).absolute()).is_dir():
        return
    loaded: dict[str, Any] = {"folder": str(folder), "trust_remote_code": model.trust_remote_code}
    if spec.task == "SFT":
        yield CodeCheck(("model", "path"), Command(CHECK_ENCODER, loaded, kind="check"), TEMPLATE_LIMITS)
        return
    environments = [
        {
            # `place` names the environment in messages; `here`: whether this Python installation can load it.
            "place": f"environments[{index}] ({environment.label})",
            "id": environment.id,
            "args": environment.args,
            "template_arguments": (environment.sampling or spec.sampling).chat_template_arguments,
            "here": environment.python is None and environment.image is None,
        }
        for index, environment in enumerate(spec.environments if spec.task == "RL" else ())
        if environment.id not in DATA_SETS
    ]
    args = loaded | {"environments": environments}
    yield CodeCheck(("model", "path"), Command(CHECK_TEMPLATE, args, kind="check"), TEMPLATE_LIMITS)


def check_data(data: DataConfig | None, *, here: bool, left_out: Collection[Key] = ()) -> Iterator[Finding]:
    """Yield findings about the data sets of supervised fine-tuning, including bad rows with file and line.

    Args:
        data: data of the run; None: the run is not fine-tuned on data.
        here: whether the run will run on this machine.
        left_out: fields that are not checked, including all fields below them.
    """
    if data is None:
        return
    sets: list[tuple[Key, DataSetConfig]] = [(("data", "sources", i), one) for i, one in enumerate(data.sources)]
    if data.validation is not None:
        sets.append((("data", "validation"), data.validation))
    deadline = time.monotonic() + READ_SECONDS
    for key, one in sets:
        path: Key = (*key, "path")
        if one.path is None or any(path[: len(other)] == other for other in left_out):
            continue
        if not Path(one.path).exists():
            yield _absent_path(path, one.path, "file or folder", here=here)
            continue
        yield from _check_rows(path, one, data, deadline, here=here)


def _absent_path(key: Key, path: str, what: str, *, here: bool) -> Finding:
    if not here and Path(path).is_absolute():
        return Finding(key, f"is not checked on this machine: it has no {what} {path}; the pods must have it", True)
    return Finding(key, f"no {what} {path} in {Path.cwd()}{_path_fix(key, path)}")


def _path_fix(key: Key, path: str) -> str:
    """Return the fix for a path that is written as an address or with a variable, or that is a repository of the hub, otherwise ""."""
    if key[-2:] == ("model", "path") and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path):
        return f"; write model: {{name: {path}}} for the repository of the hub"
    expanded = str(Path(os.path.expandvars(path.removeprefix("file://"))).expanduser())
    return f"; write path: {expanded}" if expanded != path else ""


def _config_problem(file: Path) -> str | None:
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        return f"{file} cannot be read: {getattr(error, 'strerror', None) or error}"
    if not isinstance(config, dict) or not (config.get("architectures") or config.get("model_type")):
        return f"{file} has neither architectures nor model_type; it must be the config.json of a Hugging Face model"
    return None


def _check_rows(key: Key, one: DataSetConfig, data: DataConfig, deadline: float, *, here: bool) -> Iterator[Finding]:
    from rlrun.environments.dataset_rows import Rows
    from rlrun.orchestrator.sft.chat_rows import read_conversation
    from rlrun.protocol.files.failures import RoleError

    field = "spec.data"
    try:
        rows = Rows(one, field)
    except RoleError as error:
        if isinstance(error.__cause__, ImportError) and not here:
            message = f"is not checked on this machine: {str(error).removeprefix(f'{field}: ')}"
            # `Rows` writes its message for a pod; here the package is missing on the user's machine.
            yield Finding(
                key, message.replace("which this image does not have", "which is not installed here"), notice=True
            )
            return
        yield Finding(key, str(error).removeprefix(f"{field}: ").removeprefix(f"{field}.path: "))
        return
    except OSError as error:
        yield Finding(key, f"{one.path} cannot be read: {error.strerror}")
        return
    if data.malformed == "Skip":
        return
    bad = unlearned = 0  # `unlearned`: rows without a message of a trained role
    for index in range(len(rows)):
        try:
            unlearned += not any(read_conversation(rows.row(index), data).weights)
        except ValueError as error:
            bad += 1
            # Errors while a row is read contain its place already; errors about its content do not.
            place = "" if str(error).startswith(rows.describe_place(index)) else f"{rows.describe_place(index)}: "
            yield Finding(key, f"{one.path}: {place}{error}; correct the row, or set data.malformed to Skip")
            # Error of Python's JSON reader for a line that does not start with a JSON value.
            if index == 0 and "Expecting value: line 1 column 1" in str(error):
                return  # the file has another format: all lines have the same problem
        if bad == MAX_BAD_ROWS or time.monotonic() > deadline:
            if index + 1 < len(rows):
                yield Finding(
                    key, f"{one.path}: rows after the first {index + 1} of {len(rows)} are not checked here", True
                )
            return
    yield from _unlearned_rows(key, one, data, unlearned, len(rows) - bad)


def _unlearned_rows(key: Key, one: DataSetConfig, data: DataConfig, count: int, rows: int) -> Iterator[Finding]:
    """Yield a finding about rows without a message of a trained role."""
    if not count:
        return
    roles = ", ".join(data.loss_roles)
    if count == rows:
        yield Finding(
            key,
            f"{one.path}: no row has a message of role {roles} (data.lossRoles), so there is nothing to learn; correct the rows",
        )
    else:
        yield Finding(
            key,
            f"{one.path}: {count} of {rows} rows have no message of role {roles}: they are not trained on",
            notice=True,
        )


def describe_inputs(config: RunConfig) -> Iterator[str]:
    """Yield the lines that a launcher prints about the model's folder and the data that a run reads from this machine, with their sizes."""
    model, data = config.trainer.model, config.orchestrator.data
    if model.path is not None:
        yield f"model {model.path}: {show_size(_path_bytes(Path(model.path)))}"
    if data is not None:
        sets = [*data.sources, *([data.validation] if data.validation is not None else [])]
        for path in dict.fromkeys(one.path for one in sets if one.path is not None):
            yield f"data {path}: {show_size(_path_bytes(Path(path)))}"


def _path_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder, in bytes; 0 if it cannot be read, which other checks report."""
    try:
        return sum(one.stat().st_size for one in (path.rglob("*") if path.is_dir() else (path,)) if one.is_file())
    except OSError:
        return 0
