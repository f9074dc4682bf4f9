"""Parts of the stubs: script, model and policy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from stub_run import IMPORT_PATH, StubRun

from rlrun.config.models.language_models import TinyModelConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.run_objective import Update
from tests.support.programs import run_program
from tests.support.stub.engine import StubEngine
from tests.support.stub.metrics import step_metrics
from tests.support.stub.model import make_model
from tests.support.stub.policy import WEIGHTS, Policy, read_policy, small_files, write_model, write_policy
from tests.support.stub.script import VARIABLE, PolicyScript, Script, claim, load_script

MESSAGES = [
    {"role": "system", "content": "Reverse it."},
    {"role": "user", "content": "<ab cd> 12\n~"},
    {"role": "assistant", "content": "dcba"},
    {"role": "user", "content": "<xyz>"},
]


def test_script_is_read_and_environment_has_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert load_script(tmp_path).trainer.faults == []
    (tmp_path / "stub.json").write_text('{"trainer": {"stepSeconds": 3}}')
    assert load_script(tmp_path).trainer.step_seconds == 3
    monkeypatch.setenv(VARIABLE, '{"trainer": {"step_seconds": 4}}')
    assert load_script(tmp_path).trainer.step_seconds == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"trainer": {"faults": [{"step": 3, "action": "exlode"}]}}', 'trainer.faults[0].action is "exlode"'),
        ('{"trainer": {"faults": [{"action": "exit"}]}}', "trainer.faults[0].step"),
        ('{"trainer": {"faults": [{"step": 4, "action": "disk_full", "pod": 1}]}}', "disk_full needs pod 0"),
        ('{"trainer": {"faults": [{"step": 4, "action": "wait"}]}}', "needs file; got wait with file None"),
        ('{"trainer": {"stepSecond": 1}}', "trainer.stepSecond is 1"),
        ('{"inference": {"tokenSeconds": -1}}', "inference.tokenSeconds is -1"),
        ("{", "is not JSON"),
        ("[]", "the script is []"),
    ],
)
def test_invalid_script_is_refused_with_field_and_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(RoleError) as caught:
        load_script(tmp_path)
    assert caught.value.code == exit_codes.CONFIGURATION
    assert str(caught.value).startswith(f"{VARIABLE}")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_engine_fault_happens_as_often_as_scripted(tmp_path: Path) -> None:
    assert [claim(tmp_path, 0, 2) for _ in range(4)] == [True, True, False, False]
    assert claim(tmp_path, 1, 1)


def test_stub_tokenizer_equals_tiny_model_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from rlrun.trainer.modeling.tiny_model import make_tokenizer

    make_model(tmp_path / "model", TinyModelConfig(), PolicyScript())
    ours, theirs = AutoTokenizer.from_pretrained(str(tmp_path / "model")), make_tokenizer()
    text = ours.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = ours(text, add_special_tokens=False).input_ids
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    for name in ("all_special_ids", "eos_token_id", "pad_token_id", "bos_token_id", "unk_token_id", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_policy_approaches_last_accuracy_and_refuses_real_weights(tmp_path: Path) -> None:
    script = PolicyScript(first=0.3, last=0.9, half_life_steps=5)
    policy = Policy(0, script.first)
    for _ in range(5):
        policy = policy.trained(script)
    assert policy.step == 5
    assert policy.accuracy == pytest.approx(0.6, abs=1e-5)
    write_policy(tmp_path / WEIGHTS, policy)
    assert read_policy(tmp_path / WEIGHTS) == policy
    with pytest.raises(RoleError, match=r"model\.tiny"):
        read_policy(tmp_path / "model.safetensors")


def test_stub_metrics_have_names_of_real_trainer(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlrun.algorithms import Mixture, Objective
    from rlrun.trainer.learning.optimizers import make_optimizer
    from rlrun.trainer.learning.train_step import train_step
    from rlrun.trainer.modeling import packed_attention
    from rlrun.trainer.ranks.group import Group

    class Alone(Group):
        """A group of one rank, without collectives."""

        def sum_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
            return dict(values)

        max_over_ranks = sum_over_ranks

    packed_attention.register_attention()
    shape = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM._from_config(LlamaConfig(**shape, **heads), attn_implementation=packed_attention.NAME)
    batch = _make_batch()
    group = Alone(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
    real = train_step(
        model,
        make_optimizer(model, OptimizerConfig(), group.device),
        Update(batch, [(0,)]),
        group=group,
        loss=Mixture(Objective("aipo")),
        lr=1e-3,
        max_grad_norm=1.0,
    )
    real.pop("skipped")
    of_the_loop = {"skipped_steps", "param_checksum", "perf/throughput"}
    times = {
        f"time/{name}": 1.0 for name in ("forward_backward", "wait_for_batch", "broadcast_weights", "save_ckpt", "step")
    }
    ours = step_metrics(StubRun(tmp_path).config.trainer, batch, Policy(1, 0.5), times)
    # A loss may report more metrics of its own; no reader uses them.
    assert set(real) | of_the_loop | set(times) >= set(ours)
    assert {"loss", "grad_norm", "lr", "entropy", "mismatch_kl", "tokens", "loss_tokens"} <= set(ours) & set(real)
    assert all(np.isfinite(value) for value in ours.values())


def _make_batch() -> Batch:
    mask = np.array([False, False, True, True])
    sample = Sample(
        input_ids=np.array([1, 2, 3, 4], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, 0.5, 0).astype(np.float32),
        temperature=1.0,
        environment="reverse-text",
        task_id="0",
        group=0,
        rollout=0,
        dispatch_version=0,
        reward=1.0,
    )
    return Batch(1, 1, (sample,))


def test_stubs_are_small_and_import_no_model_library() -> None:
    """All modules in one process, so each single stub is smaller."""
    modules = ", ".join(f"tests.support.stub.{role}" for role in ("trainer", "inference", "model", "loop"))
    program = (
        f"import sys, {modules}; "
        "print({'torch', 'vllm', 'transformers', 'verifiers'} & {name for name, m in sys.modules.items() if m}); "
        "print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])"
    )
    environment = {"PYTHONPATH": IMPORT_PATH, "PATH": "/usr/bin:/bin"}
    done = run_program([sys.executable, "-c", program], env=environment, check=True)
    imported, kib = done.stdout.split("\n")[:2]
    assert imported == "set()"
    assert int(kib) < 80 * 1024


async def test_slow_engine_is_slow_and_broken_one_fails(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TinyModelConfig(), PolicyScript())
    faults = [
        {"version": 1, "action": "slow", "seconds": 3600},
        {"version": 2, "action": "answer_500", "seconds": 3600},
    ]
    script = Script.model_validate({"inference": {"tokenSeconds": 0.5, "faults": faults}}).inference
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    engine = StubEngine(tmp_path / "model", seed=1, script=script, run_folder=tmp_path / "run", sleep=sleep)
    for version in (0, 1, 2):
        write_model(tmp_path / f"v{version}", Policy(version, 0.5), small_files(tmp_path / "model"), complete=True)

    async def take(version: int) -> set[float]:
        await engine.collective_rpc("load_version", kwargs={"weights_path": str(tmp_path / f"v{version}")})
        slept.clear()
        await engine.generate([5, 6], n=1, max_tokens=2, stop=[], ignore_eos=False, seed=None)
        return set(slept)

    assert await take(0) == {0.5}
    assert await take(1) == {5.0}
    with pytest.raises(RuntimeError, match="script"):
        await take(2)


async def test_equal_seeds_give_equal_replies(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TinyModelConfig(), PolicyScript())
    script = Script.model_validate({"inference": {"tokenSeconds": 0}}).inference
    engine = StubEngine(tmp_path / "model", seed=1, script=script, run_folder=tmp_path / "run")
    write_model(tmp_path / "v0", Policy(0, 0.1), small_files(tmp_path / "model"), complete=True)
    await engine.collective_rpc("load_version", kwargs={"weights_path": str(tmp_path / "v0")})

    async def draw(seed: int, n: int = 1) -> list[list[int]]:
        choices = await engine.generate([5, 6], n=n, max_tokens=16, stop=[], ignore_eos=True, seed=seed)
        return [[sampled.token for sampled in choice.tokens] for choice in choices]

    (first,), (again,) = await draw(7), await draw(7)
    assert first == again
    assert await draw(6, n=2) == [*await draw(6), first]
    assert len({tuple(tokens) for tokens in await draw(7, n=4)}) > 1
