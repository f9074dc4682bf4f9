"""Keys of `[inference]`, the engines."""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    count_gpus,
    defer_value,
    if_set,
    map_choice,
    only_values,
    read_place,
    server_flag,
    tool_parser,
)
from rlrun.config.dialects.prime_rl.run import of_role
from rlrun.config.dialects.rows import Row, ignored_key, mapped_key, refused_key

_ARGS = "inference.extra_args"
_ADAPTERS = "the engine's adapters follow from trainer.lora"
_ADDRESS = "the engines' ports are chosen; the option --inference-port sets them"
_NODES = "there is none: inference.replicas are engines of one node each; start one on each machine"
_GRAPHS = "graphs are captured on GPUs: the result is the same"


def _kebab_name(name: str) -> str:
    return name.replace("_", "-")


def _of_engine(table: str, *, vllm: bool) -> tuple[Row, ...]:
    """Rows of vLLM's own options; `table` ends with a dot. Those without a field of ours go to vLLM's server as they are."""
    flags = (
        "enable_prefix_caching", "enable_expert_parallel", "all2all_backend", "enable_eplb", "calculate_kv_scales",
        "quantization", "kv_cache_dtype", "reasoning_parser", "max_num_batched_tokens", "enable_chunked_prefill", "enable_dbo",
    )  # fmt: skip
    rest = (
        Row(f"{table}*", "mapped", (_ARGS,), "--<name>=<value>", by_name=lambda name: server_flag(_kebab_name(name))),
    )
    return (
        mapped_key(f"{table}gpu_memory_utilization", "inference.gpu_memory_utilization"),
        *(mapped_key(f"{table}{name}", _ARGS, by=server_flag(_kebab_name(name)), text=f"--{_kebab_name(name)}") for name in flags),
        *(ignored_key(f"{table}{name}", _ADAPTERS) for name in ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank")),
        ignored_key(f"{table}api_server_count", "one server answers for all copies of an engine"),
        ignored_key(f"{table}enforce_eager", _GRAPHS),
        mapped_key(f"{table}seed", "seed", by=defer_value("inference_seed"), text="where nothing else sets it"),
        ignored_key(f"{table}enable_auto_tool_choice", "it comes with tool_call_parser"),
        mapped_key(f"{table}tool_call_parser", _ARGS, by=tool_parser, text="--enable-auto-tool-choice --tool-call-parser"),
        mapped_key(f"{table}max_model_len", "inference.max_model_len", by=defer_value("max_model_len"), text="at least seq_len"),
        mapped_key(f"{table}dtype", "model.dtype", by=map_choice({"auto": "bfloat16"})),
        mapped_key(f"{table}trust_remote_code", "model.trust_remote_code"),
        ignored_key(
            f"{table}enable_return_routed_experts", "false is the default here",
            only_values((False,), "false is the default here", "there is none: experts are chosen anew in the trainer"),
        ),
        refused_key(f"{table}chat_template", "there is none: the template is that of the model's tokenizer; put it into its folder"),
        refused_key(
            f"{table}rope_scaling", "there is none: the trainer reads it from config.json of the model's folder, and so does the engine",
        ),
        *(rest if vllm else ()),
    )  # fmt: skip


ROWS: tuple[Row, ...] = (
    *of_role("inference."),
    *_of_engine("inference.", vllm=False),
    *_of_engine("inference.model.", vllm=False),
    mapped_key("inference.model.name", "model.name", "model.path", by=read_place, text="a name with a path's form is model.path"),
    *_of_engine("inference.vllm.", vllm=True),
    mapped_key("inference.vllm.model", "model.name", "model.path", by=read_place, text="a name with a path's form is model.path"),
    mapped_key("inference.vllm.max_num_seqs", "inference.max_num_seqs"),
    mapped_key("inference.vllm.tensor_parallel_size", "inference.tensor_parallel"),
    mapped_key("inference.vllm.data_parallel_size", "inference.data_parallel"),
    mapped_key("inference.tensor_parallel_size", "inference.tensor_parallel"),
    mapped_key("inference.data_parallel_size", "inference.data_parallel"),
    *(refused_key(f"inference.{name}", _NODES, "inference.replicas")
      for name in ("data_parallel_address", "data_parallel_start_rank", "headless")),
    refused_key("inference.api_key", "all roles have the key of the variable RLRUN_API_KEY; set it for each"),
    mapped_key("inference.parallel.tp", "inference.tensor_parallel"),
    mapped_key("inference.parallel.dp", "inference.data_parallel"),
    *(mapped_key(f"inference.vllm_extra.{name}", ours) for name, ours in (("max_num_seqs", "inference.max_num_seqs"),)),
    Row("inference.vllm_extra.*", "mapped", (_ARGS,), "--<name>=<value>", by_name=lambda name: server_flag(_kebab_name(name))),
    refused_key("inference.kv_cache_offload", "there is none: the engine's cache lies on its GPUs"),
    ignored_key("inference.router", "the orchestrator sends each request to an engine itself"),
    ignored_key("inference.enable_fp32_lm_head", "log-probs are computed in float32"),
    ignored_key("inference.lora_target_modules", _ADAPTERS),
    ignored_key("inference.data_parallel_rpc_port", "ports are chosen"),
    ignored_key("inference.server", _ADDRESS),
    ignored_key("inference.renderer", "the chat template is that of the model's tokenizer"),
    ignored_key("inference.slurm", "the run is started here, or by Kubernetes"),
    ignored_key("inference.deployment.type", "inference.replicas and gpus_per_replica say where engines run",
            only_values(("single_node", "multi_node"), "the counts beside it say it",
                "set inference.replicas and inference.gpus_per_replica")),
    mapped_key("inference.deployment.gpus_per_node", "inference.gpus_per_replica", by=count_gpus("gpus_per_node")),
    refused_key("inference.deployment.*", "there is none: inference.replicas are engines of one node each", "inference.replicas"),
    mapped_key("inference.deployment.num_nodes", "inference.replicas", by=count_gpus("engine_nodes"), text="an engine on each node"),
    mapped_key("inference.output_dir", "output_dir", by=defer_value("inference_output_dir"), text="where nothing else sets it"),
    ignored_key("inference.use_deep_gemm", "it changes speed alone"),
    mapped_key("inference.data_parallel_size_local", "inference.data_parallel", by=if_set),
)  # fmt: skip
