"""Reader of scripts against bash: random scripts accepted by `bash -n` end in time, with the same words as bash."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator

import pytest

from rlrun.config.loading.problems import ConfigError
from rlrun.convert.readers.shell_scripts import Command, read_script

LIMIT_S = 5.0
PROBE = 'python3() { printf "%s\\0" "$@"; exit 0; }\n'
"""Function that prints the arguments of the training command instead of running it."""
VALUES = ("1", "2", "8", "a.b/c", "'it is'", '"x y"', "", "$A", '"$B"', "${C:-7}", "${A%%.*}", "$((3 * 2))", "q\\ r")
TESTS = (
    '[ "$A" = 1 ]',
    "[[ $A == a* ]]",
    '[ -z "$B" ]',
    "[[ -n $C && $A != 2 ]]",
    "(( 3 > 2 ))",
    "true",
    "! true",
    "[ 4 -lt 3 ]",
    "[ -e /nowhere ]",
    "command -v no-such-program &> /dev/null",
)
WORDS = (
    "x.a=$A",
    '"x.b=$B"',
    "x.c=${C}",
    '"${L[@]}"',
    "x.d=${A:-none}",
    "x.e='$A'",
    'x.f="${B/i/o}"',
    "x.g=${#L[@]}",
    "x.h=$((2+${N:-1}))",
)


def draw_statement(draw: random.Random, depth: int = 0) -> str:
    """Return a statement that changes variables and affects only the shell."""
    value = draw.choice(VALUES)
    simple = (
        f"{draw.choice('ABC')}={value}",
        f"export {draw.choice('ABC')}={value}",
        f"L+=(l.x={draw.choice('12')} {value})",
        f"L=(l.y=1 # why\n {value})",
        "N=$((${N:-1} + 1))",
        f"{draw.choice(TESTS)} && A=yes || B=no",
        "echo hello > /dev/null 2>&1",
        'cat > /dev/null << EOF\nx = "unclosed $A\nEOF',
        f"f() {{ {draw.choice('AB')}=$1; }}\nf {value or 'z'}",
        "unset C",
    )
    if depth > 2 or draw.random() < 0.5:
        return draw.choice(simple)
    inner, other = (draw_statement(draw, depth + 1) for _ in range(2))
    return draw.choice(
        (
            f"if {draw.choice(TESTS)}; then\n{inner}\nelse {other}\nfi",
            f"if {draw.choice(TESTS)}\nthen {inner}\nelif {draw.choice(TESTS)}; then\n{other}\nfi",
            f"case $A in\n a*|2) {inner}\n;;\n *) {other}\n;; esac",
            f"for i in 1 {value} 3; do\n{inner}\nB=$i\ndone",
            f"{{ {inner}\n}}",
            f"until (true); do {inner}\ndone",
            f"while false; do {inner}\ndone",
            f"g() {{\n{inner}\n}}\ng",
            f"{draw.choice(TESTS)} || {{ {inner}\n}}",
        )
    )


def draw_script(seed: int) -> str:
    draw = random.Random(seed)
    statements = [draw_statement(draw) for _ in range(draw.randint(1, 6))]
    words = " \\\n    ".join(draw.sample(WORDS, draw.randint(1, 5)))
    command = f"python3 -m verl.trainer.main_ppo {words}{draw.choice(('', ' 2>&1', ' 2> /dev/null'))}"
    around = draw.choice(("{}", "{}", "h() {{\n{}\n}}\nh", "if true; then {}\nfi", "if [ -e /bin ]; then {}\nfi"))
    return "\n".join([*statements, around.format(command)]) + "\n"


def run_bash(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", *arguments], capture_output=True, timeout=20, env={"PATH": "/usr/bin:/bin"})


def read_or_refuse(script: str) -> list[Command] | None:
    """Return the commands of a script, or None if it is refused with its line."""
    try:
        return read_script(script, "run.sh", {})
    except ConfigError as error:
        problem = error.problems[0]
    assert problem.line is not None or "characters" in problem.message
    return None


def compare_words(seeds: range) -> Iterator[tuple[str, list[str] | None, list[str]]]:
    """Yield each script with the words from the reader and from bash; None if the reader refuses it or a word is uncertain."""
    for seed in seeds:
        script = draw_script(seed)
        if run_bash("-n", "-c", script).returncode:
            continue
        start = time.monotonic()
        found = read_or_refuse(script)
        assert time.monotonic() - start < LIMIT_S, script
        if found is None:
            yield script, None, []
            continue
        commands = [one for one in found if one.module == "verl.trainer.main_ppo"]
        assert commands, f"no command found in\n{script}"
        if commands[0].is_certain and not any(word.unset for word in commands[0].words):
            passed_on = run_bash("-c", PROBE + script).stdout.decode().split("\0")[:-1]
            yield script, [word.text for word in commands[0].words], passed_on[2:]


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 2000), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_reader_returns_same_words_as_bash(seeds: range) -> None:
    """At least one script in six has only certain words; the grammar refuses at most one in ten (documents in branches)."""
    results = list(compare_words(seeds))
    for script, read, passed_on in results:
        assert read is None or read == passed_on, script
    assert sum(read is not None for _, read, _ in results) > len(seeds) // 6
    assert sum(read is None for _, read, _ in results) < len(seeds) // 10


@pytest.mark.parametrize(
    "seeds", [range(80), pytest.param(range(80, 3000), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_mangled_scripts_are_read_or_refused_in_time(seeds: range) -> None:
    """Random characters are deleted or inserted: bash accepts some of these scripts, and none may hang the reader."""
    for seed in seeds:
        draw = random.Random(seed)
        script = list(draw_script(seed))
        for _ in range(draw.randint(1, 4)):
            script[draw.randrange(len(script))] = draw.choice(
                ("", ";", "\n", "'", '"', "$(", ")", "{", "&", "|", "\\", "&>", "#", "((", "é")
            )
        start = time.monotonic()
        read_or_refuse("".join(script))
        assert time.monotonic() - start < LIMIT_S, "".join(script)
