"""Configuration of external servers in files and options, with the names of PRIME-RL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import VariableName

KEY_VARIABLES = ("VLLM_API_KEY", "OPENAI_API_KEY")
"""Default variables of the key; the first one that is set is used."""


class ClientConfig(Config):
    """OpenAI-compatible servers that answer instead of engines. They return no token ids and no log-probs, so no
    training uses them.
    """

    base_url: Annotated[list[str], Field(min_length=1, max_length=64)] = Field(
        default_factory=lambda: ["http://localhost:8000/v1"]
    )
    """URLs up to `/chat/completions`, such as `https://api.openai.com/v1`. Several servers must serve the same model.
    """
    api_key_var: VariableName | None = None
    """Environment variable of the key. Default: VLLM_API_KEY, otherwise OPENAI_API_KEY."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Additional headers of each request."""
    timeout: Annotated[float, Field(gt=0, le=86_400)] = 1200.0
    """Timeout of one reply with its connection, in seconds."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 6
    """Retries of a request after a transient error: 429, 5xx, a broken or slow connection, an incomplete answer."""
    skip_model_check: bool = False
    """Whether to use a server whose list of models lacks the model's name."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _one(cls, given: object) -> object:
        """Accept a single URL like PRIME-RL's files."""
        return [given] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _urls(self) -> Self:
        for url in self.base_url:
            if problem := _url_problem(url):
                raise ValueError(f"base_url: got {url!r}; {problem}")
        if len(set(self.base_url)) < len(self.base_url):
            raise ValueError("base_url: contains a URL twice; remove one of them")
        return self

    @model_validator(mode="after")
    def _headers(self) -> Self:
        for name, value in self.headers.items():
            if not name or not name.isascii() or any(c in name for c in " :\r\n\t") or not name.isprintable():
                raise ValueError(f"headers: got {name!r}; expected the name of a header such as X-Organization")
            if not value.isprintable():
                raise ValueError(f"headers.{name}: contains a character that is not allowed in headers")
            if name.lower() in ("content-type", "content-length", "transfer-encoding", "host"):
                raise ValueError(f"headers.{name}: is set by the HTTP client; remove it")
        return self

    @model_validator(mode="after")
    def _variable(self) -> Self:
        if self.api_key_var is not None and self.api_key_var.endswith("*"):
            raise ValueError(f"api_key_var: got {self.api_key_var!r}; expected the name of one variable")
        return self

    def api_key(self, env: Mapping[str, str]) -> str:
        """Return the key, or an empty text."""
        names = KEY_VARIABLES if self.api_key_var is None else (self.api_key_var,)
        return next((env[name].strip() for name in names if env.get(name, "").strip()), "")

    @property
    def key_source(self) -> str:
        """Name of the key's variable or variables, for messages."""
        return self.api_key_var or " or ".join(KEY_VARIABLES)


def _url_problem(url: str) -> str:
    """Return the problem of a server's URL, or an empty text."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port
        usable = False
    if not usable or not url.isprintable() or " " in url:
        return "expected a URL such as https://api.openai.com/v1"
    if parts.query or parts.fragment:
        return "expected a URL without ? and #"
    if "/chat/completions" in parts.path:
        return "expected the URL without /chat/completions, which is added"
    return ""
