"""Allow-list of configurations: free-form values that may be shown. Data and predicates only.

The schema fixes the form of most fields of a run. Other places accept any text: arguments of environments, variables, annotations, a pod
template, arguments of engines. A secret can have any form there. Therefore only values of known names are shown, and values that cannot be
secrets: numbers, booleans, quantities. `rlrun.runtime.redact.redact_configuration` hides all others.
"""

from __future__ import annotations

import re

FREE_FIELDS = frozenset(
    {
        "args", "env", "annotations", "extraargs", "chattemplatearguments", "podtemplate", "extraegress",
        "requiredduringschedulingignoredduringexecution", "command", "stringdata", "binarydata", "headers",
    }
)  # fmt: skip
"""Fields whose values the schema does not restrict, in lower case without separators."""

_ARGUMENTS = """
    dataset subset split trainSplit evalSplit revision path files format layout kind type name id mode question answer
    prompt prompts system messages column columns rewards function functions judge model instructions operators
    operations style language environment level difficulty taskset harness loader role roles strategy systemPrompt
    instruction reward source malformed scorePattern metric parser extract pattern template choices rubric target
    labels order

    dtype quantization kvCacheDtype attentionBackend device loadFormat tokenizer tokenizerMode reasoningParser
    toolCallParser chatTemplate servedModelName distributedExecutorBackend cpuOffloadGb schedulingPolicy loggingLevel
    host port task runner baseUrl

    apiVersion image imagePullPolicy restartPolicy mountPath subPath claimName secretName fieldPath resource protocol
    effect operator topologyKey whenUnsatisfiable nodeName schedulerName priorityClassName runtimeClassName
    serviceAccountName medium sizeLimit storageClassName cpu memory cidr scheme level terminationMessagePolicy
    terminationMessagePath dnsPolicy preemptionPolicy workingDir accessModes volumeMode role containerName divisor
    hostname subdomain namespace namespaces seLinuxOptions localhostProfile hostnames ip
"""
"""Names of arguments of environments, data sets and engines, and of fields of Kubernetes objects."""

_VARIABLES = re.compile(
    r"(?:RLRUN|NCCL|TORCH|TORCHINDUCTOR|TRITON|PYTORCH|CUDA|NVIDIA|OMP|MKL|VLLM|PYTHON|GLOO|UCX|FI|XLA|HSA|ROCM|TF|TOKENIZERS)_?[A-Z0-9_]*"
    r"|HF_(?:HOME|HUB_[A-Z_]*|ENDPOINT|DATASETS_[A-Z_]*)|WANDB_(?:MODE|PROJECT|ENTITY|DIR|BASE_URL|SILENT)|MLFLOW_(?:TRACKING_URI|EXPERIMENT_NAME)"
    r"|TRANSFORMERS_[A-Z_]*|HOME|PATH|LANG|LC_[A-Z]+|TZ|USER|TMPDIR|XDG_[A-Z_]+|LOG_?LEVEL|LD_LIBRARY_PATH|DEBUG"
    r"|(?:HTTP|HTTPS|ALL|NO)_PROXY|MASTER_(?:ADDR|PORT)|RANK|WORLD_SIZE|LOCAL_RANK|POD_[A-Z_]+|NODE_[A-Z_]+",
    re.IGNORECASE,
)
"""Variables whose values are not secret; names that `is_secret` recognizes are removed before."""
_ANNOTATIONS = re.compile(r"(?:[\w.-]*\.)?(?:rlrun\.io|kubernetes\.io|k8s\.io|prometheus\.io|volcano\.sh)/[\w.-]+")
_PLAIN = re.compile(
    r"[-+]?(?:\d{1,9}|\d{0,9}\.\d+)(?:[eE][-+]?\d{1,3})?(?:[kKMGTPE]i?|m|%|ms|s|min|h|d)?|true|false|null|none|yes|no|on|off|auto|always|never|debug|info|warning|error",
    re.IGNORECASE,
)
"""Numbers, quantities, durations, and switch words. A number of more than nine digits can be a secret."""
_COMMANDS = re.compile(
    r"-{1,2}[A-Za-z][\w.-]*|(?:/(?:usr/(?:local/)?)?bin/)?(?:python3?|torchrun|vllm|serve|rlrun|sh|bash|sleep|env)|-m|-u"
    r"|rlrun(?:\.\w+)+|vllm(?:\.\w+)+|/(?:data|etc/rlrun|opt|usr|mnt|models|config|run/rlrun|tmp)(?:/[\w.-]{1,40})*"
)
"""Words of a command that are flags, known programs, modules or paths on volumes."""


def plain_name(name: str) -> str:
    """Return a name in lower case without separators, so that `extra_args`, `extraArgs` and `--extra-args` are equal."""
    return re.sub(r"[-_]", "", name).lower()


_SHOWN = frozenset(plain_name(name) for name in _ARGUMENTS.split())


def is_free(name: str) -> bool:
    """Return whether a field of this name accepts values of any form."""
    return plain_name(name) in FREE_FIELDS


def is_free_path(path: str) -> bool:
    """Return whether a dotted path leads into a field that accepts values of any form."""
    return any(is_free(part) for part in re.split(r"[.\[\]/]+", path))


def is_shown(name: str, value: str) -> bool:
    """Return whether a free-form value may be shown.

    Args:
        name: name of its field, argument or annotation.
        value: text of the value.
    """
    return (
        not value
        or _PLAIN.fullmatch(value) is not None
        or plain_name(name) in _SHOWN
        or _ANNOTATIONS.fullmatch(name) is not None
    )


def is_shown_variable(name: str, value: str) -> bool:
    """Return whether a variable's value may be shown."""
    return not value or _PLAIN.fullmatch(value) is not None or _VARIABLES.fullmatch(name) is not None


def is_shown_word(flag: str, word: str) -> bool:
    """Return whether a word of a command may be shown.

    Args:
        flag: flag before the word, or at its start; empty: none.
        word: word of the command.
    """
    return (
        _PLAIN.fullmatch(word) is not None
        or _COMMANDS.fullmatch(word) is not None
        or plain_name(flag.lstrip("-")) in _SHOWN
    )
