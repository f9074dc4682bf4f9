"""Names of the environment variables that an environment's process may get. Pure; the operator uses them too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rlrun.config.formats import RESERVED_VARIABLES

KEY_ARGUMENT = "api_key_env"
"""Argument of any environment that contains the name of the variable with a judge's key."""
HUB_TOKENS = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN")

BASICS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TERM", "TZ", "TZDIR", "LANG", "LANGUAGE", "LC_*"),
    *("TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "VIRTUAL_ENV", "CONDA_PREFIX", "JAVA_HOME"),
    *(
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONHASHSEED",
        "PYTHONUTF8",
        "PYTHONIOENCODING",
        "PYTHONWARNINGS",
        "PYTHONUSERBASE",
    ),
    *("PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONMALLOC"),
    *("PYTHONOPTIMIZE", "PYTHONDEVMODE", "PYTHONASYNCIODEBUG", "PYTHONTRACEMALLOC"),
    *("OMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE", "HF_ENDPOINT"),
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_*", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"),
    *("HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TORCH_HOME", "NLTK_DATA"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
)
"""Variables with which programs find their files, libraries, the network and the machine. None of them is a secret by itself."""


def is_passed(name: str, named: Iterable[str] = ()) -> bool:
    """Return whether an environment's process gets a variable. It never gets RLRun's own variables.

    Args:
        name: name of the variable.
        named: names in addition to `BASICS`; a name that ends in `*` matches all names with this prefix.
    """
    return not name.startswith(RESERVED_VARIABLES) and any(
        matches_pattern(name, pattern) for pattern in (*BASICS, *named)
    )


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a name equals the pattern, or has the prefix of a pattern that ends in `*`."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def names_in_arguments(id: str, args: Mapping[str, object]) -> Iterator[str]:
    """Yield variable names from an environment's arguments: names of keys, and the hub's tokens if it is built in and uses the hub.

    Args:
        id: id of the environment.
        args: arguments of the environment.
    """
    yield from _texts_under_key(args, KEY_ARGUMENT)
    if id in ("dataset", "gsm8k") and args.get("path") is None and args.get("source") != "bundled":
        yield from HUB_TOKENS


def _texts_under_key(value: object, key: str) -> Iterator[str]:
    """Yield the texts under a key, at any depth of JSON."""
    if isinstance(value, Mapping):
        if isinstance(found := value.get(key), str):
            yield found
        for part in value.values():
            yield from _texts_under_key(part, key)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts_under_key(part, key)
