"""Readers of shell scripts and Hydra overrides, which execute nothing."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from rlrun.config.loading.problems import ConfigError
from rlrun.convert.conversion import read_settings
from rlrun.convert.readers.hydra import read_override, read_scalar, read_yaml, resolve_references, without_deleted
from rlrun.convert.readers.shell_scripts import read_script

START = "\npython3 -m verl.trainer.main_ppo "


def read_words(script: str, **environment: str) -> list[str]:
    commands = [command for command in read_script(script, "run.sh", environment) if command.has_settings]
    return [word.text for word in commands[0].words] if commands else []


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a=1\nb=${a}2" + START + "x.a=$b", ["x.a=12"]),
        ("n=${N:-2}\nm=${n:-9}" + START + "x.a=$n x.b=$m", ["x.a=2", "x.b=2"]),
        ("a=$((1024 * 2))" + START + "x.a=$((a + 1)) x.b=$((a * (1 + 2)))", ["x.a=2049", "x.b=6144"]),
        ("f=\"['$HOME/a', '$HOME/b']\"" + START + 'x.f="$f"', ["x.f=['/root/a', '/root/b']"]),
        (START + "x.l=['a','b'] y.l='[\"a\"]'", ["x.l=[a,b]", 'y.l=["a"]']),
        ("A=(\n  x.a=1 # why\n  x.b='2 3'\n)\nA+=(x.c=3)" + START + '"${A[@]}"', ["x.a=1", "x.b=2 3", "x.c=3"]),
        (START + "x.a=1 \\\n  x.b=2 \\", ["x.a=1", "x.b=2"]),
        ("E=()" + START + '"${E[@]}" x.a=1 "$@" $1', ["x.a=1"]),
        ('C="\n  x.a=1 \\\n  x.b=2"\nD="${C//x./y.}"' + START + "$C $D", ["x.a=1", "x.b=2", "y.a=1", "y.b=2"]),
        (
            "b=fsdp\nif [[ $b == megatron ]]; then\n v=1\nelif [ $b = fsdp ]; then v=2\nelse v=3\nfi"
            + START
            + "x.v=$v",
            ["x.v=2"],
        ),
        ('if [ "${V:-1}" != 0 ]; then L=(uv run python3); else L=(python3); fi\n"${L[@]}" -m m x.a=1', ["x.a=1"]),
        (
            'M="x.m=1 +x.n=2"\nA="x.a=1"\nB="$A $M"\nC="${A} ${M}"'
            + START
            + '$B y.b=1 $C y.c="$A  $M" y.d="$A\t$((1 + 1)) $M"',
            [
                "x.a=1",
                "x.m=1",
                "+x.n=2",
                "y.b=1",
                "x.a=1",
                "x.m=1",
                "+x.n=2",
                "y.c=x.a=1  x.m=1 +x.n=2",
                "y.d=x.a=1\t2 x.m=1 +x.n=2",
            ],
        ),
        (
            'A="x.a=1"\nB="$A \\\n  $A"\nif [ "$A ${A#x}" = "x.a=1 .a=1" ]; then v=1; fi' + START + 'x.b="$B" x.v=$v',
            ["x.b=x.a=1   x.a=1", "x.v=1"],
        ),
        ("case $HOME in\n /ro*|b) v=1 ;;\n *) v=2; exit 1 ;;\nesac" + START + "x.v=$v", ["x.v=1"]),
        ('[ -z "$N" ] && v=none || v=some' + START + "x.v=$v", ["x.v=none"]),
        ('cat > f.py << EOF\nx = "unclosed\nEOF\n' + START + "x.a=1 2>&1 | tee log", ["x.a=1"]),
        ("for i in 1 2; do v=$i; done" + START + "x.v=$v", ["x.v=2"]),
        ("f() {\n  echo $1\n}" + START + "x.a=1 \\\n    x.b=2\n", ["x.a=1", "x.b=2"]),
        ("ray job submit --working-dir . -- python3 -m recipe.dapo.main_dapo x.a=1", ["x.a=1"]),
        ("if command -v x &> /dev/null; then :; fi" + START + "x.a=1", ["x.a=1"]),
        (START + 'x.a=1 > "logs/my run.log" 2>&1 &', ["x.a=1"]),
        ("until (ray status); do sleep 1; done" + START + "x.a=1", ["x.a=1"]),
        ("function train { local n=$1; shift;" + START + 'x.n=$n "$@"\n}\ntrain 3 x.b="c d"', ["x.n=3", "x.b=c d"]),
        ('if [ "${HOSTNAME##*-}" -eq 0 ]; then' + START + "x.a=1\nelse sleep infinity; fi", ["x.a=1"]),
        ("while true; do" + START + "x.a=1; done", ["x.a=1"]),
        ('srun --ntasks=1 bash -c "n=2;' + START[1:] + 'x.n=\\$n"', ["x.n=2"]),
        ('CMD="python3 -m m x.a=1"\neval $CMD x.b=2', ["x.a=1", "x.b=2"]),
        ('if [ "$#" -lt 1 ]; then echo usage; exit 1; fi\nn=${1:-4}' + START + "x.n=$n", ["x.n=4"]),
        (
            "a=(x.a=1 x.b=2)\nf() { " + START[1:] + '"$@" ${a[1]} x.c=${#a[@]}; }\nf "${a[@]:0:1}"',
            ["x.a=1", "x.b=2", "x.c=2"],
        ),
        ("n=8; (( n > 4 )) && m=big || m=small" + START + "x.m=$m x.q=$(( n > 4 ? n / 2 : 1 ))", ["x.m=big", "x.q=4"]),
        (
            "p=a.b.c" + START + "x.p=${p%.*} x.q=${p%%.*} x.r=${p:2:1} x.s=${p/b/z} x.t=${p^^}",
            ["x.p=a.b", "x.q=a", "x.r=b", "x.s=a.z.c", "x.t=A.B.C"],
        ),
        ("b=3\nc=${C:-$((b + 2))}" + START + "x.c=$c x.d=${D:-$((b * 2))}", ["x.c=5", "x.d=6"]),
        ('n="a[1-3]"\nr="${n#*[}"\nr="${r%%]*}"' + START + "x.r=$r", ["x.r=1-3"]),
        (START + "x.a=it\\'s x.b='$HOME' x.c=$'a\\tb'", ["x.a=it's", "x.b=$HOME", "x.c=a\tb"]),
        ("p=${0##*/}\nm=Qwen/Qwen3-8B" + START + "x.n=${m##*/} x.o=${m%%/*}", ["x.n=Qwen3-8B", "x.o=Qwen"]),
    ],
)
def test_scripts(script: str, expected: list[str]) -> None:
    assert read_words(script, HOME="/root") == expected


def test_command_substitution_is_not_executed() -> None:
    command = read_script(
        "n=$1\nd=$(date +%s)" + START + "x.name=run-$d x.e=$NONE x.g=$(nvidia-smi) x.h=$n", "run.sh", {}
    )[0]
    assert [(word.text, word.unset) for word in command.words] == [
        ("x.name=run-", ("d (line 2)",)),
        ("x.e=", ("NONE",)),
        ("x.g=", ("$(nvidia-smi)",)),
        ("x.h=", ("n (line 1)",)),
    ]


@pytest.mark.parametrize(
    ("script", "line", "problem"),
    [
        ("a=1\nb='x", 2, "shell syntax error"),
        ("if [ 1 = 1 ]; then\necho", 1, "shell syntax error up to line 2: 'if"),
        ("x.a=1\n)\n", 1, "shell syntax error"),
        ("A=(x\n", 1, "'\\)' is missing"),
        ('bash -c "a=(1"', 1, "'\\)' is missing"),
    ],
)
def test_unreadable_script_names_line(script: str, line: int | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        read_script(script, "run.sh", {})
    assert raised.value.problems[0].line == line


def test_unknown_condition_leaves_variables_unset() -> None:
    both = "if command -v nvidia-smi &> /dev/null; then N=8; M=1; else N=1; M=1; fi" + START + "x.n=$N x.m=$M"
    command = next(one for one in read_script(both, "run.sh", {}) if one.has_settings)
    assert [(word.text, word.unset) for word in command.words] == [("x.n=1", ("N (line 1)",)), ("x.m=1", ())]
    assert command.is_certain


def test_unknown_array_item_keeps_other_items() -> None:
    script = (
        "D=${D:-$(probe)}\nN=8\nA=(x.a=1)\ncase $D in\n gpu) ;;\n npu) N=16; A+=(x.a=2 x.b=3) ;;\n *) exit 1 ;;\nesac\n"
    )
    script += "B=(x.n=$N x.c=4)" + START + '"${A[@]}" "${B[@]}"'
    command = next(one for one in read_script(script, "run.sh", {}) if one.has_settings)
    assert [(word.text, word.unset) for word in command.words] == [
        ("x.a=1", ()),
        ("x.a=2", ("A (line 4)",)),
        ("x.b=3", ("A (line 4)",)),
        ("x.n=16", ("N (line 4)",)),
        ("x.c=4", ()),
    ]
    known = next(one for one in read_script(script, "run.sh", {"D": "gpu"}) if one.has_settings)
    assert [(word.text, word.unset) for word in known.words] == [("x.a=1", ()), ("x.n=8", ()), ("x.c=4", ())]


def test_command_in_branch_follows_certain_command() -> None:
    script = "if [ -d ckpt ]; then" + START + "x.a=1; fi" + START + "x.a=2"
    found = [(one.words[0].text, one.is_certain) for one in read_script(script, "run.sh", {}) if one.has_settings]
    assert found == [("x.a=2", True), ("x.a=1", False)]


def test_script_that_starts_one_of_two_runs_is_refused() -> None:
    script = "if [ -d ckpt ]; then" + START + "x.a=1; else" + START + "x.a=2; fi"
    with pytest.raises(ConfigError, match="line 2 and line 3 start different runs"):
        read_settings(script, "run.sh", {})


@pytest.mark.parametrize(
    "script",
    [
        "a=x\nfor i in " + "1 " * 40 + "; do a=$a$a; done",
        "f() { f; f; }\nf",
        "for i in " + "1 " * 2000 + "; do f; f; f; done",
    ],
)
def test_script_that_grows_ends(script: str) -> None:
    start = time.monotonic()
    with contextlib.suppress(ConfigError):
        read_script(script, "run.sh", {})
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("True", True),
        ("null", None),
        ("1e-6", 1e-6),
        ("0.", 0.0),
        ("-1", -1),
        ("[a,'b c',1]", ["a", "b c", 1]),
        ("'quoted'", "quoted"),
        ("{}", {}),
        ("~/models/x", "~/models/x"),
        ("???", "???"),
    ],
)
def test_overrides_have_hydras_values(text: str, expected: Any) -> None:
    assert read_scalar(text) == expected


def test_interpolations() -> None:
    text = (
        "a: {b: 1, c: '${.b}', d: '${x.y}'}\ne: ${oc.select:a.b,7}\nf: ${oc.select:z,7}\ng: p/${a.b}\nh: ${nowhere}\n"
    )
    found = {setting.key: setting for setting in resolve_references(read_yaml(text, "a.yaml"))}
    assert [found[key].value for key in ("a.c", "e", "f", "g")] == [1, 1, 7, "p/1"]
    assert found["a.d"].unset == ("${x.y}",)
    assert found["h"].unset == ("${nowhere}",)
    assert found["f"].line == 3


def test_items_of_lists_of_mappings_have_keys() -> None:
    found = read_yaml("a:\n- {b: 1}\n- {c: [1, 2]}\n", "a.yaml")
    assert [(setting.key, setting.value) for setting in found] == [("a[0].b", 1), ("a[1].c", [1, 2])]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("~data.val_files", "~data.val_files"),
        ("~data.val_files=x", "~data.val_files"),
        ("~critic", "~critic"),
        ("trainer..nnodes=1", None),
        ("~trainer..nnodes", None),
        ("=3", None),
        ("trainer.nnodes", None),
        ("+a.b=1", "a.b"),
        ("a.b=x..y", "a.b"),
        ("a.b=~", "a.b"),
    ],
)
def test_override_sets_or_deletes_key(word: str, key: str | None) -> None:
    found = read_override(word, "command line")
    assert (found and found.key) == key


def test_deletion_removes_only_earlier_settings() -> None:
    words = [
        "data.train_files=/x.parquet",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.name=vllm",
        "~critic",
    ]
    settings = [
        read_override(word, "w") for word in [*words, "~actor_rollout_ref.rollout", "actor_rollout_ref.rollout.n=8"]
    ]
    kept, deletions = without_deleted([one for one in settings if one is not None])
    assert [(one.key, one.value) for one in kept] == [
        ("data.train_files", "/x.parquet"),
        ("actor_rollout_ref.rollout.n", 8),
    ]
    assert [(one.key, count) for one, count in deletions] == [("~critic", 0), ("~actor_rollout_ref.rollout", 2)]
