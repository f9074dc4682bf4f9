"""Tracker options on command lines, and messages about unusable trackers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlrun.cli.rl import read_rl_config
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.trackers import TrackingConfig
from rlrun.local.judge import judge_manifest
from rlrun.runtime.extras import install_extras
from rlrun.tracking.backends import tracker_packages
from rlrun.tracking.enabled import enabled_trackers
from rlrun.tracking.options import full_names, take_tracking, with_options


def tracking(**values: object) -> TrackingConfig:
    return TrackingConfig.model_validate(values)


def test_options_of_prime_rl_name_the_fields() -> None:
    words = ["@", "a.toml", "--wandb", "--wandb.project=x", "--no-tensorboard", "--max-steps", "3", "--wandbx"]
    assert full_names(words) == [
        "@", "a.toml", "--tracking.wandb", "--tracking.wandb.project=x", "--no-tracking.tensorboard", "--max-steps", "3", "--wandbx",
    ]  # fmt: skip
    own, rest = take_tracking(["run.yaml", "--wandb", "--wandb.name", "n", "--plain", "--wandb.offline", "--resume"])
    assert own == ["--tracking.wandb", "--tracking.wandb.name", "n", "--tracking.wandb.offline"]
    assert rest == ["run.yaml", "--plain", "--resume"]


def test_tracker_options_override_manifest() -> None:
    below = tracking(wandb={"project": "p", "name": "a"}, samples={"interval": 3})
    own, _ = take_tracking(["--wandb", "--wandb.name", "b", "--tensorboard"])
    assert with_options(below, own) == tracking(
        wandb={"project": "p", "name": "b"}, tensorboard={}, samples={"interval": 3}
    )
    assert with_options(below, take_tracking(["--no-wandb"])[0]) == tracking(samples={"interval": 3})
    assert with_options(None, []) is None
    with pytest.raises(ConfigError, match=r"--tracking\.wandb\.projct: unknown option \(did you mean"):
        with_options(None, take_tracking(["--wandb.projct", "x"])[0])


def test_rl_reads_trackers_from_files_and_options(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text('[model]\ntiny = {}\n[[environments]]\nid = "reverse-text"\n[tracking.wandb]\nproject = "p"\n')
    config, _, _ = read_rl_config(full_names(["@", str(file), "--wandb.name", "n"]), {})
    assert config.spec().tracking == tracking(wandb={"project": "p", "name": "n"})


def test_missing_tracker_package_is_reported_on_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracker_packages, "find_spec", lambda name: None)
    config = tracking(wandb={}, tensorboard={}, mlflow={}, trackio={})
    environ = {"WANDB_API_KEY": "k"}
    assert dict(tracker_packages.missing_trackers(config, environ, in_image=True))["wandb"] == (
        "needs the package wandb, which this image does not have; set orchestrator.image to one that has it, such as the trainer's image "
        "of a release, or remove tracking.wandb"
    )
    assert dict(tracker_packages.missing_trackers(config, environ)) == {
        "wandb": f"needs the package wandb, which is not installed; install it: {install_extras('wandb')}",
        "tensorboard": f"needs the package tensorboard, which is not installed; install it: {install_extras('tensorboard')}",
        "trackio": f"needs the package trackio, which is not installed; install it: {install_extras('trackio')}",
        "mlflow": tracker_packages.MLFLOW_ADDRESS,
    }
    monkeypatch.setattr(tracker_packages, "find_spec", importlib.util.find_spec)
    keys = tmp_path / "netrc"
    only = tracking(wandb={})
    monkeypatch.setitem(tracker_packages.PACKAGES, "wandb", "json")  # type: ignore[index]
    assert [name for name, _ in tracker_packages.missing_trackers(only, {"NETRC": str(keys)})] == ["wandb"]
    keys.write_text("machine api.wandb.ai login user password k\n")
    for fine in ({"NETRC": str(keys)}, environ, {"WANDB_MODE": "offline"}, {"WANDB_MODE": "disabled"}):
        assert tracker_packages.missing_trackers(only, fine) == []
    assert enabled_trackers(only, {"WANDB_MODE": "disabled"}) == []


def test_validate_reports_missing_tracker_package_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_packages, "find_spec", lambda name: None)
    text = (
        "apiVersion: rlrun.io/v1alpha1\nkind: RLRun\nmetadata: {name: run}\n"
        "spec:\n  model: {tiny: {}}\n  task: SFT\n  data: {sources: [{path: absent.jsonl}]}\n  tracking:\n    tensorboard: {}\n"
    )
    judged = judge_manifest(text, "run.yaml", here=True)
    assert "run.yaml:9: spec.tracking.tensorboard: needs the package tensorboard" in "\n".join(
        map(str, judged.problems)
    )
    assert not any("tensorboard" in str(p) for p in judge_manifest(text, "run.yaml", here=False).problems)


WANDB_SECRET = {"wandb": {"secretRef": {"name": "for-rlrun-wandb"}}}
PLAIN = "WANDB_API_KEY in orchestrator.env, which every reader of the run can see"
IN_CLUSTER: list[tuple[dict[str, object], dict[str, str | None], bool, list[str]]] = [
    ({"wandb": {}}, {}, False, ["has no key in a cluster: set secretRef to a Secret with WANDB_API_KEY"]),
    ({"wandb": {}}, {}, True, []),
    ({"wandb": {}}, {"WANDB_API_KEY": None}, False, []),
    ({"wandb": {}}, {"WANDB_API_KEY": "k"}, False, [PLAIN]),
    (WANDB_SECRET, {"WANDB_API_KEY": "k"}, True, [PLAIN]),
    (WANDB_SECRET, {}, False, []),
    ({"wandb": {"offline": True}}, {}, False, []),
    ({"wandb": {}}, {"WANDB_MODE": "disabled"}, False, []),
    ({"mlflow": {}}, {}, False, ["needs an address in a cluster"]),
    ({"mlflow": {}}, {"MLFLOW_TRACKING_URI": None}, False, []),
    ({"mlflow": {"uri": "http://m"}}, {"MLFLOW_TRACKING_TOKEN": "t"}, False, ["has MLFLOW_TRACKING_TOKEN in"]),
    ({"tensorboard": {}, "trackio": {}}, {"WANDB_API_KEY": "k"}, False, []),
]


@pytest.mark.parametrize(("trackers", "variables", "opaque", "said"), IN_CLUSTER)
def test_missing_tracker_settings_of_cluster_are_reported(
    trackers: dict[str, object], variables: dict[str, str | None], opaque: bool, said: list[str]
) -> None:
    found = [
        message for _, message in tracker_packages.problems_in_cluster(tracking(**trackers), variables, opaque=opaque)
    ]
    assert len(found) == len(said)
    assert all(words in message for words, message in zip(said, found, strict=True))


def test_validate_notes_a_tracker_without_a_key() -> None:
    head = "apiVersion: rlrun.io/v1alpha1\nkind: RLRun\nmetadata: {name: a}\n"
    text = (
        head
        + "spec:\n  task: SFT\n  model: {tiny: {}}\n  data: {sources: [{path: rows.jsonl}]}\n  tracking: {wandb: {}}\n"
    )
    judged = judge_manifest(text, "run.yaml", here=False)
    assert not any("tracking" in str(problem) for problem in judged.problems)
    assert any("spec.tracking.wandb" in str(note) and "secretRef" in str(note) for note in judged.notices)
    keyed = judge_manifest(text + "  orchestrator: {envFrom: [{secretRef: {name: x}}]}\n", "run.yaml", here=False)
    assert not any("tracking" in str(note) for note in keyed.notices)
