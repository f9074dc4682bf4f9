"""Arguments, environment and settings of engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.schema import walk_model
from rlrun.config.models.engine_arguments import OWNED_FLAGS, OWNED_SHORT, owned_flag
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.roles import InferenceConfig
from rlrun.inference.__main__ import main
from rlrun.inference.engine_settings import (
    InferenceSettings,
    SettingsError,
    default_vllm_environment,
    settings_from_config,
    settings_from_file,
    settings_from_mapping,
    vllm_arguments,
    vllm_environment,
    with_local_model,
)


def settings(**overrides: Any) -> InferenceSettings:
    values: dict[str, Any] = {
        "model_path": "org/model",
        "served_model_name": "policy",
        "weights_dir": "/run/weights",
        "api_key": "0123456789",
    }
    return settings_from_mapping(values | overrides)


def test_cpu_arguments() -> None:
    assert vllm_arguments(settings(dtype="bfloat16", max_model_len=256, enforce_eager=True)) == [
        "--model=org/model",
        "--served-model-name=policy",
        "--host=127.0.0.1",
        "--port=8000",
        "--dtype=bfloat16",
        "--seed=0",
        "--max-num-seqs=256",
        "--tensor-parallel-size=1",
        "--data-parallel-size=1",
        "--enable-scale-out",
        "--logprobs-mode=processed_logprobs",
        "--enable-prefix-caching",
        "--load-format=safetensors",
        "--worker-extension-cls=rlrun.inference.weights.loading.Loading",
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level=warning",
        "--max-model-len=256",
        "--enforce-eager",
    ]


def test_state_of_a_hybrid_model_is_float32_unless_extra_args_set_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    model = ModelConfig(path=str(tmp_path))
    config = InferenceConfig(
        name="run", uid="u", output_dir=str(tmp_path), model=model, max_steps=1, seq_len=64, seed=0
    )
    own = vllm_arguments(settings_from_config(config, api_key="0123456789"))
    assert own.count("--mamba-ssm-cache-dtype=float32") == 1
    given = "--mamba-ssm-cache-dtype=bfloat16"
    changed = config.model_copy(update={"extra_args": [given]})
    arguments = vllm_arguments(settings_from_config(changed, api_key="0123456789"))
    assert arguments[-1] == given, "the last value of a flag counts"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    arguments = vllm_arguments(settings_from_config(config, api_key="0123456789"))
    assert not [one for one in arguments if "mamba" in one]


def test_linear_attention_needs_bfloat16_on_cpu(tmp_path: Path) -> None:
    model = {"model_type": "qwen3_5", "text_config": {"linear_num_value_heads": 4}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = InferenceConfig(
        name="run",
        uid="u",
        output_dir=str(tmp_path),
        model=ModelConfig(path=str(tmp_path), dtype="float32"),
        max_steps=1,
        seq_len=64,
        seed=0,
    )
    with pytest.raises(SettingsError, match=r"model\.dtype: 'float32' .* use 'bfloat16'"):
        settings_from_config(config, api_key="0123456789")
    settings_from_config(config.model_copy(update={"gpus_per_replica": 1}), api_key="0123456789")
    rounded = config.model.model_copy(update={"dtype": "bfloat16"})
    settings_from_config(config.model_copy(update={"model": rounded}), api_key="0123456789")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    settings_from_config(config, api_key="0123456789")


def test_engines_of_a_run_that_replays_experts_return_them(tmp_path: Path) -> None:
    flag = "--enable-return-routed-experts"
    config = InferenceConfig(
        name="run",
        uid="u",
        output_dir=str(tmp_path),
        model=ModelConfig(path=str(tmp_path)),
        max_steps=1,
        seq_len=64,
        seed=0,
        gpus_per_replica=1,
        return_routes=True,
    )
    assert flag in vllm_arguments(settings_from_config(config, api_key="0123456789"))
    changed = config.model_copy(update={"return_routes": False})
    assert flag not in vllm_arguments(settings_from_config(changed, api_key="0123456789"))


def test_cuda_arguments() -> None:
    arguments = vllm_arguments(
        settings(device="cuda", tensor_parallel=2, data_parallel=4, gpu_memory_utilization=0.5, extra_args=["--x=1"])
    )
    assert {"--tensor-parallel-size=2", "--data-parallel-size=4", "--gpu-memory-utilization=0.5"} < set(arguments)
    assert arguments[-1] == "--x=1"
    assert "--enforce-eager" not in arguments


def test_api_key_is_absent_from_arguments_environment_and_repr() -> None:
    secret = settings(api_key="a-secret-key")
    assert "a-secret" not in " ".join([*vllm_arguments(secret), *vllm_environment(secret).values(), repr(secret)])


def test_environment(tmp_path: Path) -> None:
    assert vllm_environment(settings(device="cuda")) == {
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RLRUN_ENGINE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
    }
    local = vllm_environment(settings(model_path=str(tmp_path), kv_cache_gib=3, cpu_threads=2))
    assert local["HF_HUB_OFFLINE"] == "1", "only a local folder needs no hub"
    assert (local["VLLM_CPU_KVCACHE_SPACE"], local["OMP_NUM_THREADS"]) == ("3", "2")
    assert "TORCH_COMPILE_DISABLE" not in local
    assert vllm_environment(settings(enforce_eager=True))["TORCH_COMPILE_DISABLE"] == "1"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in vllm_environment(settings(tensor_parallel=2))
    assert vllm_environment(settings(model_class="a.b:C"))["RLRUN_MODEL_CLASS"] == "a.b:C"


def test_flashinfer_sampler_is_off_without_cuda_compiler(tmp_path: Path) -> None:
    off = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    gpu, bare = settings(device="cuda"), {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "none")}
    assert default_vllm_environment(gpu, bare) == off
    assert default_vllm_environment(settings(), bare) == {}, "vLLM for CPUs has no FlashInfer"
    for value in ("0", "1"):
        assert default_vllm_environment(gpu, {**bare, "VLLM_USE_FLASHINFER_SAMPLER": value}) == {}, "the user's value"
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        variables = {**bare, "CUDA_HOME": "", name: str(tmp_path / "cuda")}
        nvcc.chmod(0o644)
        assert default_vllm_environment(gpu, variables) == off
        nvcc.chmod(0o755)
        assert default_vllm_environment(gpu, variables) == {}
    assert default_vllm_environment(gpu, {"PATH": str(nvcc.parent)}) == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"device": "tpu"}, "device: 'tpu' is unknown"),
        ({"dtype": "float16"}, "dtype: 'float16' does not work on cpu"),
        ({"api_key": "short"}, "apiKey: got 5 characters, expected at least 8"),
        ({"port": 0}, "port: 0"),
        ({"gpu_memory_utilization": 1.5}, "gpuMemoryUtilization: 1.5"),
        ({"tensor_parallel": 0}, "tensor_parallel: 0 is less than 1"),
        (
            {"extra_args": ["--api-key", "x"]},
            r"extraArgs\[0\] \(--api-key\) is set by RLRun itself; remove it, because no field",
        ),
        ({"extra_args": ["--max-model-len=64"]}, r"set by RLRun itself; remove it, and set inference.maxModelLen$"),
        ({"extra_args": ["--max_lora=4"]}, r"remove it, and set trainer.lora.rank$"),
        ({"extra_args": ["--enable_lora=true"]}, r"extraArgs\[0\] \(--enable_lora=true\)"),
        ({"extra_args": ["--x", "1", "--no-enforce-eager"]}, r"extraArgs\[2\] \(--no-enforce-eager\)"),
        ({"extra_args": ["--por=1"]}, r"extraArgs\[0\] \(--por=1\)"),
        (
            {"extra_args": ["-tp", "2"]},
            r"extraArgs\[0\] \(-tp\) is set by RLRun itself; remove it, and set inference.tensorParallel$",
        ),
        ({"extra_args": ["--x=1", "2"]}, r"extraArgs\[1\] \(2\) is neither a flag nor a flag's value"),
        ({"modle": "x"}, "unknown field 'modle'"),
    ],
)
def test_settings_that_cannot_work_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(**overrides)


def test_settings_file_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.json"
    for content, message in (("{", "Expecting"), ("[]", "JSON object"), (json.dumps({"port": 1}), "missing")):
        file.write_text(content)
        with pytest.raises(SettingsError, match=message):
            settings_from_file(file)
        assert main(["--settings", str(file)]) == 78
        assert capsys.readouterr().err.startswith(f"inference: {file}: ")


def test_encoder_of_images_is_left_out_unless_the_user_keeps_it() -> None:
    arguments = vllm_arguments(settings(language_model_only=True, extra_args=["--no-language-model-only"]))
    assert arguments[-2:] == ["--language-model-only", "--no-language-model-only"], "vLLM takes the last one"
    assert not any("language-model-only" in argument for argument in vllm_arguments(settings()))


def test_controlled_flags_are_refused_as_user_arguments() -> None:
    everything = settings(
        device="cuda",
        max_lora_rank=8,
        max_model_len=64,
        colocated=True,
        enforce_eager=True,
        revision="a",
        trust_remote_code=True,
    )
    flags = {
        argument.partition("=")[0] for one in (everything, settings(receives=True)) for argument in vllm_arguments(one)
    }
    harmless = {flag for flag in flags if not owned_flag(flag)}
    assert harmless == {
        "--enable-prefix-caching",
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level",
    }
    assert owned_flag("--max-num-batched-tokens") is None
    assert owned_flag("--revision") == "--revision"


def test_fields_of_owned_flags_exist() -> None:
    known = {".".join(path) for path, _, _ in walk_model(RLRunSpec, "camel")}
    assert {*OWNED_FLAGS.values(), *OWNED_SHORT.values()} - {None} <= known
    assert [*OWNED_FLAGS] == sorted(OWNED_FLAGS)


def test_engine_waits_for_the_plain_copy_of_a_quantized_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (source := tmp_path / "source").mkdir()
    quantization = {"quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": quantization}))
    (run := tmp_path / "run").mkdir()
    spec = {"model": {"path": str(source)}, "environments": [{"id": "reverse-text"}]}
    config = resolve_spec(RLRunSpec.model_validate(spec), name="a", uid="u", output_dir=str(run)).inference
    assert config is not None
    polls = []

    def write_copy(_seconds: float) -> None:
        polls.append(len(polls))
        if len(polls) == 3:
            (run / "model").mkdir()

    monkeypatch.setattr("rlrun.inference.engine_settings.time.sleep", write_copy)
    assert with_local_model(config).model.path == str(run / "model")
    assert len(polls) == 3
    assert capsys.readouterr().out.count("waiting for") == 1
    evaluated = config.model_copy(update={"task": "Eval", "output_dir": str(tmp_path / "other")})
    assert with_local_model(evaluated).model.path == str(source), "an evaluation serves the files as they are"
