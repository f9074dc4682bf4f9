"""Agent of a verifiers rollout as a loop in this process: call the model, run the requested tools, call the model again.

verifiers runs a `Toolset` in its own server process (MCP) and transfers its state over HTTP. Here a tool's method is called in this
process, and its state is the rollout's `trace.state`. All rollouts share the process, so a tool that blocks delays all of them.

Around each model call the loop does the work of verifiers' interception server (limits and `@stop`, `@intercept` rewrites, the trace), with
RLRun's `ModelClient` in place of an HTTP endpoint. Tools are sent with the request: the model's chat template writes them into the prompt,
and the engine's parser finds the calls in the reply.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec

from mcp.server.mcpserver import MCPServer
from verifiers.v1 import graph
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.mcp import Toolset
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.session import RolloutSession
from verifiers.v1.state import State
from verifiers.v1.task import TaskData
from verifiers.v1.trace import ModelCall, TimeSpan, Trace
from verifiers.v1.types import (
    AssistantMessage,
    Request,
    Response,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)
from verifiers.v1.types import Message as VerifiersMessage

from rlrun.environments.protocol import Message, ModelClient, Reply

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


class ChatHarness(Harness[HarnessConfig]):  # type: ignore[misc]
    """Agent of one rollout.

    Attributes:
        conversation: all messages to and from the model.
        model_error: exception of the model client, or None.
    """

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    def __init__(
        self,
        config: HarnessConfig,
        model: ModelClient,
        sessions: Mapping[str, RolloutSession],
        toolboxes: Sequence[ToolBox],
    ) -> None:
        super().__init__(config)
        self._model = model
        self._sessions = sessions
        self._toolboxes = toolboxes
        self._prepared = False
        self.conversation: list[Message] = []
        self.model_error: Exception | None = None
        self._transcript: list[VerifiersMessage] = []

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Play the first segment: the task's prompt, if it has one, and the model's turns until a reply contains no tool call."""
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            opening: list[VerifiersMessage] = [UserMessage(content=prompt)]
        else:
            opening = list(prompt or [])
        return await self._play_segment(self._sessions[secret], data, system, opening)

    async def resume(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        messages: list[VerifiersMessage],
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Continue with new `messages` of the environment, which plays the user."""
        system = data.system_prompt if not self._transcript else None
        return await self._play_segment(self._sessions[secret], data, system, messages)

    async def _play_segment(
        self, session: RolloutSession, data: TaskData, system: str | None, messages: list[VerifiersMessage]
    ) -> ProgramResult:
        if not self._prepared:
            self._prepared = True
            await self._toolboxes[-1].setup(data)
        if system is not None:
            messages = [SystemMessage(content=system), *messages]
        self._append_messages(messages)
        while (response := await self._play_turn(session)) is not None:
            if not response.message.tool_calls:
                break
            self._append_messages([await self._call_tool(session, call) for call in response.message.tool_calls])
        return ProgramResult(exit_code=0, stdout="", stderr="")

    @property
    def _all_tools(self) -> list[Tool]:
        return [tool for box in self._toolboxes for tool in box.tools]

    @property
    def _tools_argument(self) -> dict[str, Any]:
        """Keyword argument `tools` for the model client; empty for a conversation without tools."""
        functions = [tool.model_dump(include={"name", "description", "parameters"}) for tool in self._all_tools]
        return {"tools": [{"type": "function", "function": function} for function in functions]} if functions else {}

    def _append_messages(self, messages: Sequence[VerifiersMessage]) -> None:
        self._transcript += messages
        self.conversation += [message_to_wire(message) for message in messages]

    async def _play_turn(self, session: RolloutSession) -> Response | None:
        """Make one model call with verifiers' hooks around it. Returns None if a limit or a `@stop` ended the rollout."""
        trace = session.trace
        if await session.refused() is not None:
            return None
        request, rewrites, stopped = await session.rewrite_request(
            Request(messages=self._transcript, tools=self._all_tools or None)
        )
        trace.request_rewrites.extend(rewrites)
        self._apply_rewrites(request.messages)
        turn = graph.prepare_turn(trace, request.messages, request.tools)
        if stopped is not None:
            turn.commit_prompt()
            trace.stop(stopped)
            return None
        started = time.time()
        try:
            reply = await self._model.complete(self.conversation, **self._tools_argument)
        except Exception as error:
            self.model_error = error
            raise
        response, records, stopped = await session.rewrite_response(_make_response(reply, trace))
        trace.response_rewrites.extend(records)
        node = turn.commit(response)
        trace.calls.append(
            ModelCall(
                node=node,
                model=session.ctx.model,
                finish_reason=response.finish_reason,
                usage=response.usage,
                time=TimeSpan(start=started, end=time.time()),
            )
        )
        session.consume_prepared(turn.tail)
        self._transcript.append(response.message)
        self.conversation.append(reply.message)
        stopped = stopped or await session.gate_tool_calls(node)
        if stopped is not None:
            trace.stop(stopped)
            return None
        return response

    def _apply_rewrites(self, messages: list[VerifiersMessage]) -> None:
        """Apply `@intercept` rewrites of messages to the conversation that is sent to the model."""
        for index, (before, after) in enumerate(zip(self._transcript, messages, strict=True)):
            if before != after:
                self._transcript[index] = after
                self.conversation[index] = message_to_wire(after)

    async def _call_tool(self, session: RolloutSession, call: ToolCall) -> ToolMessage:
        def tool_answer(content: str) -> ToolMessage:
            return ToolMessage(tool_call_id=call.id, name=call.name, content=content)

        box = next((box for box in self._toolboxes if call.name in box), None)
        if box is None:
            known = ", ".join(tool.name for tool in self._all_tools) or "none"
            return tool_answer(f"error: no function {call.name!r}; available functions: {known}")
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            return tool_answer(f"error: the arguments of {call.name!r} are not JSON: {error}")
        if not isinstance(arguments, dict):
            return tool_answer(f"error: the arguments of {call.name!r} must be a JSON object of names and values")
        return tool_answer(await box.call(call.name, arguments, session.trace))

    async def cleanup(self, trace: Trace, runtime: Runtime) -> None:
        await self._toolboxes[-1].close()


def _make_response(reply: Reply, trace: Trace) -> Response:
    calls = [ToolCall(id=call["id"], **call["function"]) for call in reply.tool_calls]
    return Response(
        id=f"{trace.id}-{trace.num_turns}",
        created=int(time.time()),
        model="policy",
        message=AssistantMessage(content=reply.message["content"], tool_calls=calls or None),
        finish_reason="length" if reply.truncated else "tool_calls" if calls else "stop",
        usage=Usage(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens),
    )
