"""Mistakes in fields of a manifest."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import Mistake, changed, manifest, plain

MANIFESTS: Sequence[Mistake] = (
    *changed(
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        ("another kind", "RLRun", "RLJob", "run.yaml:2: kind", "RLJob", "RLRun"),
        ("another apiVersion", "v1alpha1", "v1", "run.yaml:1: apiVersion", "rlrun.io/v1", "rlrun.io/v1alpha1"),
    ),
    *changed("rlrun render run.yaml", 78, "run.yaml", ("no kind", "kind: RLRun\n", "", "kind", "", "RLRun")),
    *changed(
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        ("a name that Kubernetes refuses", "name: quick", "name: Quick_Run", "metadata.name", "Quick_Run", "lower"),
        ("a typo in a field", "maxSteps", "maxStesp", "spec.maxStesp", "", "did you mean maxSteps"),
        ("a field in the wrong place", "  seqLen", "  lr: 1e-5\n  seqLen", "spec.lr", "", "trainer.optimizer.lr"),
    ),
    *changed(
        "rlrun local run.yaml",
        78,
        "run.yaml",
        ("a text for a number", "maxSteps: 10", "maxSteps: ten", "spec.maxSteps", '"ten"', "whole number from 1"),
    ),
    *changed(
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        ("a negative number", "512", "-512", "spec.seqLen", "-512", "whole number from"),
        ("a list for an object", "{tiny: {}}", "[tiny]", "spec.model", '["tiny"]', "expected a mapping"),
        ("nothing for a required field", "  model: {tiny: {}}\n", "", "spec.model", "", "required"),
        (
            "an infinite rate",
            "  seqLen",
            "  trainer: {optimizer: {lr: .inf}}\n  seqLen",
            "spec.trainer.optimizer.lr",
            "Infinity",
            "greater than 0 and at most 10",
        ),
        (
            "an unknown choice",
            "  seqLen",
            "  algorithm: {loss: {name: gprpo}}\n  seqLen",
            "spec.algorithm.loss",
            "gprpo",
            "did you mean",
        ),
        (
            "an unknown preset",
            "  seqLen",
            "  algorithm: {preset: grop}\n  seqLen",
            "spec.algorithm",
            "'grop'",
            "did you mean grpo",
        ),
    ),
    *changed(
        "rlrun local run.yaml",
        78,
        "run.yaml",
        (
            "an unknown environment",
            "reverse-text",
            "revrse-text",
            "spec.environments[0].id",
            "revrse-text",
            "did you mean reverse-text",
        ),
    ),
    *changed(
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        (
            "an unknown argument of an environment",
            "length",
            "lenght",
            "spec.environments[0].args",
            "lenght",
            "did you mean length",
        ),
    ),
    Mistake(
        "a row with an image",
        "rlrun validate run.yaml",
        78,
        "spec.environments[0].args",
        "the column 'images' is not empty",
        "remove the row",
        manifest("reverse-text\n    args: {length: 5}", "dataset\n    args: {path: rows.jsonl, reward: exact}")
        | {"rows.jsonl": '{"prompt": "<image> a?", "answer": "b", "images": ["a.png"]}\n'},
    ),
    Mistake(
        "a chat with an image",
        "rlrun validate sft.yaml",
        78,
        "spec.data.sources[0].path",
        "messages[0].content[0] has content of type 'image'",
        "remove the part",
        {
            "chats.jsonl": '{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, '
            '{"role": "assistant", "content": "b"}]}\n'
        },
    ),
    Mistake(
        "an unknown reward",
        "rlrun validate run.yaml",
        78,
        "spec.environments[0].args",
        "exactt",
        "did you mean exact",
        manifest("reverse-text\n    args: {length: 5}", "dataset\n    args: {path: rows.jsonl, reward: exactt}")
        | {"rows.jsonl": '{"prompt": "a", "answer": "b", "uid": "1"}\n'},
    ),
    *changed(
        "rlrun validate run.yaml",
        78,
        "run.yaml",
        (
            "a batch that groups do not fill",
            "  seqLen",
            "  orchestrator: {batchSize: 63}\n  seqLen",
            "batchSize",
            "(63)",
            "set batchSize to 56 or 64",
        ),
        (
            "two models",
            "{tiny: {}}",
            "{tiny: {}, path: model}",
            "spec.model",
            "path and tiny",
            "exactly one of name, path and tiny",
        ),
    ),
    *changed(
        "rlrun local run.yaml",
        65,
        "run.yaml",
        (
            "a model folder that is not there",
            "{tiny: {}}",
            "{path: nowhere}",
            "spec.model.path",
            "nowhere",
            "no folder",
        ),
    ),
    *plain(
        65,
        (
            "data that are not there",
            "rlrun local sft.yaml",
            "spec.data.sources[0].path",
            "chats.jsonl",
            "no file or folder",
        ),
    ),
    Mistake(
        "a broken row",
        "rlrun local sft.yaml",
        65,
        "chats.jsonl",
        "line 2",
        "correct the row, or set data.malformed to Skip",
        {
            "chats.jsonl": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n{"mess\n'
        },
    ),
)
