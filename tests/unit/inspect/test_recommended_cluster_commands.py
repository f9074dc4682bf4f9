"""Commands of kubectl and helm that messages, NOTES.txt and alerts recommend use existing verbs and options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.unit.docs.documented_commands import ROOT, commands, pages
from tests.unit.inspect.test_recommended_commands import texts

KUBECTL = "-n --namespace --context --kubeconfig"
"""Options that every verb of kubectl accepts."""
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "kubectl": {
        "annotate": "--overwrite",
        "apply": "-f --filename --server-side --dry-run",
        "auth can-i": "-A --list",
        "config current-context": "",
        "config get-contexts": "-o",
        "create namespace": "",
        "create rolebinding": "--clusterrole --user",
        "create secret generic": "--from-literal --from-file --dry-run -o",
        "delete crd": "",
        "delete pod": "--force --grace-period --wait",
        "delete pvc": "--wait",
        "delete rlr": "--all",
        "describe": "-l --selector -A",
        "diff": "-f",
        "explain": "--recursive --api-version",
        "get": "-A -o -w -l --selector --field-selector",
        "label": "--overwrite -l",
        "logs": "-c --container -f --previous --tail",
        "patch": "--type -p",
        "port-forward": "--address",
        "rollout status": "--timeout",
        "scale": "--replicas",
        "wait": "--for --timeout",
    },
    "helm": {
        "install": "-n --namespace --create-namespace --wait --set --values",
        "template": "--set --values",
        "test": "-n --namespace --logs",
        "uninstall": "-n --namespace",
        "upgrade": "-n --namespace --install --reuse-values --set --values",
    },
}
"""Options by program and verb, from `kubectl VERB --help` of Kubernetes 1.30 and `helm VERB --help` of Helm 3."""
_COMMAND = re.compile(r"\b(kubectl|helm) ([^`;,\"'\n)?]+)")
_PROSE = re.compile(
    r"(helm upgrade (of|--)|helm test finds)|kubectl (rlrun|said|failed|knows|starts|answered|that|on|of|X|WORDS|is)\b"
)
"""Sentences about the programs themselves, which are not commands."""


def recommended() -> Iterator[tuple[str, str, str]]:
    """Return the place, program and words of each command."""
    sources = [
        *((path, list(_messages(path))) for folder in ("workloads/rlrun", "operator/rlrun_operator")
          for path in sorted((ROOT / folder).rglob("*.py"))),
        *((path, [re.sub(r"\{\{.*?\}\}", "X", path.read_text())]) for path in (
            ROOT / "charts/rlrun-operator/templates/NOTES.txt", ROOT / "charts/rlrun-operator/monitoring/alerts.yaml")),
    ]  # fmt: skip
    for path, found in sources:
        for text in found:
            for program, words in _COMMAND.findall(text):
                if not _PROSE.match(f"{program} {words}"):
                    yield str(path.relative_to(ROOT)), program, words.strip()


def _messages(path: Path) -> Iterator[str]:
    """Return the texts of a module without its documentation."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]  # type: ignore[attr-defined]
    yield from texts(tree)


COMMANDS = sorted(set(recommended()))


def faults(program: str, words: str) -> list[str]:
    """Return the unknown verb or options of a command."""
    words = re.sub(r"\$\([^)]*\)", "X", words)
    plain = [word for word in words.split() if not word.startswith("-")]
    text = " ".join(plain)
    options = [word.partition("=")[0].rstrip(").") for word in words.split() if re.match(r"--?[a-z]", word)]
    while plain and program == "kubectl" and words.startswith(("-n ", "--namespace ")):  # its value is not a verb
        plain, text, words = plain[1:], " ".join(plain[1:]), ""
    verb = max((one for one in OPTIONS[program] if f"{text} ".startswith(f"{one} ")), key=len, default=None)
    if verb is None:
        return [f"unknown verb: {program} {text}"]
    known = {*OPTIONS[program][verb].split(), *(KUBECTL.split() if program == "kubectl" else ())}
    return [f"{program} {verb} has no {one}" for one in options if one not in known]


PRINTED = sorted(
    {
        command
        for page in pages()
        for command in commands(page.read_text())
        if command.split()[0] in OPTIONS and not command.startswith("kubectl rlrun ")
    }
)


@pytest.mark.parametrize("command", PRINTED)
def test_page_command_has_known_verb_and_options(command: str) -> None:
    program, _, words = command.partition(" | ")[0].partition(" > ")[0].partition(" ")
    assert faults(program, words) == []


def test_recommended_commands_are_found() -> None:
    assert len(COMMANDS) > 30
    assert {place.partition("/")[0] for place, _, _ in COMMANDS} == {"charts", "operator", "workloads"}


def test_recommended_cluster_commands_use_known_verbs_and_options() -> None:
    wrong = {(place, words): found for place, program, words in COMMANDS if (found := faults(program, words))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("program", "words", "fault"),
    [
        ("kubectl", "-n team-a delete pvc NAME --wait", []),
        ("kubectl", "get events --namspace x", ["kubectl get has no --namspace"]),
        ("kubectl", "log X -c Y", ["unknown verb: kubectl log X Y"]),
        ("helm", "test X --log", ["helm test has no --log"]),
    ],
)
def test_wrong_verb_or_option_is_detected(program: str, words: str, fault: list[str]) -> None:
    assert faults(program, words) == fault
