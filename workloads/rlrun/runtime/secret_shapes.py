"""Shapes that only secrets have, and the allow-list of free-form values in configurations.

Data and predicates only. The shapes are prefixes of tokens, private keys, and addresses that grant access. Each rule was written for this
project, from the format in its issuer's documentation and from rule sets for the same kind. `gitleaks` names the rule of the gitleaks
project (MIT license); `detect-secrets` names the plugin of that project (Apache 2.0); `vendor` stands for the issuer's own documentation.
Lengths are lower bounds: a longer token is still recognized.

The schema fixes the form of most fields of a run. Other places accept any text: arguments of environments, variables, annotations, a pod
template, arguments of engines. A secret can have any form there. Therefore only values of known names are shown, and values that cannot be
secrets: numbers, booleans, quantities. `rlrun.runtime.redact.redact_configuration` hides all others.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Shape(NamedTuple):
    """Kind of secret that its text alone identifies."""

    kind: str
    pattern: str
    source: str


SHAPES: tuple[Shape, ...] = (
    # Models and their tools.
    Shape("Hugging Face", r"\bhf_[A-Za-z0-9]{16,}", "gitleaks huggingface-access-token"),
    Shape("Hugging Face organization", r"\bapi_org_[A-Za-z0-9]{24,}", "gitleaks huggingface-organization-api-token"),
    Shape("Weights & Biases", r"\bwandb_v\d+_[A-Za-z0-9_-]{16,}", "vendor"),
    Shape("Weights & Biases, own server", r"\blocal-[0-9a-f]{40}\b", "vendor"),
    Shape("OpenAI, Anthropic, DeepSeek, OpenRouter, Langfuse", r"\bsk-[A-Za-z0-9_-]{16,}", "gitleaks openai-api-key"),
    Shape("Groq", r"\bgsk_[A-Za-z0-9]{20,}", "vendor"),
    Shape("xAI", r"\bxai-[A-Za-z0-9]{20,}", "vendor"),
    Shape("Perplexity", r"\bpplx-[A-Za-z0-9]{20,}", "gitleaks perplexity-api-key"),
    Shape("Fireworks", r"\bfw_[A-Za-z0-9]{20,}", "vendor"),
    Shape("Together", r"\btgp_v1_[A-Za-z0-9_-]{20,}", "vendor"),
    Shape("Replicate", r"\br8_[A-Za-z0-9]{24,}", "vendor"),
    Shape("NVIDIA", r"\bnvapi-[A-Za-z0-9_-]{16,}", "vendor"),
    Shape("LangSmith", r"\blsv2_(?:pt|sk)_[A-Za-z0-9_]{20,}", "vendor"),
    Shape("Tavily", r"\btvly-[A-Za-z0-9-]{16,}", "vendor"),
    Shape("Pinecone", r"\bpcsk_[A-Za-z0-9_]{20,}", "vendor"),
    Shape("RunPod", r"\brpa_[A-Z0-9]{30,}", "vendor"),
    Shape("Modal", r"\ba[ks]-[A-Za-z0-9]{22}\b", "vendor"),
    Shape("Databricks", r"\bdapi[0-9a-f]{32}(?:-\d)?\b", "gitleaks databricks-api-token"),
    # Code and packages.
    Shape("GitHub", r"\bgh[oprsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}", "gitleaks github-pat"),
    Shape("GitLab", r"\bgl[a-z]{2,7}-[A-Za-z0-9_-]{16,}", "gitleaks gitlab-pat"),
    Shape("Atlassian", r"\bATATT3[A-Za-z0-9_=-]{20,}|\bATBB[A-Za-z0-9_=-]{20,}", "gitleaks atlassian-api-token"),
    Shape("npm", r"\bnpm_[A-Za-z0-9]{20,}", "gitleaks npm-access-token"),
    Shape("PyPI", r"\bpypi-[A-Za-z0-9_-]{16,}", "gitleaks pypi-upload-token"),
    Shape("RubyGems", r"\brubygems_[a-f0-9]{32,}", "gitleaks rubygems-api-token"),
    Shape("Docker Hub", r"\bdckr_[op]at_[A-Za-z0-9_-]{20,}", "vendor"),
    Shape("Artifactory", r"\bAKCp[A-Za-z0-9]{40,}|\bcmVmd[A-Za-z0-9]{40,}", "gitleaks artifactory-api-key"),
    # Clouds.
    Shape("AWS access key", r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b", "gitleaks aws-access-token"),
    Shape("AWS Bedrock", r"\bABSK[A-Za-z0-9+/]{40,}={0,2}", "gitleaks aws-amazon-bedrock-api-key-long-lived"),
    Shape("Google API key", r"\bAIza[A-Za-z0-9_-]{30,}", "gitleaks gcp-api-key"),
    Shape("Google OAuth", r"\bya29\.[A-Za-z0-9_-]{20,}|\bGOCSPX-[A-Za-z0-9_-]{20,}|\b1//0[A-Za-z0-9_-]{20,}", "vendor"),
    Shape("Azure client secret", r"(?<![\w~.-])[\w~.]{3}\dQ~[\w~.-]{30,}", "gitleaks azure-ad-client-secret"),
    Shape("Azure storage key", r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==", "detect-secrets azure_storage_key"),
    Shape("Alibaba", r"\bLTAI[A-Za-z0-9]{16,}", "gitleaks alibaba-access-key-id"),
    Shape("DigitalOcean", r"\bdo[opr]_v1_[a-f0-9]{40,}", "gitleaks digitalocean-pat"),
    Shape("Cloudflare origin", r"\bv1\.0-[a-f0-9]{24}-[a-f0-9]{100,}", "gitleaks cloudflare-origin-ca-key"),
    Shape("Heroku", r"\bHRKU-[A-Za-z0-9_-]{20,}", "gitleaks heroku-api-key-v2"),
    Shape("Fly", r"\bfo1_[\w-]{30,}|\bfm[12][ar]?_[A-Za-z0-9+/]{60,}={0,3}", "gitleaks flyio-access-token"),
    Shape("Tailscale", r"\btskey-[a-z]+-[A-Za-z0-9_-]{10,}", "vendor"),
    Shape("HashiCorp", r"\bhv[bsr]\.[A-Za-z0-9_-]{20,}|\b[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,}", "gitleaks vault-service-token"),
    Shape("Doppler", r"\bdp\.[a-z]{2,5}\.[A-Za-z0-9]{30,}", "gitleaks doppler-api-token"),
    Shape("Pulumi", r"\bpul-[a-f0-9]{40}\b", "gitleaks pulumi-api-token"),
    Shape("1Password", r"\bops_eyJ[A-Za-z0-9+/]{40,}", "gitleaks 1password-service-account-token"),
    Shape("age", r"AGE-SECRET-KEY-1[A-Z0-9]{40,}", "gitleaks age-secret-key"),
    # Messages, payments, monitoring.
    Shape("Slack", r"\bxox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}|\bxapp-\d-[A-Za-z0-9-]{10,}", "gitleaks slack-bot-token"),
    Shape("Slack webhook", r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9_+/-]{10,}", "gitleaks slack-webhook-url"),
    Shape("Discord webhook", r"discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d+/[\w-]{20,}", "vendor"),
    Shape("Discord", r"\b[MNO][A-Za-z0-9_-]{23,27}\.[\w-]{6}\.[\w-]{27,}", "detect-secrets discord"),
    Shape("Teams webhook", r"\.webhook\.office\.com/[\w@/-]{20,}", "gitleaks microsoft-teams-webhook"),
    Shape("Telegram", r"\b\d{5,16}:A[A-Za-z0-9_-]{34}\b", "gitleaks telegram-bot-api-token"),
    Shape("Stripe", r"\b(?:sk|rk)_(?:live|test|prod)_[A-Za-z0-9]{10,}|\bwhsec_[A-Za-z0-9+/]{20,}", "gitleaks stripe-access-token"),
    Shape("Twilio", r"\bSK[0-9a-f]{32}\b", "gitleaks twilio-api-key"),
    Shape("SendGrid", r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}", "gitleaks sendgrid-api-token"),
    Shape("Mailgun", r"\bkey-[0-9a-f]{32}\b", "gitleaks mailgun-private-api-token"),
    Shape("Mailchimp", r"\b[0-9a-f]{32}-us\d{1,2}\b", "gitleaks mailchimp-api-key"),
    Shape("Grafana", r"\bgl(?:sa|c)_[A-Za-z0-9+/_]{20,}={0,2}", "gitleaks grafana-service-account-token"),
    Shape("New Relic", r"\bNR(?:AK|II|JS)-[A-Za-z0-9_-]{16,}", "gitleaks new-relic-user-api-key"),
    Shape("Sentry", r"\bsntry[su]_[A-Za-z0-9+/=_-]{20,}", "gitleaks sentry-org-token"),
    Shape("Linear", r"\blin_(?:api|oauth)_[A-Za-z0-9]{20,}", "gitleaks linear-api-key"),
    Shape("Notion", r"\bntn_[A-Za-z0-9]{20,}", "gitleaks notion-api-token"),
    Shape("Figma", r"\bfigd_[A-Za-z0-9_-]{20,}", "vendor"),
    Shape("Shopify", r"\bshp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}", "gitleaks shopify-access-token"),
    Shape("Postman", r"\bPMAK-[a-f0-9]{24}-[a-f0-9]{34}", "gitleaks postman-api-token"),
    Shape("Supabase", r"\bsbp_[a-f0-9]{40}|\bsb_secret_[\w-]{20,}", "vendor"),
    Shape("PlanetScale", r"\bpscale_(?:tkn|pw|oauth)_[\w=.-]{20,}", "gitleaks planetscale-api-token"),
    # Formats without an issuer.
    Shape("JSON web token", r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*){0,2}", "gitleaks jwt"),
    Shape(
        "private key",
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
        "gitleaks private-key",
    ),
    Shape("PuTTY key", r"PuTTY-User-Key-File-\d.*?(?:Private-MAC: \w+|\Z)", "vendor"),
)  # fmt: skip


def _compile_shapes() -> str:
    """Return all shapes as one pattern.

    Those at the start of a word share one `\\b`: the engine skips a branch by its first letter only if the branch starts with it.
    """
    words, others = [], []
    for shape in SHAPES:
        if shape.pattern.startswith(r"\b"):
            words += shape.pattern.removeprefix(r"\b").split(r"|\b")
        else:
            others.append(shape.pattern)
    return rf"\b(?:{'|'.join(words)})|{'|'.join(others)}"


ANY = re.compile(_compile_shapes(), re.DOTALL)
"""Pattern of any of these shapes."""


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
