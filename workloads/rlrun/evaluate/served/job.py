"""Plan of a command for external servers. It needs only a specification and the model's name there, because no weights
are loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.model import ModelConfig
from rlrun.evaluate.job import QuestionOptions, chosen_environments, evaluation_settings
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.policies import Policy
from rlrun.evaluate.served.client import ClientConfig
from rlrun.evaluate.served.servers import Servers

_UID = "evaluation"


@dataclass(frozen=True, kw_only=True)
class ServedRequest(QuestionOptions):
    """Settings of a command line and its files. None: not given."""

    name: str
    """Name of the run."""
    spec: RLRunSpec
    """Valid specification. Its model is not read."""
    model: str | None
    """Name of the model at the servers. None: their only model."""
    client: ClientConfig
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with the key."""


@dataclass(frozen=True, kw_only=True)
class ServedJob(Plan):
    """Plan of a command, with its servers."""

    client: ClientConfig
    env: Mapping[str, str]
    model: str

    def servers(self) -> Servers:
        """Create the client of the servers, without a request."""
        return Servers(self.client, self.env)


def prepare_served(request: ServedRequest) -> ServedJob:
    """Prepare a command. A server is contacted only if the model has no name.

    Raises:
        RoleError: a field or option is wrong; the message contains its value and a fix.
        OSError: the folder for answers cannot be written.
    """
    spec = request.spec
    environments = chosen_environments(spec, request.environment_ids)
    evaluation = evaluation_settings(spec, request, environments)
    model = request.model if request.model is not None else asyncio.run(_only_model(request))
    work = (request.work or Path("evaluations") / request.name).absolute()
    work.mkdir(parents=True, exist_ok=True)
    changes = {
        "task": "RL",  # only its rollouts are used
        "model": ModelConfig(name="served"),  # placeholder: only the servers have its tokenizer and weights
        "environments": environments,
        "trainer": type(spec.trainer)(),
        "evaluation": evaluation,
        "policies": None,
    }
    config = resolve_spec(spec.model_copy(update=changes), name=request.name, uid=_UID, output_dir=str(work))
    where = " ".join(sorted(request.client.base_url))
    return ServedJob(
        work=work,
        orchestrator=config.orchestrator,
        policies=[Policy(None, "base", None, f"{model} of {where}", served_name=model)],
        split=request.split,
        export=_no_export,
        client=request.client,
        env=request.env,
        model=model,
    )


async def _only_model(request: ServedRequest) -> str:
    servers = Servers(request.client, request.env)
    try:
        return await servers.model(None)
    finally:
        await servers.close()


def _no_export(policy: Policy, _folder: Path) -> None:
    raise AssertionError(f"{policy.name} is served, not loaded")
