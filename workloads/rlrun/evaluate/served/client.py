"""Servers that answer in place of engines, as files and options name them; the names are PRIME-RL's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import VariableName

KEY_VARIABLES = ("VLLM_API_KEY", "OPENAI_API_KEY")
"""Variables of the key where none is named; the first that is set counts."""


class ClientConfig(Config):
    """OpenAI-style servers that answer in place of engines. They give no token ids and no log-probs: nothing is trained on them."""

    base_url: Annotated[list[str], Field(min_length=1, max_length=64)] = Field(
        default_factory=lambda: ["http://localhost:8000/v1"]
    )
    """URLs up to `/chat/completions`, such as `https://api.openai.com/v1`; of several, all serve the same model."""
    api_key_var: VariableName | None = None
    """Variable of the environment that holds the key. Default: VLLM_API_KEY, or else OPENAI_API_KEY."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers of each request."""
    timeout: Annotated[float, Field(gt=0, le=86_400)] = 1200.0
    """Longest wait for one reply with its connection, in seconds."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 6
    """Further tries of a request after an error that passes: 429, 5xx, a broken or slow connection, an answer that breaks off."""
    skip_model_check: bool = False
    """Ask a server that lists its models without the model's name among them."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _one(cls, given: object) -> object:
        """One URL is a list of one, as in PRIME-RL's files."""
        return [given] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _urls(self) -> Self:
        for url in self.base_url:
            if problem := _url_problem(url):
                raise ValueError(f"base_url: got {url!r}, {problem}")
        if len(set(self.base_url)) < len(self.base_url):
            raise ValueError("base_url: names a URL twice; leave one out")
        return self

    @model_validator(mode="after")
    def _headers(self) -> Self:
        for name, value in self.headers.items():
            if not name or not name.isascii() or any(c in name for c in " :\r\n\t") or not name.isprintable():
                raise ValueError(f"headers: got {name!r}, expected the name of a header such as X-Organization")
            if not value.isprintable():
                raise ValueError(f"headers.{name}: has a character that no header holds")
            if name.lower() in ("content-type", "content-length", "transfer-encoding", "host"):
                raise ValueError(f"headers.{name}: is set by the request itself; remove it")
        return self

    @model_validator(mode="after")
    def _variable(self) -> Self:
        if self.api_key_var is not None and self.api_key_var.endswith("*"):
            raise ValueError(f"api_key_var: got {self.api_key_var!r}, expected the name of one variable")
        return self

    def api_key(self, env: Mapping[str, str]) -> str:
        """The key; empty: none is set."""
        names = KEY_VARIABLES if self.api_key_var is None else (self.api_key_var,)
        return next((env[name].strip() for name in names if env.get(name, "").strip()), "")

    @property
    def key_source(self) -> str:
        """Name of the variable or variables of the key, for messages."""
        return self.api_key_var or " or ".join(KEY_VARIABLES)


def _url_problem(url: str) -> str:
    """Why a URL is none of a server; empty: it is one."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        usable = False
    if not usable or not url.isprintable() or " " in url:
        return "expected a URL such as https://api.openai.com/v1"
    if parts.query or parts.fragment:
        return "expected a URL without ? and #"
    if "/chat/completions" in parts.path:
        return "expected the URL up to /chat/completions, which is added"
    return ""
