"""`rlrun completion SHELL`: shell completion of commands, their options and the names of runs."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.config.loading.parser import Parser
from rlrun.runtime import exit_codes

ON_RUNS = (
    "get",
    "status",
    "why",
    "watch",
    "logs",
    "rollouts",
    "compare",
    "plot",
    "cost",
    "replay",
    "fork",
    "debug",
    "pull",
    "put",
    "suspend",
    "resume",
    "restart",
    "scale",
    "set",
)
"""Commands whose arguments are runs; `kubectl rlrun` has only these."""


_BASH = """\
# rlrun completion bash; for this shell: source <(rlrun completion bash)
_rlrun() {
  local cur="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}"
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "%(commands)s" -- "$cur")); return; fi
  case "$cur" in
    -*) COMPREPLY=($(compgen -W "$("$1" "$command" --help 2>/dev/null | grep -oE -- '--[a-z][a-z-]*' | sort -u)" -- "$cur")); return ;;
  esac
  case " %(on_runs)s " in
    *" $command "*) COMPREPLY=($(compgen -W "$("$1" get -o name 2>/dev/null)" -- "$cur") $(compgen -d -- "$cur")) ;;
    *) COMPREPLY=($(compgen -f -- "$cur")) ;;
  esac
}
complete -o filenames -F _rlrun rlrun
complete -o filenames -F _rlrun kubectl-rlrun
"""


_ZSH = """\
#compdef rlrun kubectl-rlrun
# rlrun completion zsh; for this shell: source <(rlrun completion zsh)
_rlrun() {
  local -a words_of_it
  if (( CURRENT == 2 )); then
    words_of_it=(%(zsh)s)
    _describe command words_of_it
    return
  fi
  if [[ $words[CURRENT] == -* ]]; then
    words_of_it=(${(f)"$($words[1] $words[2] --help 2>/dev/null | grep -oE -- '--[a-z][a-z-]*' | sort -u)"})
    compadd -a words_of_it
    return
  fi
  case " %(on_runs)s " in
    *" $words[2] "*) words_of_it=(${(f)"$($words[1] get -o name 2>/dev/null)"}); compadd -a words_of_it; _files -/ ;;
    *) _files ;;
  esac
}
compdef _rlrun rlrun kubectl-rlrun
"""


_FISH = """\
# rlrun completion fish; for all shells: rlrun completion fish > ~/.config/fish/completions/rlrun.fish
complete -c rlrun -f -n __fish_use_subcommand
%(fish)s
complete -c rlrun -n "__fish_seen_subcommand_from %(on_runs)s" -a "(rlrun get -o name 2>/dev/null)"
set -l options "rlrun (commandline -opc)[2] --help 2>/dev/null | string match -rag -- '(--[a-z][a-z-]*)' | sort -u"
complete -c rlrun -n "not __fish_use_subcommand" -a "($options)"
"""


SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion_parser() -> Parser:
    """Return the parser of `rlrun completion`."""
    p = Parser("rlrun completion", "Print the completion script of a shell: source <(rlrun completion bash)")
    p.add_argument("shell", choices=sorted(SHELLS), help="name of the shell")
    return p


def completion_script(shell: str, commands: Sequence[tuple[str, str]]) -> str:
    """Return the completion script of a shell.

    Args:
        shell: one of `SHELLS`.
        commands: pairs of name and summary.
    """
    plain = [(name, summary.replace("'", "").replace(":", "")) for name, summary in commands]
    return SHELLS[shell] % {
        "commands": " ".join(name for name, _ in plain),
        "on_runs": " ".join(ON_RUNS),
        "zsh": " ".join(f"'{name}:{summary}'" for name, summary in plain),
        "fish": "\n".join(
            f"complete -c rlrun -n __fish_use_subcommand -a {name} -d '{summary}'" for name, summary in plain
        ),
    }


def run_completion(argv: Sequence[str]) -> int:
    """Run `rlrun completion` and return the exit code."""
    from rlrun.cli.main import COMMANDS

    options = completion_parser().parse_args(list(argv))
    print(completion_script(options.shell, [(name, command.summary) for name, command in COMMANDS.items()]), end="")
    return exit_codes.OK
