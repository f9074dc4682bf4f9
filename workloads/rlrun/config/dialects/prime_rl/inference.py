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
_ADAPTERS = "the engine's adapters are derived from trainer.lora"
_ADDRESS = "ports are chosen automatically; the option --inference-port sets them"
_NODES = "not supported: inference.replicas are engines on one node each; start one engine on each machine"
_GRAPHS = "graphs are captured on GPUs, with the same result"


def _kebab_name(name: str) -> str:
    return name.replace("_", "-")


def _of_engine(table: str, *, vllm: bool) -> tuple[Row, ...]:
    """Build the rows of vLLM's options; `table` ends with a dot. Options without a field here are passed to vLLM's server unchanged."""
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
        ignored_key(f"{table}api_server_count", "one server serves all copies of an engine"),
        ignored_key(f"{table}enforce_eager", _GRAPHS),
        mapped_key(f"{table}seed", "seed", by=defer_value("inference_seed"), text="if nothing else sets it"),
        ignored_key(f"{table}enable_auto_tool_choice", "tool_call_parser implies it"),
        mapped_key(f"{table}tool_call_parser", _ARGS, by=tool_parser, text="--enable-auto-tool-choice --tool-call-parser"),
        mapped_key(f"{table}max_model_len", "inference.max_model_len", by=defer_value("max_model_len"), text="at least seq_len"),
        mapped_key(f"{table}dtype", "model.dtype", by=map_choice({"auto": "bfloat16"})),
        mapped_key(f"{table}trust_remote_code", "model.trust_remote_code"),
        ignored_key(
            f"{table}enable_return_routed_experts", "false is the default here",
            only_values((False,), "false is the default here", "not supported: the trainer chooses the experts again"),
        ),
        refused_key(f"{table}chat_template", "not supported: the template comes with the model's tokenizer; put it into its folder"),
        refused_key(
            f"{table}rope_scaling", "not supported: trainer and engine read it from config.json in the model's folder",
        ),
        *(rest if vllm else ()),
    )  # fmt: skip


INFERENCE_ROWS: tuple[Row, ...] = (
    *of_role("inference."),
    *_of_engine("inference.", vllm=False),
    *_of_engine("inference.model.", vllm=False),
    mapped_key("inference.model.name", "model.name", "model.path", by=read_place, text="a path becomes model.path"),
    *_of_engine("inference.vllm.", vllm=True),
    mapped_key("inference.vllm.model", "model.name", "model.path", by=read_place, text="a path becomes model.path"),
    mapped_key("inference.vllm.max_num_seqs", "inference.max_num_seqs"),
    mapped_key("inference.vllm.tensor_parallel_size", "inference.tensor_parallel"),
    mapped_key("inference.vllm.data_parallel_size", "inference.data_parallel"),
    mapped_key("inference.tensor_parallel_size", "inference.tensor_parallel"),
    mapped_key("inference.data_parallel_size", "inference.data_parallel"),
    *(refused_key(f"inference.{name}", _NODES, "inference.replicas")
      for name in ("data_parallel_address", "data_parallel_start_rank", "headless")),
    refused_key("inference.api_key", "all roles use the key in the variable RLRUN_API_KEY; set it for each role"),
    mapped_key("inference.parallel.tp", "inference.tensor_parallel"),
    mapped_key("inference.parallel.dp", "inference.data_parallel"),
    *(mapped_key(f"inference.vllm_extra.{name}", ours) for name, ours in (("max_num_seqs", "inference.max_num_seqs"),)),
    Row("inference.vllm_extra.*", "mapped", (_ARGS,), "--<name>=<value>", by_name=lambda name: server_flag(_kebab_name(name))),
    refused_key("inference.kv_cache_offload", "not supported: the engine keeps its cache on its GPUs"),
    ignored_key("inference.router", "the orchestrator itself selects the engine of each request"),
    ignored_key("inference.enable_fp32_lm_head", "log-probs are computed in float32"),
    ignored_key("inference.lora_target_modules", _ADAPTERS),
    ignored_key("inference.data_parallel_rpc_port", "ports are chosen automatically"),
    ignored_key("inference.server", _ADDRESS),
    ignored_key("inference.renderer", "the chat template comes with the model's tokenizer"),
    ignored_key("inference.slurm", "the run starts on this machine or in Kubernetes"),
    ignored_key("inference.deployment.type", "inference.replicas and gpus_per_replica determine where engines run",
            only_values(("single_node", "multi_node"), "the counts next to it determine it",
                "set inference.replicas and inference.gpus_per_replica")),
    mapped_key("inference.deployment.gpus_per_node", "inference.gpus_per_replica", by=count_gpus("gpus_per_node")),
    refused_key("inference.deployment.*", "not supported: inference.replicas are engines on one node each", "inference.replicas"),
    mapped_key("inference.deployment.num_nodes", "inference.replicas", by=count_gpus("engine_nodes"), text="one engine per node"),
    mapped_key("inference.output_dir", "output_dir", by=defer_value("inference_output_dir"), text="if nothing else sets it"),
    ignored_key("inference.use_deep_gemm", "it changes only speed"),
    mapped_key("inference.data_parallel_size_local", "inference.data_parallel", by=if_set),
)  # fmt: skip
