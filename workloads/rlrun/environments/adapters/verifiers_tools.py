"""Tools of a verifiers taskset, called as methods instead of through an MCP server.

verifiers runs a `Toolset` in its own server process and transfers its state over HTTP. Here a tool's method is called in this process,
and its state is the rollout's `trace.state`. All rollouts share the process, so a tool that blocks delays all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

from mcp.server.mcpserver import MCPServer
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.mcp import Toolset
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.state import State
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace
from verifiers.v1.types import Tool

P = ParamSpec("P")


class ToolBox:
    """Functions of some toolsets: those of one rollout, or (`shared`) those of the taskset, which are set up once for all rollouts.

    Call `setup()` first. `verifiers_playable.check_toolsets` has already rejected toolsets that run as servers.
    """

    def __init__(self, toolsets: list[Toolset], *, shared: bool) -> None:
        self._toolsets = toolsets
        self._shared = shared
        self._servers: dict[str, tuple[Toolset, MCPServer, str]] = {}
        self.tools: list[Tool] = []

    async def setup(self, task: TaskData | None = None) -> None:
        """Run the toolsets' `setup` (and `setup_task`, for a rollout's own) and list their tools."""
        self._servers, self.tools = {}, []
        for toolset in self._toolsets:
            await toolset.setup()
            if not self._shared and task is not None:
                await toolset.setup_task(task)
            server = MCPServer(toolset.server_name or type(toolset).__name__)
            toolset._with_state = _in_place
            toolset.register(server)
            for tool in await server.list_tools():
                name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
                if name in self._servers:
                    raise ValueError(f"two tools are named {name!r}")
                self._servers[name] = (toolset, server, tool.name)
                self.tools.append(Tool(name=name, description=tool.description or "", parameters=tool.input_schema))

    def __contains__(self, name: str) -> bool:
        return name in self._servers

    async def call(self, name: str, arguments: dict[str, object], trace: Trace) -> str:
        """Call a tool and return its answer as text. If the tool raises, the answer is the error, as with MCP."""
        toolset, server, tool = self._servers[name]
        # verifiers uses the same context variable: concurrent rollouts with a shared toolset each get their own state.
        token = _call_state.set(trace.state if toolset._state_cls is not State else State())
        try:
            result = await server.call_tool(tool, arguments)
            content = mcp_content_to_chat_content(getattr(result, "content", []))
        except Exception as error:
            return f"error: {error}"
        finally:
            _call_state.reset(token)
        return content if isinstance(content, str) else "[content that is not text]"

    async def close(self) -> None:
        """Release the resources of the toolsets' `setup`."""
        for toolset in self._toolsets:
            await toolset._exit_stack.aclose()


def _in_place(fn: Callable[P, object]) -> Callable[P, Awaitable[object]]:
    """Replacement for verifiers' wrapper that transfers the state over HTTP around each call."""

    @functools.wraps(fn)
    async def call(*args: P.args, **kwargs: P.kwargs) -> object:
        result = fn(*args, **kwargs)
        return await result if isinstance(result, Awaitable) else result

    return call
