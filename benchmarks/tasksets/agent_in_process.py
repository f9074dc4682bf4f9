"""The cheapest agent that verifiers' runner can have: a loop in the runner's own process that asks its endpoint over one connection pool.

verifiers' contract for it: every model call goes through `endpoint` with `secret`; then the trace is the record of what ran.
"""

from typing import ClassVar

import aiohttp
import verifiers.v1 as vf
from turns import AGAIN
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime


class AgentInProcess(Harness[HarnessConfig]):
    """Asks once, or `turns` times."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False
    connections: ClassVar[aiohttp.ClientSession]
    """Whoever runs it opens and closes them."""
    turns: ClassVar[int] = 1

    async def launch(
        self,
        ctx: ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        for turn in range(self.turns):
            if turn:
                messages.append({"role": "user", "content": AGAIN})
            body = {"model": ctx.model, "messages": messages, "max_tokens": 8, "logprobs": True}
            async with self.connections.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                message = (await answer.json())["choices"][0]["message"]
            messages.append({"role": "assistant", "content": message["content"]})
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AgentInProcess"]
