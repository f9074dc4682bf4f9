"""The environment variables that an environment's process gets: an allow-list, and the names that the manifest adds to it.

The orchestrator's own hold the run's key and whatever tokens its pod or its user's shell has. So nothing is inherited that is not named
here, by `environments[].variables`, or by an argument of the environment. A name that ends in `*` stands for all that begin so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from rlrun.config.formats import RESERVED_VARIABLES
from rlrun.diagnostics.stacks import FILE_VARIABLE
from rlrun.environments.rewards.scorers import SERVED
from rlrun.environments.rewards.served import ServedArgs
from rlrun.hub.revisions import VARIABLE as REVISIONS_VARIABLE
from rlrun.runtime.processes import LAUNCH_VARIABLE

EVERYTHING = "*"
"""All variables but RLRun's own: for code that has them in the run, too, and for a container of its own."""
_OWN = (LAUNCH_VARIABLE, FILE_VARIABLE, REVISIONS_VARIABLE)
_KEY_ARGUMENT = "api_key_env"
"""An argument of this name, of any environment, names the variable of a judge's key."""
_HUB_TOKENS = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN")

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
"""Variables that programs need to find their files, their libraries, the network and the machine; none of them is a secret by itself."""


_OF_THIS_CONTAINER = ("HOME", "TMPDIR", "TMP", "TEMP", "HOSTNAME", "SHELL", "XDG_*")
"""Variables whose values name folders of this process's own container."""


def for_another_container(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that mean the same in another container of the same image."""
    return {
        name: value
        for name, value in variables.items()
        if not any(_matches_name(name, pattern) for pattern in _OF_THIS_CONTAINER)
    }


def passed_variables(variables: Mapping[str, str], named: Iterable[str]) -> dict[str, str]:
    """The variables that a process gets.

    Args:
        variables: of this process.
        named: names that are added to the list above; `EVERYTHING` for all.
    """
    names = (*BASICS, *named)
    return {
        name: value
        for name, value in variables.items()
        if name in _OWN
        or (not name.startswith(RESERVED_VARIABLES) and any(_matches_name(name, pattern) for pattern in names))
    }


def _matches_name(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def named_by(id: str, args: Mapping[str, object]) -> tuple[str, ...]:
    """Names that an environment's arguments add: those of a judge's key, and the hub's token for shipped ones that read the hub.

    Args:
        id: the environment's.
        args: its arguments.
    """
    names = [*_values_of_key(args, _KEY_ARGUMENT)]
    if id == "dataset" and SERVED & {*_list_texts(args.get("reward")), *_list_texts(args.get("reward_by_source"))}:
        names.append(str(ServedArgs.model_fields[_KEY_ARGUMENT].default))
    if id in ("dataset", "gsm8k") and args.get("path") is None and args.get("source") != "bundled":
        names += _HUB_TOKENS
    return tuple(names)


def _values_of_key(value: object, key: str) -> Iterator[str]:
    """Texts that stand under a key, at any depth of JSON."""
    if isinstance(value, Mapping):
        if isinstance(found := value.get(key), str):
            yield found
        for part in value.values():
            yield from _values_of_key(part, key)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _values_of_key(part, key)


def _list_texts(value: object) -> Iterator[str]:
    """Texts in JSON, at any depth."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _list_texts(part)


def withheld_hint(message: str, withheld: Collection[str]) -> str:
    """Advice on an error that names a variable which was not passed; "" when it names none.

    Args:
        message: of the error.
        withheld: names of the variables that this process has and the environment's has not.
    """
    words = set(re.findall(r"\w+", message))
    names = sorted(words & {name for name in withheld if not name.startswith(RESERVED_VARIABLES)})
    if not names:
        return ""
    return (
        f" (environments get no other variables of the orchestrator than those that are named: if its code needs it, "
        f"set environments[].variables: [{', '.join(names)}])"
    )
