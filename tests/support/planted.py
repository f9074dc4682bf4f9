"""Secrets of many kinds, generated at run time so that the repository contains none, and similar ordinary values."""

from __future__ import annotations

import base64
import json
import random
import string
from dataclasses import dataclass

_DRAW = random.Random(41)
_WORD = string.ascii_letters + string.digits
_HEX = "0123456789abcdef"


def _word(length: int, letters: str = _WORD) -> str:
    return "".join(_DRAW.choice(letters) for _ in range(length))


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@dataclass(frozen=True)
class Planted:
    """A secret, and a text that contains it as logs, messages and values do."""

    kind: str
    secret: str
    text: str
    pieces: tuple[str, ...] = ()
    """Parts of a secret that is written in parts, which must not be shown either."""

    @property
    def parts(self) -> tuple[str, ...]:
        """All texts that must not be shown."""
        return self.pieces or (self.secret,)


def _bare(kind: str, secret: str) -> Planted:
    return Planted(kind, secret, f"the server answered 401 to {secret} at step 12")


def _shapes() -> list[Planted]:
    """Return tokens that are recognized anywhere."""
    key_body = "\n".join(_word(64, _WORD + "+/") for _ in range(4))
    pem = f"-----BEGIN RSA PRIVATE KEY-----\n{key_body}\n-----END RSA PRIVATE KEY-----"
    openssh = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + key_body[::-1] + "\n-----END OPENSSH PRIVATE KEY-----"
    jwt = ".".join(
        base64.urlsafe_b64encode(part.encode()).decode().rstrip("=")
        for part in (
            json.dumps({"alg": "HS256", "typ": "JWT"}),
            json.dumps({"sub": "system:serviceaccount:a"}),
            _word(32),
        )
    )
    made = {
        "hugging-face": "hf_" + _word(34),
        "hugging-face-org": "api_org_" + _word(34),
        "wandb": "wandb_v1_" + _word(70),
        "wandb-server": "local-" + _word(40, _HEX),
        "openai": "sk-proj-" + _word(48),
        "openai-old": "sk-" + _word(48),
        "anthropic": "sk-ant-api03-" + _word(93),
        "openrouter": "sk-or-v1-" + _word(64, _HEX),
        "groq": "gsk_" + _word(52),
        "xai": "xai-" + _word(80),
        "perplexity": "pplx-" + _word(48),
        "fireworks": "fw_" + _word(24),
        "replicate": "r8_" + _word(37),
        "nvidia": "nvapi-" + _word(64),
        "langsmith": "lsv2_pt_" + _word(32, _HEX) + "_" + _word(10, _HEX),
        "databricks": "dapi" + _word(32, _HEX),
        "runpod": "rpa_" + _word(40, string.ascii_uppercase + string.digits),
        "github-classic": "ghp_" + _word(36),
        "github-app": "ghs_" + _word(36),
        "github-refresh": "ghr_" + _word(36),
        "github-fine": "github_pat_" + _word(22) + "_" + _word(59),
        "gitlab": "glpat-" + _word(20),
        "gitlab-deploy": "gldt-" + _word(20),
        "npm": "npm_" + _word(36),
        "pypi": "pypi-AgEIcHlwaS5vcmc" + _word(60),
        "docker-hub": "dckr_pat_" + _word(27),
        "aws-id": "AKIA" + _word(16, string.ascii_uppercase + "234567"),
        "aws-session-id": "ASIA" + _word(16, string.ascii_uppercase + "234567"),
        "google": "AIza" + _word(35),
        "google-oauth": "ya29." + _word(60),
        "google-client": "GOCSPX-" + _word(28),
        "azure-client": _word(3) + "8Q~" + _word(34),
        "azure-storage": _word(86, _WORD + "+/") + "==",
        "digitalocean": "dop_v1_" + _word(64, _HEX),
        "vault": "hvs." + _word(90),
        "tailscale": "tskey-auth-" + _word(20),
        "slack-bot": f"xoxb-{_word(12, string.digits)}-{_word(12, string.digits)}-{_word(24)}",
        "slack-app": f"xapp-1-{_word(11)}-{_word(13)}-{_word(64, _HEX)}",
        "slack-webhook": f"hooks.slack.com/services/T{_word(8)}/B{_word(8)}/{_word(24)}",
        "discord-webhook": f"discord.com/api/webhooks/{_word(18, string.digits)}/{_word(68)}",
        "telegram": _word(10, string.digits) + ":A" + _word(34),
        "stripe": "sk_live_" + _word(24),
        "sendgrid": f"SG.{_word(22)}.{_word(43)}",
        "twilio": "SK" + _word(32, _HEX),
        "grafana": "glsa_" + _word(32) + "_" + _word(8, _HEX),
        "sentry": "sntrys_" + _word(60),
        "linear": "lin_api_" + _word(40),
        "jwt": jwt,
        "pem": pem,
        "openssh": openssh,
    }
    return [_bare(kind, secret) for kind, secret in made.items()]


def _in_texts() -> list[Planted]:
    """Return secrets without a typical form, which are recognized by their place."""
    plain = lambda: "kq" + _word(12, string.ascii_lowercase) + "7"  # noqa: E731 - a password without a form
    found: list[Planted] = []

    def add(kind: str, layout: str, secret: str | None = None) -> None:
        secret = secret or plain()
        found.append(Planted(kind, secret, layout.replace("@@", secret)))

    add("basic-auth", "cannot reach https://trainer:@@@hub.example.com/v1 now")
    add("token-in-url", "git clone https://@@@git.example.com/team/repo.git failed")
    add("dsn-postgres", "engine postgresql+psycopg://rl:@@@db.example.com:5432/rollouts is gone")
    add("dsn-redis", "redis://:@@@cache:6379/0 timed out")
    add("dsn-mongo", "mongodb+srv://u:@@@cluster0.example.net/db refused")
    add("dsn-with-at", "amqp://u:@@@mq.example.com/v refused", plain() + "@x")
    add("dsn-odbc", "Server=db;Database=x;Uid=sa;Password=@@;Encrypt=yes")
    add(
        "azure-connection",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=@@;EndpointSuffix=core.windows.net",
        _word(40) + "==",
    )
    add(
        "aws-query",
        "GET https://b.s3.example.com/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=@@ HTTP/1.1",
        _word(64, _HEX),
    )
    add("aws-session-query", "https://b.s3.example.com/k?X-Amz-Security-Token=@@&X-Amz-Expires=60", _word(80))
    add("azure-sas", "https://a.blob.example.net/c?sv=2024-01-01&sig=@@&se=2026", _word(43) + "%3D")
    add("api-key-query", "GET /v1/models?key=@@ 403")
    add("authorization-bearer", "> Authorization: Bearer @@")
    add("authorization-basic", "> Authorization: Basic @@", _b64("trainer:" + plain()))
    add("authorization-own-scheme", "> authorization: Key @@")
    add(
        "authorization-sigv4",
        "> Authorization: AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host, Signature=@@",
        _word(64, _HEX),
    )
    add("authorization-python", "headers={'Authorization': 'Token @@', 'Accept': '*/*'}")
    add("api-key-header", "> X-Api-Key: @@")
    add("cookie", "> Cookie: theme=dark; sid=@@")
    add("flag", "vllm serve --api-key @@ --port 8000")
    add("flag-equals", "run --hf-token=@@ --seed 1")
    add("flag-quoted", 'run --password "@@" --seed 1')
    add("flag-in-list", "command ['run', '--token', '@@', '--seed', '1']")
    add("environment-file", "export WANDB_API_KEY=@@", _word(40, _HEX))
    add("yaml", "  db_password: @@")
    add("yaml-passphrase", "passphrase: @@ battery staple")
    add("yaml-block", "password: |-\n  @@\nother: 1")
    add("json-next-line", '"password":\n   "@@"')
    add("json", '{"client_secret": "@@", "scope": "a"}')
    add("json-in-json", '{"body": "{\\"api_key\\": \\"@@\\"}"}')
    add("python-repr", "Client(secret_key='@@', region='eu')")
    add("xml", "<password>@@</password>")
    add("netrc", "machine api.wandb.ai login user password @@")
    add("kubeconfig-token", "users:\n- name: a\n  user:\n    token: @@")
    add("kubeconfig-key", "    client-key-data: @@", _b64("-----BEGIN RSA PRIVATE KEY-----\n" + _word(60)))
    add("docker-auth", '{"auths": {"registry.example.com": {"auth": "@@"}}}', _b64("robot:" + plain()))
    add("aws-secret", "aws_secret_access_key = @@", _word(40, _WORD + "+/"))
    add("aws-secret-alone", "tried @@ and gave up", _word(40))
    token = "hf_" + _word(34)
    found.append(Planted("base64", token, f"data: {_b64(token)}", (token, _b64(token))))
    named = f"password={plain()}"
    found.append(Planted("base64-of-assignment", named, f"payload {_b64(named)} sent", (_b64(named),)))
    twice = "ghp_" + _word(36)
    found.append(Planted("base64-twice", twice, f"payload {_b64(_b64(twice))} sent", (_b64(_b64(twice)),)))
    split = "sk-proj-" + _word(48)
    found.append(Planted("split", split, f"got {split[:30]}\n    {split[30:]} here", (split[:30], split[30:])))
    folded = "glpat-" + _word(20, string.ascii_letters) + "9zQ4"
    found.append(Planted("split-backslash", folded, f"got {folded[:24]}\\\n{folded[24:]}", (folded[:24], folded[24:])))
    return found


PLANTED: tuple[Planted, ...] = (*_shapes(), *_in_texts())
BY_KIND = {one.kind: one for one in PLANTED}

ORDINARY: tuple[str, ...] = (
    "commit 3f2a9c1d4e5b6a7980123456789abcdef0123456",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "Qwen/Qwen3-VL-235B-A22B-Instruct-FP8",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "Qwen3VLMoeForConditionalGeneration",
    "/data/runs/demo/checkpoints/step_00000012.a0001/manifest.json",
    "run 0b7c3a52-4f7e-4c8e-9b5d-2a1f6c3e9d10 attempt 3",
    "GPU-5f2b7c1a-9e3d-4a6b-8c7d-1e2f3a4b5c6d",
    "loss 0.4213 grad_norm 1.2e-05 lr 3e-6 tokens: 512 tokens_per_second=18234.5",
    "max_tokens=2048, completion_tokens: 128, eos_token_id=151645, tokenizer: Qwen/Qwen3-8B",
    "pass@1: 0.5, passed: 12, bypass=1, compass: north",
    "2026-11-28 20:34:50.123 | INFO | step 12 of 200 took 3.2 s",
    "http://10.0.3.17:8000/v1/completions answered 503",
    "git+ssh://git@github.com/org/repo.git@v1.2.3",
    "module.submodule:function_name at line 42 of file_name_with_words.py",
    "pod demo-trainer-0 on node gke-pool-a-1b2c3d4e-xk29 restarted 2 times",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "model.layers.31.mlp.experts.127.gate_up_proj.weight",
    "s3://bucket/runs/demo/weights/v00000012",
    "author: Ada, authors=3, basic configuration is complete, the bearer of news",
    "imagePullSecrets: [{name: registry}], secretKeyRef: {name: a-keys, key: HF_TOKEN}",
    "RLRUN_API_KEY is not set; export RLRUN_API_KEY=$(openssl rand -hex 16)",
)
"""Texts that must not change."""
