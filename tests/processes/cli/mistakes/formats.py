"""Mistakes in formatted texts: names, paths, addresses, images, placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.processes.cli.mistakes.mistake import SPEC, Mistake, field_of_spec, text


def _value(what: str, line: str, place: str, value: str, fix: str, repair: tuple[str, str] | None = None) -> Mistake:
    return field_of_spec(what, line, f"spec.{place}", value, fix, repair)


def _inner(what: str, line: str, place: str, value: str, fix: str) -> Mistake:
    """Return a mistake in the last field of a flow mapping; the message's fix is the field with its value."""
    start = line.rindex(fix.partition(":")[0] + ":")
    bad = line[start:].rstrip("}]")
    return _value(what, line, place, value, fix, (bad, fix))


def _name(what: str, name: str, fix: str) -> Mistake:
    return text(
        what,
        SPEC.replace("name: quick", f"name: {name}"),
        "metadata.name",
        name,
        f"name: {fix}",
        (f"name: {name}", f"name: {fix}"),
    )


FORMATS: Sequence[Mistake] = (
    _name("a name in capitals", "Quick", "quick"),
    _name("a name with underscores", "my_run", "my-run"),
    _name("a name with a point", "qwen3-0.6b", "qwen3-0-6b"),
    _name("a name that begins with a digit", "3b-run", "run-3b-run"),
    _name("a name with a dash at its end", "run-", "run"),
    _name("a name that is too long", "a" * 41, "a" * 40),
    text(
        "a name that is a number",
        SPEC.replace("name: quick", "name: 5"),
        "metadata.name",
        "5",
        "name: run-5",
        ("name: 5", "name: run-5"),
    ),
    text("a name of nothing", SPEC.replace("name: quick", 'name: ""'), "metadata.name", "''", "lower-case letters"),
    _value("a home folder", "model: {path: ~/models/q}", "model.path", "~/models/q", "path: /", None),
    _inner("a folder above", "model: {path: /data/../x}", "model.path", '"/data/../x"', "path: /x"),
    _inner(
        "a variable of the shell in a path",
        "model: {path: $HOME/models/q}",
        "model.path",
        "$HOME/models/q",
        f"path: {Path.home()}/models/q",
    ),
    _inner("a file URL", "model: {path: 'file:///models/q'}", "model.path", "file:///models/q", "path: /models/q"),
    _inner(
        "an address of the hub",
        "model: {name: https://huggingface.co/Qwen/Qwen3-8B}",
        "model.name",
        "https://huggingface.co/Qwen/Qwen3-8B",
        "name: Qwen/Qwen3-8B",
    ),
    _inner(
        "a protocol of the hub",
        "model: {name: 'hf://Qwen/Qwen3-8B'}",
        "model.name",
        "hf://Qwen/Qwen3-8B",
        "name: Qwen/Qwen3-8B",
    ),
    _inner(
        "a name with blanks at its ends",
        'model: {name: "Qwen/Qwen3-8B "}',
        "model.name",
        '"Qwen/Qwen3-8B "',
        "name: Qwen/Qwen3-8B",
    ),
    _value(
        "a revision in a name",
        "model: {name: Qwen/Qwen3-8B@main}",
        "model.name",
        "Qwen/Qwen3-8B@main",
        "{name: Qwen/Qwen3-8B, revision: main}",
        ("{name: Qwen/Qwen3-8B@main}", "{name: Qwen/Qwen3-8B, revision: main}"),
    ),
    _value("a folder as a name", "model: {name: ./models/q}", "model.name", "./models/q", "path: ./models/q"),
    _inner(
        "an image with https",
        "trainer: {image: https://ghcr.io/team/app:1}",
        "trainer.image",
        "https://ghcr.io/team/app:1",
        "image: ghcr.io/team/app:1",
    ),
    _inner(
        "an image in capitals",
        "trainer: {image: ghcr.io/Team/App:v1}",
        "trainer.image",
        "ghcr.io/Team/App:v1",
        "image: ghcr.io/team/app:v1",
    ),
    field_of_spec(
        "a template brace", "maxSteps: {{ .Values.steps }}", "run.yaml:8", "{{ .Values.steps }}", "helm template"
    ),
    _value(
        "a template brace in quotes", 'maxSteps: "{{ steps }}"', "maxSteps", "{{ steps }}", "replace it with a value"
    ),
    _value(
        "a variable of the shell",
        "maxSteps: ${STEPS}",
        "maxSteps",
        "${STEPS}",
        "envsubst < run.yaml | rlrun validate -",
    ),
    _value("a placeholder", "model: {name: <your-model>}", "model.name", "<your-model>", "Qwen/Qwen3-8B"),
    _inner("a queue in capitals", "queueName: Team-A", "queueName", '"Team-A"', "queueName: team-a"),
    _inner(
        "a claim with underscores",
        "storage: {claimName: my_claim}",
        "storage.claimName",
        '"my_claim"',
        "claimName: my-claim",
    ),
)
