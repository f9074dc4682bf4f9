"""`rlrun env list`, `env try ID` and `env install SOURCE`: environments of this machine.

- `install` installs an environment's package into a separate Python, and prints the lines of a manifest that use it.
- `list` prints the environments.
- `try` plays one episode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlrun.config.loading.parser import Parser
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls

if TYPE_CHECKING:
    from rlrun.environments.protocol import Message, ModelClient
    from rlrun.environments.tryout import Tried


HUB_VARIABLE = "RLRUN_ENVIRONMENT_HUB"


def install_parser() -> Parser:
    """Return the parser of `rlrun env install`."""
    p = Parser(
        prog="rlrun env install",
        description="Install an environment's package and its dependencies into a separate Python. pip installs them with its usual "
        "configuration (PIP_INDEX_URL, PIP_FIND_LINKS, ...).",
    )
    p.add_argument(
        "source",
        metavar="SOURCE",
        help="a wheel, a folder, a requirement such as word-chain==1.2, or owner/name@version from a hub",
    )
    p.add_argument(
        "--into", metavar="DIR", help="new folder for that Python (default: ~/.local/share/rlrun/environments/NAME); in a "
        "cluster a folder on the run's volume",
    )  # fmt: skip
    p.add_argument(
        "--hub",
        metavar="URL",
        help=f"package index of the hub, with {{owner}}: https://HUB/{{owner}}/simple/ (default: {HUB_VARIABLE})",
    )
    p.add_argument(
        "--with",
        metavar="REQUIREMENT",
        action="append",
        default=[],
        dest="beside",
        help="additional package, such as verifiers==0.1.14; may be repeated",
    )
    p.add_argument(
        "--python", metavar="FILE", default=sys.executable, help="interpreter that creates it (default: this one)"
    )
    p.add_argument("--replace", action="store_true", help="replace an existing folder")
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    return p


def run_install(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    options = install_parser().parse_args(list(argv))
    from rlrun.environments.installation import InstallError, install_environment, source_of

    def say(line: str) -> None:
        print(escape_controls(line), file=sys.stderr)

    try:
        source = source_of(options.source, options.hub or os.environ.get(HUB_VARIABLE) or None)
        folder = Path(options.into).expanduser() if options.into else _default_folder(source.name)
        found = install_environment(
            source, folder.absolute(), python=options.python, beside=options.beside, replace=options.replace, say=say
        )
    except InstallError as error:
        print(f"rlrun env install: {escape_controls(str(error))}", file=sys.stderr)
        return exit_codes.CONFIGURATION
    if options.json:
        entry = {"id": found.id, "python": str(found.python)}
        print(
            json.dumps(
                {"name": found.name, "version": found.version, "verifiers": found.verifiers, "environment": entry}
            )
        )
        return exit_codes.OK
    beside = (
        f" with verifiers {found.verifiers}"
        if found.verifiers
        else " without verifiers; write its function into the id"
    )
    print(f"installed {found.name} {found.version}{beside}\n\nenvironments:")
    print(f"  - id: {found.id}\n    python: {found.python}")
    if found.verifiers:
        print(f"\nrlrun env try {found.id} --python {found.python}")
    return exit_codes.OK


def _default_folder(name: str) -> Path:
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "rlrun" / "environments" / re.sub(r"[-_.]+", "-", name).lower()


KEY_VARIABLE = "OPENAI_API_KEY"
_MARK = "> "


def env_parser() -> Parser:
    """Return the parser of `rlrun env`."""
    p = Parser(prog="rlrun env", description="List, try and install environments.")
    p.add_argument(
        "action",
        choices=("list", "try", "install"),
        help="list the shipped environments, play one episode (rlrun env try ID), or install an environment (rlrun env install SOURCE)",
    )
    p.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="see rlrun env try --help and rlrun env install --help"
    )
    return p


def try_parser() -> Parser:
    """Return the parser of `rlrun env try`."""
    p = Parser(
        prog="rlrun env try",
        description="Play one episode of an environment and print it. Replies come from --reply, from a server (--base-url), or "
        "from standard input, one reply per line.",
    )
    p.add_argument("id", metavar="ID", help="a shipped environment, verifiers:<name>, or package.module:function")
    p.add_argument(
        "--args", metavar="JSON", type=_parse_object, default={}, help="arguments of the environment, as a JSON object"
    )
    p.add_argument("--split", choices=("train", "eval"), default="train", help="split of the tasks (default: train)")
    p.add_argument("--task", metavar="N", type=_parse_index, default=0, help="index of the task, from 0 (default: 0)")
    p.add_argument(
        "--reply",
        metavar="TEXT",
        action="append",
        help="reply of the model; repeat for more turns. If the environment offers functions, a reply can call one: "
        '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    )
    p.add_argument("--base-url", metavar="URL", help="an OpenAI-style server, such as http://localhost:8000/v1")
    p.add_argument("--model", metavar="NAME", help="name of the model at the server")
    p.add_argument(
        "--api-key-env",
        metavar="NAME",
        default=KEY_VARIABLE,
        help=f"variable with the server's key (default: {KEY_VARIABLE})",
    )
    p.add_argument(
        "--temperature", metavar="X", type=float, default=1.0, help="sampling temperature of the server (default: 1)"
    )
    p.add_argument(
        "--max-tokens", metavar="N", type=int, default=1024, help="maximum length of a reply in tokens (default: 1024)"
    )
    p.add_argument(
        "--timeout-seconds", metavar="S", type=float, default=600.0, help="time limit of the episode (default: 600)"
    )
    p.add_argument("--python", metavar="FILE", help="Python interpreter with the environment's packages")
    p.add_argument("--json", action="store_true", help="print the episode as JSON")
    return p


def run(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    options = env_parser().parse_args(list(argv)[:1] or ["--help"])
    rest = list(argv)[1:]
    if options.action == "try":
        return _try_environment(rest)
    if options.action == "install":
        return run_install(rest)
    if rest:
        env_parser().error(f"list takes no argument, got {rest[0]!r}")
    from rlrun.environments.registry import known_environments

    shipped = known_environments()
    width = max(map(len, shipped))
    print("\n".join(f"{name:<{width}}  {said}" for name, said in shipped.items()))
    return exit_codes.OK


def _try_environment(argv: Sequence[str]) -> int:
    p = try_parser()
    options = p.parse_args(list(argv))
    if options.reply and options.base_url:
        p.error("--reply and --base-url are two models; choose one")
    if (options.base_url is None) != (options.model is None):
        p.error("--base-url and --model belong together; add the other one")

    from rlrun.environments.episode import EpisodeError
    from rlrun.environments.process.life import Command
    from rlrun.environments.process.talk import StartError
    from rlrun.environments.stage import TaskRef
    from rlrun.environments.tryout import Deadlines, TryError, play_once

    command = Command(options.id, options.args, options.python)
    task = TaskRef(options.split, options.task)
    try:
        tried = asyncio.run(
            play_once(command, task, _model_client(options), deadlines=Deadlines(episode=options.timeout_seconds))
        )
    except StartError as error:
        return _print_refusal(str(error), exit_codes.CONFIGURATION)
    except (TryError, EpisodeError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, TryError) else error
        return _print_refusal(str(cause), cause.code if isinstance(cause, TryError) else exit_codes.DATA)
    print(json.dumps(episode_document(tried), indent=2) if options.json else "\n".join(episode_lines(tried)))
    return exit_codes.OK


def _print_refusal(message: str, code: int) -> int:
    print(f"rlrun env try: {escape_controls(message)}", file=sys.stderr)
    return code


def _model_client(options: argparse.Namespace) -> ModelClient:
    from rlrun.environments.tryout import ServedModel, WrittenReplies

    if options.base_url:
        return ServedModel(
            options.base_url,
            options.model,
            api_key=os.environ.get(options.api_key_env, ""),
            temperature=options.temperature,
            max_tokens=options.max_tokens,
        )
    if options.reply:
        replies = iter(options.reply)
        return WrittenReplies(lambda _: next(replies, None))
    return WrittenReplies(_reply_reader())


def _reply_reader() -> Callable[[Sequence[Message]], str | None]:
    """Return a function that prints the new messages of a conversation and reads one line as the reply."""
    shown = 0

    def read_reply(messages: Sequence[Message]) -> str | None:
        nonlocal shown
        for message in messages[shown:]:
            print("\n".join(_message_lines(message)), file=sys.stderr)
        shown = len(messages) + 1
        print(_MARK, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    return read_reply


def episode_lines(tried: Tried) -> list[str]:
    """Return the lines that show an episode to people."""
    played = tried.played
    shown = [f"task {played.task_id} ({tried.sizes['train']} train, {tried.sizes['eval']} eval)"]
    for message in played.episode.messages:
        shown += _message_lines(message)
    shown += [
        "",
        f"reward {played.score.reward:g}",
        *(f"  {name} {value:g}" for name, value in played.score.metrics.items()),
    ]
    if played.episode.info:
        shown.append(f"info {escape_controls(json.dumps(played.episode.info))}")
    if tried.printed:
        shown += ["output of the environment:", *(f"  | {escape_controls(line)}" for line in tried.printed)]
    return shown


def _message_lines(message: Message) -> list[str]:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content)
    calls = [f"  calls {json.dumps(call.get('function', call))}" for call in message.get("tool_calls") or ()]
    return [
        f"[{message.get('role')}]",
        *(f"  {escape_controls(line)}" for line in text.splitlines()),
        *map(escape_controls, calls),
    ]


def episode_document(tried: Tried) -> dict[str, Any]:
    """Return the JSON document of an episode."""
    played = tried.played
    return {
        "task": played.task_id,
        "tasks": tried.sizes,
        "messages": played.episode.messages,
        "replies": played.episode.replies,
        "info": played.episode.info,
        "reward": played.score.reward,
        "metrics": played.score.metrics,
    }


def _parse_scalar(text: str) -> object:
    """Parse a word as JSON (number, boolean, ...); otherwise return the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        pairs = [part.partition("=") for part in text.split(",")]
        if all(name.strip().isidentifier() and equals for name, equals, _ in pairs):
            meant = json.dumps({name.strip(): _parse_scalar(value.strip()) for name, _, value in pairs})
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object; write --args '{meant}'") from None
        raise argparse.ArgumentTypeError(f"got {text!r}, expected JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'got {text!r}, expected a JSON object such as {{"length": 4}}')
    return found


def _parse_index(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 0")
    return int(text)
