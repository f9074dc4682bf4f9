"""Removal of secrets of many kinds from texts and documents, while ordinary values stay readable."""

from __future__ import annotations

import json
import time

import pytest

from rlrun.runtime import redact
from rlrun.runtime.redact import LogLines
from rlrun.runtime.secret_shapes import SHAPES
from tests.support.planted import BY_KIND, ORDINARY, PLANTED, Planted

OVER_LINES = ("split", "split-backslash", "yaml-block", "json-next-line")
"""Kinds that a filter of single lines cannot recognize, listed in docs/security.md."""


def assert_absent(planted: Planted, shown: str) -> None:
    for part in planted.parts:
        assert part not in shown, planted.kind
        assert json.dumps(part)[1:-1] not in shown, planted.kind


def test_planted_secrets_cover_sixty_kinds() -> None:
    assert len(BY_KIND) == len(PLANTED) >= 60


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.kind)
def test_secret_is_removed_from_text(planted: Planted) -> None:
    shown = redact.redact_text(f"before the first line\n{planted.text}\nafter the last line", [])
    assert_absent(planted, shown)
    assert shown.startswith("before the first line\n")
    assert shown.endswith("\nafter the last line")
    assert redact.redact_text(shown, []) == shown


@pytest.mark.parametrize(
    "planted", [one for one in PLANTED if one.kind not in OVER_LINES], ids=lambda planted: planted.kind
)
def test_secret_is_removed_from_lines_of_a_log(planted: Planted) -> None:
    lines = LogLines({})
    shown = "\n".join(lines.clean(line) for line in ["first", *planted.text.splitlines(), "last"])
    assert shown.startswith("first\n")
    assert shown.endswith("\nlast")
    for part in (piece for whole in planted.parts for piece in whole.splitlines() if "-----" not in piece):
        assert part not in shown


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text: str) -> None:
    assert redact.redact_text(text, []) == text
    assert LogLines({}).clean(text) == text
    assert redact.redact_configuration({"model": {"name": text}}, []) == {"model": {"name": text}}


@pytest.mark.parametrize(
    "encode", [str, lambda v: redact.quote(v, safe=""), lambda v: redact.base64.b64encode(v.encode()).decode()]
)
def test_secret_variable_value_is_removed_in_any_encoding(encode) -> None:  # type: ignore[no-untyped-def]
    value = "correct horse/battery"
    known = redact.known_secrets({"TEAM_PASSWORD": value, "HOME": "/home/someone"})
    shown = redact.redact_certain(f"sent {encode(value)} from /home/someone", known)
    assert shown == f"sent {redact.REMOVED} from /home/someone"


def test_secret_shapes_name_their_source() -> None:
    assert all(shape.kind and shape.source.split()[0] in ("gitleaks", "detect-secrets", "vendor") for shape in SHAPES)
    assert len({shape.kind for shape in SHAPES}) == len(SHAPES)


FREE = "xk-plain-words"


@pytest.mark.parametrize(
    "config",
    [
        {"environments": [{"id": "mine", "args": {"opener": FREE}}]},
        {"environments": [{"id": "mine", "args": {"client": {"options": [{"opener": FREE}]}}}]},
        {"trainer": {"env": [{"name": "OPENER", "value": FREE}]}},
        {"trainer": {"env": {"OPENER": FREE}}},
        {"metadata": {"annotations": {"example.com/opener": FREE}}},
        {"inference": {"extraArgs": ["--opener", FREE]}},
        {"inference": {"extra_args": [f"--opener={FREE}"]}},
        {"sampling": {"chatTemplateArguments": {"opener": FREE}}},
        {"trainer": {"podTemplate": {"spec": {"containers": [{"command": ["sh", "-c", f"curl -u me:{FREE} x"]}]}}}},
        {
            "trainer": {
                "podTemplate": {
                    "metadata": {"annotations": {"a": FREE}},
                    "spec": {"initContainers": [{"args": [FREE]}]},
                }
            }
        },
    ],
)
def test_unknown_free_value_is_hidden(config: dict[str, object]) -> None:
    shown = json.dumps(redact.redact_configuration(config, []))
    assert FREE not in shown
    assert redact.HIDDEN in shown


@pytest.mark.parametrize(
    "config",
    [
        {
            "environments": [
                {
                    "id": "dataset",
                    "args": {
                        "name": "openai/gsm8k",
                        "train_split": "train",
                        "revision": "e53f048856ff4f594e959d75785d2c2d37b678ee",
                    },
                }
            ]
        },
        {
            "environments": [
                {
                    "id": "mine",
                    "args": {"difficulty": 3, "shuffle": True, "scale": 0.5, "limit": "100", "none": None, "empty": ""},
                }
            ]
        },
        {
            "trainer": {
                "env": [
                    {"name": "NCCL_DEBUG", "value": "INFO"},
                    {"name": "RLRUN_LOG", "value": "debug"},
                    {"name": "HF_HOME", "value": "/data/hf"},
                ]
            }
        },
        {
            "trainer": {
                "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "a-keys", "key": "HF_TOKEN"}}}]
            }
        },
        {
            "metadata": {
                "annotations": {"rlrun.io/restart-requested-at": "2026-11-28T20:00:00Z", "prometheus.io/scrape": "true"}
            }
        },
        {
            "inference": {
                "extraArgs": [
                    "--max-num-seqs",
                    "256",
                    "--dtype=bfloat16",
                    "--quantization",
                    "fp8",
                    "--enable-prefix-caching",
                ]
            }
        },
        {
            "trainer": {
                "podTemplate": {
                    "spec": {
                        "containers": [
                            {
                                "name": "x",
                                "image": "registry.example.com/a:1",
                                "volumeMounts": [{"name": "d", "mountPath": "/d"}],
                            }
                        ]
                    }
                }
            }
        },
        {
            "model": {"name": "Qwen/Qwen3-8B", "revision": "b968826d9c46dd6066d109eabc6255188de91218"},
            "uid": "0b7c3a52-4f7e-4c8e-9b5d-2a1f6c3e9d10",
        },
        {
            "storage": {"claimName": "team-data", "path": "runs/demo"},
            "maxSteps": 200,
            "algorithm": {"loss": "my_package.losses:clipped"},
        },
    ],
)
def test_known_configuration_value_is_kept(config: dict[str, object]) -> None:
    assert redact.redact_configuration(config, []) == config


def test_number_under_the_name_of_a_secret_is_removed() -> None:
    assert redact.redact_document({"password": 12345678, "max_tokens": 12345678}, []) == {
        "password": redact.REMOVED,
        "max_tokens": 12345678,
    }


@pytest.mark.full
@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "a.",
        "-",
        "a=",
        "a:\\n",
        "://",
        "://a:",
        "x-",
        "Aa0",
        "\\\\n",
        '{"a',
        "eyJ",
        "-----BEGIN PRIVATE KEY",
        " \\n",
        "password ",
    ],
)
def test_cost_grows_with_the_length_of_a_text(unit: str) -> None:
    def seconds(count: int) -> float:
        text = unit * count
        start = time.process_time()
        redact.redact_text(text, [])
        return time.process_time() - start

    small, large = min(seconds(1000) for _ in range(3)), seconds(16_000)
    assert large < max(0.5, 64 * small)


def test_key_of_a_mapping_is_cleaned() -> None:
    token = BY_KIND["hugging-face"].secret
    assert token not in json.dumps(redact.redact_document({token: 1.0}, []))


def test_working_folder_variables_are_not_secrets() -> None:
    known = redact.known_secrets({"PWD": "/work/project", "OLDPWD": "/work/other", "DB_PWD": "correct-horse"})
    assert (
        redact.redact_text("read /work/project/run.yaml with correct-horse", known)
        == f"read /work/project/run.yaml with {redact.REMOVED}"
    )
