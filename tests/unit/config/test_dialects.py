"""PRIME-RL names: table rows, odd values and PRIME-RL's own files."""

from __future__ import annotations

import re
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from rlrun.cli.role_commands import load_role
from rlrun.cli.run_layers import ALIASES, EvalConfig, RlConfig, SftConfig, file_layers, read_layer
from rlrun.config.dialects.completion import complete_layer
from rlrun.config.dialects.prime_rl import PRIME_RL, PRIME_RL_EVAL
from rlrun.config.dialects.rows import Dialect, Row
from rlrun.config.dialects.translate import Translator, key_of, shape_at
from rlrun.config.loading.examine import examine_layer, validate_layer
from rlrun.config.loading.files import toml_lines
from rlrun.config.loading.layers import merge_layers
from rlrun.config.loading.problems import ConfigError
from rlrun.config.loading.schema import NAMES_MAX
from rlrun.config.loading.yaml_text import Document
from rlrun.config.models.roles import OrchestratorConfig, TrainerConfig
from tools.docs_prime_rl import judge
from tools.prime_rl_files import files, nested

DIALECTS = (PRIME_RL, PRIME_RL_EVAL)
ROWS = list(dict.fromkeys(row for dialect in DIALECTS for row in dialect.rows))
NOT_FIELDS = {"package.module", "config.json", "metrics.jsonl", "run.json"}
FIELD = re.compile(r"\b[a-z][a-z_]*(?:\[\d*\])?(?:\.[a-z][a-z_0-9]*(?:\[\d*\])?)+")
ODD: tuple[Any, ...] = (
    None, "None", True, False, 0, -1, 1.5, 10**30, float("inf"), "", "x" * 500, "auto", [], [None], [{}], [[1]], {},
    {"id": {"id": 1}}, {"a": {"b": {"c": [1, {"d": 2}]}}}, {"type": 7}, [{"type": "repetition", "window": "x"}],
)  # fmt: skip


def test_dialect_paths_are_unique() -> None:
    for dialect in DIALECTS:
        paths = [row.path for row in dialect.rows]
        assert sorted({path for path in paths if paths.count(path) > 1}) == []


@pytest.mark.parametrize("dialect", DIALECTS, ids=["run", "eval"])
def test_dialect_rows_have_existing_targets_and_reasons(dialect: Dialect) -> None:
    for row in dialect.rows:
        for target in row.targets:
            assert shape_at(EvalConfig, key_of(target)) is not None, (row.path, target)
        assert row.targets or row.fate in ("ignored", "refused"), row.path
        assert row.text or row.fate in ("same", "mapped"), row.path


def test_dialect_texts_recommend_only_existing_other_fields() -> None:
    for row in ROWS:
        for name in FIELD.findall(row.text):
            if name in NOT_FIELDS or name.startswith("bench."):
                continue
            assert shape_at(EvalConfig, key_of(name)) is not None or PRIME_RL.find_row(name) is not None, (
                row.path,
                name,
            )
        if row.fate == "refused":
            assert row.path not in row.targets


def test_renamed_key_is_read_as_its_target() -> None:
    for row in ROWS:
        if row.fate != "same" or row.path == row.targets[0]:
            continue
        document = nested({row.path: {} if row.path.endswith("ckpt") else 1})
        whole = merge_layers(file_layers(Path("f.toml"), None, Document(document)))
        assert not whole.problems, row.path
        assert key_of(row.targets[0]) in whole.origins, row.path


def _translated(dialect: Dialect, row: Row, value: Any) -> None:
    path = row.path.replace("[]", "[0]").replace("*", "agent")
    translation = Translator(dialect, RlConfig, "f.toml", aliases=ALIASES).read(nested({path: value}))
    layer = translation.as_layer(RlConfig)
    complete_layer(layer)
    for problem in (*layer.problems, *layer.notices):
        assert problem.path, problem
        assert len(str(problem)) < 600, problem


@pytest.mark.parametrize("dialect", DIALECTS, ids=["run", "eval"])
def test_odd_value_of_any_key_raises_no_exception(dialect: Dialect) -> None:
    for row, value in zip(dialect.rows, cycle(ODD), strict=False):
        _translated(dialect, row, value)


@pytest.mark.full
@pytest.mark.parametrize("dialect", DIALECTS, ids=["run", "eval"])
def test_odd_values_of_all_keys_raise_no_exception(dialect: Dialect) -> None:
    for row, value in product(dialect.rows, ODD):
        _translated(dialect, row, value)


WHOLE = {
    "model.name": "a/b",
    "max_steps": 10,
    "trainer.scheduler.type": "linear",
    "orchestrator.env[0].id": "reverse-text",
}
"""Complete run."""
FREE = re.compile(r"(\.args|\.chat_template_arguments)$")
"""Fields of any type, which an environment or a template validates."""
ELSEWHERE = {
    "trainer.model.full_offload": "a table turns it on, and another rule refuses it without GPUs",
    "data.length": "read with --bench alone",
}


def test_mapping_for_scalar_is_refused_under_written_name() -> None:
    for row in ROWS:
        if row.fate != "mapped" or PRIME_RL.find_row(row.path) is not row or row.path in ELSEWHERE:
            continue
        path = row.path.replace("[]", "[0]").replace("*", "agent")
        layer = merge_layers(file_layers(Path("f.toml"), None, Document(nested(WHOLE | {path: {"a": [1]}}))))
        complete_layer(layer)
        found = examine_layer(RlConfig, layer).problems
        own = [problem for problem in found if problem.path == path or problem.path.startswith(f"{path}.")]
        free = any(FREE.search(target) for target in row.targets)
        assert bool(own) is not free, (path, [str(problem) for problem in found])
        assert not any("stand-in" in str(problem) for problem in found), found


@pytest.mark.parametrize("other", ["deployment.num_infer_nodes", "deployment.num_infer_gpus", "inference_gpu_ids"])
@pytest.mark.parametrize("value", ["eight", {"a": 1}, 0, 1.5], ids=str)
def test_invalid_gpus_per_node_is_refused_once(value: Any, other: str) -> None:
    written = {"inference.deployment.gpus_per_node": value, other: [0, 1] if other == "inference_gpu_ids" else 2}
    layer = merge_layers(file_layers(Path("f.toml"), None, Document(nested(WHOLE | written))))
    complete_layer(layer)
    found = [problem.message for problem in examine_layer(RlConfig, layer).problems if "gpus_per_node" in problem.path]
    assert len(found) == 1, found
    assert found[0].endswith("expected a whole number from 1 to 65536")


def test_nine_of_ten_files_of_january_start_unchanged(tmp_path: Path) -> None:
    started: dict[str, list[bool]] = {}
    for file in files():
        started.setdefault(file.era, []).append(not judge(file, tmp_path)[0])
    assert sum(started["2026-01"]) >= 0.9 * len(started["2026-01"])
    assert len(started["2026-01"]) >= 35
    assert all(started["2026-01"])
    assert sum(started["2026-08"]) >= 30, "the others are refused: models of images, router replay, other objectives"


def test_file_keys_have_rows_or_fields() -> None:
    for file in files():
        dialect = PRIME_RL_EVAL if file.command == "eval" else PRIME_RL
        role = file.command if file.command in ("trainer", "orchestrator", "inference") else ""
        model = EvalConfig if file.command == "eval" else RlConfig
        translation = Translator(dialect, model, file.path, aliases=ALIASES, fallback="trainer").read(
            file.document, role
        )
        unknown = [str(problem) for problem in translation.layer.problems if "unknown field" in problem.message]
        assert unknown == [], file.path
        for read in translation.reads:
            assert read.row is not None or shape_at(model, key_of(read.path)) is not None, (file.path, read.path)


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "f.toml") -> str:
        Path(name).write_text(text)
        return name

    return write


BASE = """max_steps = 10
[model]
name = "a/b"
[orchestrator]
batch_size = 32
rollouts_per_example = 4
seq_len = 512
[[orchestrator.env]]
id = "owner/words@1.2"
"""


def spec(*argv: str, env: dict[str, str] | None = None) -> RlConfig:
    return validate_layer(RlConfig, read_layer(argv, env or {}).layer)


def list_problems(*argv: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        spec(*argv, env=env)
    return str(error.value).splitlines()


def notices(*argv: str) -> list[str]:
    return [str(notice) for notice in read_layer(argv, {}).layer.notices]


def test_prime_rl_run_is_converted(toml: Any) -> None:
    run = spec("@", toml(BASE))
    [environment] = run.environments
    assert (environment.id, environment.group_size, run.seq_len) == ("verifiers:words", 4, 512)
    assert run.sampling.max_tokens == 511  # limited by the context length, as in PRIME-RL


def test_gpus_and_parallelism(toml: Any) -> None:
    gpus = "inference_gpu_ids = [0, 1, 2, 3]\ntrainer_gpu_ids = [4, 5]\n"
    run = spec("@", toml(gpus + BASE + "[inference.parallel]\ntp = 2\n"))
    engine = run.inference
    assert (engine.replicas, engine.tensor_parallel, engine.data_parallel, engine.gpus_per_replica) == (1, 2, 2, 4)
    assert run.trainer.gpus_per_replica == 2
    assert spec("@", "f.toml", "--trainer.gpus-per-replica", "1").trainer.gpus_per_replica == 1
    run = spec(
        "@", toml(BASE + "[deployment]\nnum_train_nodes = 2\nnum_infer_nodes = 4\n[inference.parallel]\ntp = 8\n")
    )
    assert (run.trainer.replicas, run.trainer.gpus_per_replica, run.inference.replicas) == (2, 8, 4)
    assert list_problems("@", toml(gpus + BASE + "[inference.parallel]\ntp = 3\n")) == [
        "f.toml:1: inference_gpu_ids: 4 GPUs cannot be divided into engines with tensor_parallel 3; change one of them"
    ]


def test_missing_model_gets_prime_rl_default_with_notice(toml: Any) -> None:
    text = BASE.replace('[model]\nname = "a/b"\n', "")
    assert spec("@", toml(text)).model.name == "Qwen/Qwen3-0.6B"
    assert "f.toml: model.name: not set: PRIME-RL's own default, Qwen/Qwen3-0.6B" in notices("@", "f.toml")
    assert spec("@", "f.toml", "--model.path", "m").model.path == "m"
    assert list_problems("@", toml("max_steps = 3\n[[environments]]\nid = 'x'\n"))[0].endswith("model: required, but not set: "
                                                                                       "Model that the run starts from")  # fmt: skip
    first, second = toml("max_steps = 1\n[model]\nname = 'a/b'\n", "1.toml"), toml("[optim]\nlr = 0.5\n", "2.toml")
    config, _ = load_role("trainer", TrainerConfig, ["@", first, "@", second, "--output-dir", "x"], {})
    assert (config.model.name, config.optimizer.lr) == ("a/b", 0.5)
    config, layer = load_role("trainer", TrainerConfig, ["@", second, "--output-dir", "x"], {})
    assert config.model.name == "Qwen/Qwen3-0.6B"
    assert any("PRIME-RL's own default" in notice.message for notice in layer.notices)


def evaluated(*argv: str) -> EvalConfig:
    return validate_layer(EvalConfig, read_layer(argv, {}, EvalConfig).layer)


def test_evaluation_is_configured_by_options_only() -> None:
    options = ("--model.name", "a/b", "--environment-ids", "math500,owner/aime2025@1")
    run = evaluated(
        *options, "--client.base-url", "http://a:8000/v1", "http://b:8000/v1", "--client.headers.X-Org", "o"
    )
    assert run.client is not None
    assert (run.client.base_url, run.client.headers) == (["http://a:8000/v1", "http://b:8000/v1"], {"X-Org": "o"})
    assert [one.id for one in run.environments] == ["verifiers:math500", "verifiers:aime2025"]
    run = evaluated(*options, "--weights-dir", "out/weights", "--steps", "10,20", "--no-eval-base")
    assert run.policies is not None
    assert (run.policies.from_run, run.policies.steps, run.policies.base) == ("out/weights", [10, 20], False)
    beside = evaluated(*options, "--weights-dir", "out/weights", "--steps", "10").policies
    assert beside is not None
    assert beside.base
    for more, expected in (
        (("--client.base-url", "api.example.com/v1"), "expected a URL such as"),
        (("--client.elastic.hostname", "x"), "write each server into client.base_url"),
        (("--no-eval-base",), "no policy would be evaluated"),
        (("--environment-ids", "3"), "expected ids of environments"),
    ):
        with pytest.raises(ConfigError, match=expected):
            evaluated(*options, *more)


def test_list_option_accepts_consecutive_values(toml: Any) -> None:
    lora = ("@", toml(BASE), "--trainer.model.lora.target-modules")
    for words in (("q_proj", "k_proj"), ('["q_proj", "k_proj"]',)):
        found = spec(*lora, *words, "--max-steps", "3").trainer.lora
        assert found is not None
        assert found.targets == ["q_proj", "k_proj"]
    stop = spec("@", "f.toml", "--evaluation.sampling.stop", "a", "b").evaluation
    assert stop is not None
    assert stop.sampling is not None
    assert stop.sampling.stop == ["a", "b"]


def test_teacher_defaults_to_initial_model(toml: Any) -> None:
    weighted = BASE + "[trainer.loss]\nteacher_tau = 0.5\n"
    own = spec("@", toml(weighted)).algorithm
    assert own.reference is not None
    assert own.reference.model == "initial"
    named = spec("@", toml(weighted + "[teacher_inference.model]\nname = 'org/teacher'\n")).algorithm
    assert named.reference is not None
    assert named.reference.model == "org/teacher"


def test_multi_node_engines_and_environment_algorithm_are_converted(toml: Any) -> None:
    nodes = "[inference.deployment]\ntype = 'multi_node'\nnum_nodes = 2\n[inference.vllm]\ntensor_parallel_size = 2\n"
    run = spec("@", toml(BASE + "algorithms = [{id = 'rl'}]\n" + nodes))
    assert (run.inference.replicas, run.inference.gpus_per_replica, run.inference.tensor_parallel) == (2, 2, 2)
    advantage = run.environments[0].algorithm.advantage
    assert advantage is not None
    assert advantage.name == "reward"
    (problem,) = list_problems("@", toml(BASE + nodes + "enable_expert_parallel = true\n"))
    assert "an engine runs on one node; remove enable_expert_parallel, or write 1" in problem


def test_orchestrator_without_environment_gets_prime_rl_default(toml: Any) -> None:
    config, layer = load_role("orchestrator", OrchestratorConfig, ["@", toml("sampling.max_tokens = 16\n")], {})
    assert [one.id for one in config.environments] == ["verifiers:reverse-text"]
    assert any(notice.path == "environments" for notice in layer.notices)


def test_subsets_are_sources(toml: Any) -> None:
    sft = "[model]\nname = 'a/b'\n[data]\nname = 'o/d'\nsubsets = ['x', 'y']\n"
    data = validate_layer(SftConfig, read_layer(["@", toml(sft)], {}, SftConfig).layer).data
    assert data is not None
    assert [(one.name, one.split) for one in data.sources] == [("o/d", "x"), ("o/d", "y")]
    with pytest.raises(ConfigError, match="subsets: cannot be combined with splits"):
        validate_layer(SftConfig, read_layer(["@", toml(sft + "splits = ['a', 'b']\n")], {}, SftConfig).layer)


def test_dependent_values_are_converted_together(toml: Any) -> None:
    run = spec("@", toml(BASE + "[trainer.optim]\nlr = 1e-4\n[trainer.scheduler]\ntype = 'cosine'\nmin_lr = 1e-5\n"))
    assert run.trainer.scheduler.min_lr_ratio == pytest.approx(0.1)
    assert list_problems("@", "f.toml", "--trainer.scheduler.decay-steps", "3")[0].startswith(
        "command line: --trainer.scheduler.decay-steps: got 3; a schedule decays from the end of the warm-up to max_steps (10): write 10"
    )
    run = spec("@", toml(BASE + "[trainer.model]\nseq_len = 1024\n"))
    assert (run.seq_len, run.trainer.micro_batch_tokens) == (512, 1024)
    run = spec("@", toml(BASE + "[trainer.loss]\nratio_type = 'sequence'\nkl_tau = 0.5\n"))
    assert run.algorithm.loss is not None
    assert (run.algorithm.loss.name, run.algorithm.loss.options) == ("masked_is", {"ratio": "sequence", "kl_tau": 0.5})
    run = spec("@", toml(BASE + "[orchestrator.sampling]\nmax_tokens = 512\n"))
    assert run.sampling.max_tokens == 511
    assert (
        "f.toml:11: orchestrator.sampling.max_tokens: got 512, lowered to 511: seq_len (512) also includes the prompt"
        in notices("@", "f.toml")
    )


def test_buffer_validation_and_evaluation(toml: Any) -> None:
    text = BASE + "[orchestrator.buffer]\neasy_threshold = 1.0\nonline_difficulty_filtering = true\n"
    run = spec("@", toml(text + "[orchestrator.val]\ninterval = 5\nnum_examples = -1\n"))
    curriculum, filters = run.environments[0].curriculum, run.algorithm.filters
    assert curriculum is not None
    assert curriculum.easy is not None
    assert filters is not None
    assert run.evaluation is not None
    assert (curriculum.easy.threshold, curriculum.easy.train, filters.zero_variance) == (1.0, False, True)
    assert (run.evaluation.interval, run.evaluation.num_tasks) == (5, 1_000_000)
    eval_of = '[orchestrator.eval]\ninterval = 3\n[[orchestrator.eval.env]]\nid = "{}"\nrollouts_per_example = 6\n'
    run = spec("@", toml(BASE + eval_of.format("words")))
    assert run.evaluation is not None
    assert (run.evaluation.interval, run.evaluation.samples_per_task) == (3, 6)
    assert spec("@", toml(BASE + eval_of.format("aime"))).evaluation is None
    assert any("not evaluated during the run: aime" in notice for notice in notices("@", "f.toml"))


def test_tracker_of_any_role_applies_to_run(toml: Any) -> None:
    file = toml(
        BASE.replace(
            "[orchestrator]", "[orchestrator.wandb.log_extras]\ninterval = 7\nsamples = false\n[orchestrator]", 1
        )
        + "\n[wandb]\nproject = 'p'\nname = 'n'\n[trainer.wandb]\nname = 'of-the-trainer'\noffline = true\n"
    )
    found = spec("@", file).tracking
    assert found is not None
    assert found.wandb is not None
    assert (found.wandb.project, found.wandb.name, found.wandb.offline) == ("p", "n", True)
    assert (found.samples.interval, found.samples.count) == (7, 0)
    empty = spec("@", toml(BASE + "\n[wandb]\n")).tracking
    assert empty is not None
    assert empty.trackers == ["wandb"], "the table alone is the switch"


def test_supervised_run_has_their_weight_decay(toml: Any) -> None:
    text = "max_steps = 5\n[model]\nname = 'a/b'\n[data]\nname = 'a/d'\n[optim]\nlr = 1e-5\n"
    for more, decay in (("", 0.01), ("weight_decay = 0.2\n", 0.2)):
        layer = read_layer(["@", toml(text + more)], {}, SftConfig).layer
        assert validate_layer(SftConfig, layer).trainer.optimizer.weight_decay == decay
        assert any("weight_decay 0.01" in str(notice) for notice in layer.notices) == (not more)


def test_renderer_settings_become_template_arguments_or_are_reported(toml: Any) -> None:
    kept = "[orchestrator.renderer]\nname = 'glm-5'\nenable_thinking = false\nclear_thinking = false\n"
    found = spec("@", toml(BASE + kept))
    assert found.sampling.chat_template_arguments == {"enable_thinking": False, "clear_thinking": False}
    assert not any("renderer" in notice and "ignored: " not in notice for notice in notices("@", "f.toml"))
    for name, value in (("thinking_retention", "all"), ("reasoning_parser", "think"), ("tool_parser", "qwen3")):
        toml(BASE + f"[orchestrator.renderer]\nname = 'default'\n{name} = '{value}'\n")
        (told,) = [notice for notice in notices("@", "f.toml") if f"renderer.{name}" in notice]
        assert f"got '{value}'" in told
        assert "ignored: " not in told
        assert spec("@", "f.toml").sampling.chat_template_arguments == {}
    supervised = "[model]\nname = 'a/b'\n[data]\nname = 'a/d'\n[renderer]\nname = 'qwen3'\nenable_thinking = false\n"
    path = toml(supervised, "s.toml")
    layer = read_layer(["@", path], {}, SftConfig).layer
    assert any("supervised rows are tokenized" in str(notice) for notice in layer.notices)


def test_sampling_options_are_converted_or_refused_for_training(toml: Any) -> None:
    sampling = "[orchestrator.sampling]\ntop_k = -1\nseed = 3\nextra_body = {chat_template_kwargs = {enable_thinking = false}}\n"
    evaluation = (
        "[orchestrator.eval]\n[[orchestrator.eval.env]]\nid = 'words'\n[orchestrator.eval.sampling]\ntop_p = 0.9\n"
    )
    found = spec("@", toml(BASE + sampling + evaluation))
    assert (found.sampling.top_k, found.sampling.seed) == (0, 3)
    assert found.sampling.chat_template_arguments == {"enable_thinking": False}
    assert found.evaluation is not None
    assert found.evaluation.sampling is not None
    assert found.evaluation.sampling.top_p == 0.9
    (message,) = list_problems("@", toml(BASE + "[orchestrator.sampling]\nextra_body = {top_k = 20}\n"))
    assert "not supported in training" in message


def test_command_line_accepts_prime_rl_names(toml: Any) -> None:
    file = toml(BASE)
    run = spec(
        "@", file, "--trainer.optim.lr", "1e-4", "--trainer.model.ac", "--ckpt.keep", "5", "--wandb.project", "7"
    )
    assert (run.trainer.optimizer.lr, run.trainer.activation_checkpointing) == (1e-4, "full")
    assert run.checkpoint.keep_last == 5
    assert spec("@", file, "--model.name", "123").model.name == "123"
    assert spec("@", file, env={"PRIME_TRAINER__OPTIM__LR": "0.5"}).trainer.optimizer.lr == 0.5
    given = read_layer(["@", file, "--ckpt.resume-step", "-1", "--no-trainer.model.compile"], {})
    assert given.layer.hints["resume"].value is True
    assert list_problems("@", file, "--trainer.optim.type", "lion") == [
        "command line: --trainer.optim.type: got 'lion'; not supported here; known: adamw, muon, sgd"
    ]


def test_unknown_key_error_lists_few_known_keys(toml: Any) -> None:
    [problem] = list_problems("@", toml(BASE + "[trainer.optim]\nlearning = 1\n"))
    assert problem.startswith("f.toml:11: trainer.optim.learning: unknown field; known: betas1, ")
    assert len(problem.partition("known: ")[2].split(", ")) <= NAMES_MAX
    assert list_problems("@", toml(BASE + "retio = 1\n")) == [
        "f.toml:10: orchestrator.env[0].retio: unknown field (did you mean ratio?)"
    ]
    assert list_problems("@", toml(BASE + "[trainer.optim]\nweigth_decay = 1\n")) == [
        "f.toml:11: trainer.optim.weigth_decay: unknown field (did you mean weight_decay?)"
    ]


def test_container_variables_are_distinguished_from_environments(toml: Any) -> None:
    own = BASE.replace("[[orchestrator.env]]", "[[environments]]").replace("owner/words@1.2", "x")
    run = spec("@", toml(own + '[[orchestrator.env]]\nname = "A"\nvalue = "1"\n'))
    assert [one.name for one in run.orchestrator.env] == ["A"]
    run = spec("@", toml(own + '[[orchestrator.env]]\nname = "A"\n[[orchestrator.env]]\nname = "B"\nvalue = "1"\n'))
    assert [(one.name, one.value) for one in run.orchestrator.env] == [("A", None), ("B", "1")]


def test_ambiguous_env_entry_error_names_both_requirements(toml: Any) -> None:
    needs = "an environment needs id or taskset, and a variable of the process needs value or valueFrom"
    above = BASE[: BASE.index("[[orchestrator.env]]")]
    line = above.count("\n") + 1
    assert list_problems("@", toml(above + '[[orchestrator.env]]\nname = "math"\n')) == [
        f"f.toml:{line}: orchestrator.env[0]: got only name = 'math': {needs}"
    ]
    assert list_problems("@", toml(above + "[[orchestrator.env]]\n")) == [
        f"f.toml:{line}: orchestrator.env[0]: got an empty table: {needs}"
    ]
    assert list_problems("@", toml(above), "--orchestrator.env", '[{"name": "math"}]') == [
        f"command line: --orchestrator.env[0]: got only name = 'math': {needs}"
    ]


def test_later_files_win_and_roles_of_one_level_agree(toml: Any) -> None:
    file = toml(BASE)
    over = toml("max_steps = 20\n[orchestrator]\nseq_len = 256\n", "over.toml")
    assert (spec("@", file, "@", over).max_steps, spec("@", file, "@", over).seq_len) == (20, 256)
    assert spec("@", over, "@", file).max_steps == 10
    trainer = toml("max_steps = 30\n[optim]\nlr = 1.0\n", "t.toml")
    run = spec("@", file, "--trainer", "@", trainer)
    assert (run.max_steps, run.trainer.optimizer.lr) == (30, 1.0)
    assert spec("--trainer", "@", trainer, "@", file).max_steps == 10
    role = toml("max_steps = 31\n", "o.toml")
    assert list_problems("@", file, "--trainer", "@", trainer, "--orchestrator", "@", role) == [
        "o.toml:1: max_steps: got 31, but t.toml:1 sets max_steps to 30; the roles share it, remove one"
    ]
    assert spec("@", file, "--max-steps", "5", env={"RLRUN_MAX_STEPS": "6", "RLRUN_SEED": "7"}).max_steps == 5


def test_manifest_is_accepted_as_file(toml: Any) -> None:
    toml("kind: RLRun\napiVersion: rlrun.io/v1alpha1\nmetadata: {name: words}\nspec:\n  model: {path: m}\n  maxSteps: 4\n"
         "  environments: [{id: x}]\n", "run.yaml")  # fmt: skip
    run = spec("@", "run.yaml", "--trainer.optim.lr", "0.25")
    assert (run.name, run.max_steps, run.trainer.optimizer.lr) == ("words", 4, 0.25)
    toml("kind: RLRun\nspec:\n  maxStep: 4\n", "bad.yaml")
    assert "bad.yaml:3: spec.maxStep: unknown field (did you mean maxSteps?)" in list_problems("@", "bad.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a = 1\n[b]\nc = 2\n[[d.e]]\nf = 3\n[[d.e]]\nf = 4\n',
         {("a",): 1, ("b",): 2, ("b", "c"): 3, ("d", "e"): 4, ("d", "e", 0, "f"): 5, ("d", "e", 1): 6, ("d", "e", 1, "f"): 7}),
        ('a = [\n  1,\n  2,\n]\nb = """\n[c]\nd = 1\n"""\ne = 1\n', {("a", 1): 1, ("b",): 5, ("e",): 9}),
        ('x.y = {z = [{w = 1}]}\n"quo.ted" = 1\n', {("x",): 1, ("x", "y", "z", 0, "w"): 1, ("quo.ted",): 2}),
        ('[[a]]\n[a.b]\nc = 1\n[[a]]\nb.c = 2 # comment\n', {("a", 0, "b", "c"): 3, ("a", 1, "b", "c"): 5}),
    ],
)  # fmt: skip
def test_lines_of_toml(text: str, expected: dict[Any, int]) -> None:
    found = toml_lines(text)
    assert {key: found.get(key) for key in expected} == expected
    assert ("c",) not in found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.optim."], "--trainer.optim.: unknown option"),
        (["--."], "--.: unknown option; known: active-deadline-seconds"),
        (["--trainer..lr", "1"], "--trainer..lr: unknown option; known: activation-checkpointing"),
        (["--orchestrator.env.99999999999.id", "x"], "item 99999999999 does not exist; the next index is 1"),
        (["--orchestrator.env.5.id", "x"], "item 5 does not exist; the next index is 1"),
        (["--orchestrator.env", "[1]"], "--orchestrator.env[0]: got 1 (a number), expected a mapping"),
        (["--orchestrator.env", "{"], "--orchestrator.env: got '{', expected JSON: Expecting property name"),
        (["--wandb"], "--wandb: got true, expected a mapping, or null"),
        (["--wandb.name"], "--wandb.name: needs a value"),
        (["--no-trainer.optim.lr"], "--no-trainer.optim.lr: needs a value"),
        (["--trainer.optim", "[[[["], "--trainer.optim: unknown option (did you mean --trainer.optimizer?)"),
        (["--ckpt", "1"], "--ckpt: got 1 (a number), expected a mapping"),
        (["--model", "7"], "--model: got 7 (a number), expected a mapping"),
        (["--data.type", "9" * 4000], f"--data.type: got {'9' * 60}, expected sft or fake"),
        (["--orchestrator.sampling.max-tokens", "1e400"], 'got "1e400" (a string), expected a whole number from 1 to'),
        (["--inference-gpu-ids", "a,b"], "--inference-gpu-ids: got 'a,b', expected indices of GPUs, such as [0, 1]"),
        (["--deployment.num-nodes", "-1"], "--deployment.num-nodes: got -1, expected a whole number from 1 to 65536"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_odd_words_end_in_one_message(toml: Any, words: list[str], message: str) -> None:
    layer = read_layer(["@", toml(BASE), *words], {}).layer
    (problem,) = examine_layer(RlConfig, layer).problems
    assert str(problem).startswith("command line: --"), problem
    assert message in str(problem)


def test_invalid_list_items_are_reported_without_replaced_values(toml: Any) -> None:
    layer = read_layer(["@", toml(BASE), "--orchestrator.env", "[1, 2]"], {}).layer
    found = [str(problem) for problem in examine_layer(RlConfig, layer).problems]
    assert found == [
        f"command line: --orchestrator.env[{i}]: got {i + 1} (a number), expected a mapping" for i in (0, 1)
    ]


def test_no_option_resets_value_to_null(toml: Any) -> None:
    named = ["@", toml(BASE), "--wandb.name", "mine"]
    """A PRIME-RL string field is then unset instead of the word `false`."""
    values = [
        examine_layer(RlConfig, read_layer(words, {}).layer).result for words in (named, [*named, "--no-wandb.name"])
    ]
    assert [value.tracking.wandb.name for value in values if value] == ["mine", None]


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("[trainer.optimizer]\nlr = 1.0\n", ["--trainer", "@", "f.toml"], "f.toml:1: trainer: this table is read by the trainer; write"),
        ("max_stps = 1\n", ["--trainer", "@", "f.toml"], "f.toml:1: max_stps: unknown field (did you mean max_steps?)"),
        ("[orchestrator]\nbuffer = 5\n", ["@", "f.toml"], "f.toml:2: orchestrator.buffer: got 5, expected a table"),
        ("orchestrator.train.env = 5\n", ["@", "f.toml"], "f.toml:1: orchestrator.train.env: got 5, expected a list of tables"),
        ("orchestrator.train.env = [5]\n", ["@", "f.toml"], "f.toml:1: orchestrator.train.env[0]: got 5, expected a table"),
        ("[trainer.optim]\nlr = 'x'\n", ["@", "f.toml"], 'f.toml:2: trainer.optim.lr: got "x" (a string), expected a number'),
        ("[data]\nname = 'a/b'\n[[data.sources]]\nname = 'c/d'\n", ["@", "f.toml"], "the roles share it, remove one"),
    ],
)  # fmt: skip
def test_mistake_is_reported_with_place_and_without_useless_hint(
    toml: Any, text: str, argv: list[str], message: str
) -> None:
    toml(text)
    layer = read_layer(argv, {}).layer
    found = [str(problem) for problem in examine_layer(RlConfig, layer).problems]
    assert any(message in line for line in found), found


def test_role_value_applies_to_run_if_unset_elsewhere(toml: Any) -> None:
    toml("output_dir = 'outputs'\n", "t.toml")
    toml("output_dir = 'outputs/run_default'\nseq_len = 64\n", "o.toml")
    words = ["--trainer", "@", "t.toml", "--orchestrator", "@", "o.toml", "--inference.seed", "5", "@", toml(BASE)]
    run = spec(*words)
    assert (run.output_dir, run.seed) == ("outputs", 5)
    assert "o.toml:1: output_dir: ignored: all roles of a run use one folder, outputs" in notices(*words)
    assert spec(*words, "--output-dir", "here", "--seed", "6").output_dir == "here"


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("[[orchestrator.env]]\nrollouts_per_example = 4\n", "f.toml:1: orchestrator.env[0]"),
        ("[[orchestrator.env]]\nargs = {a = 1}\n", "f.toml:1: orchestrator.env[0]"),
        ("[[orchestrator.env]]\nmax_retries = 2\n[[orchestrator.env]]\nid = 'x'\n", "f.toml:1: orchestrator.env[0]"),
        ("[[orchestrator.env]]\nid = 'x'\n[[orchestrator.env]]\nmax_retries = 2\n", "f.toml:3: orchestrator.env[1]"),
        ("[[orchestrator.train.env]]\nsampling = {temperature = 1.0}\n", "f.toml:1: orchestrator.train.env[0]"),
        ("[[orchestrator.train.source]]\ngroup_size = 4\n", "f.toml:1: orchestrator.train.source[0]"),
    ],
)
def test_missing_environment_id_is_reported_with_place(written: str, place: str, toml: Any) -> None:
    assert [line.partition(".id: required")[0] for line in list_problems("@", toml(written))] == [place]


@pytest.mark.parametrize(
    ("words", "variables", "place"),
    [
        (("--orchestrator.env.0.rollouts-per-example", "4"), {}, "command line: --orchestrator.env.0.id"),
        (("--orchestrator.env", '[{"rollouts_per_example": 4}]'), {}, "command line: --orchestrator.env[0].id"),
        (("--trainer", "@", "t.toml", "--orchestrator", "@", "o.toml"), {}, "o.toml:1: env[0].id"),
        (
            (), {"PRIME_ORCHESTRATOR__ENV__0__ROLLOUTS_PER_EXAMPLE": "4"},
            "environment: PRIME_ORCHESTRATOR__ENV__0__ID",
        ),
    ],
)  # fmt: skip
def test_missing_environment_id_is_reported_for_other_sources(
    words: tuple[str, ...], variables: dict[str, str], place: str, toml: Any
) -> None:
    toml("[optim]\nlr = 1e-6\n", "t.toml")
    toml("[[env]]\nrollouts_per_example = 4\n", "o.toml")
    assert [line.partition(": required")[0] for line in list_problems(*words, env=variables)] == [place]


def test_missing_environment_id_of_evaluation_is_reported(toml: Any) -> None:
    layer = read_layer(["@", toml("[[env]]\nnum_examples = 4\n")], {}, EvalConfig).layer
    assert [str(one).partition(": required")[0] for one in examine_layer(EvalConfig, layer).problems] == [
        "f.toml:1: env[0].id"
    ]
