"""Workflows name a provider and versions with which their commands can pass."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.api.resource import RLRun
from tests.cluster import binaries, demo
from tests.cluster.provider import PROVIDERS, VARIABLE

ROOT = Path(__file__).parents[3]
TESTS = re.compile(r"\.ci/run|\bmake (test|test-full)\b")
"""Commands that run tests on a cluster."""


def jobs() -> dict[str, dict[str, Any]]:
    """Return each job of each workflow, by file and job name."""
    return {
        f"{file.name}: {name}": job
        for file in sorted((ROOT / ".github/workflows").glob("*.y*ml"))
        for name, job in yaml.safe_load(file.read_text())["jobs"].items()
    }


def commands(job: dict[str, Any]) -> list[list[str]]:
    """Return the words of each line that the job runs."""
    return [shlex.split(line) for step in job.get("steps", ()) for line in step.get("run", "").splitlines()]


def step_environment(job: dict[str, Any], step: dict[str, Any]) -> dict[str, str]:
    return {**job.get("env", {}), **step.get("env", {})}


def test_jobs_that_run_tests_name_the_native_provider() -> None:
    found = [
        (name, step_environment(job, step).get(VARIABLE))
        for name, job in jobs().items()
        for step in job.get("steps", ())
        if TESTS.search(step.get("run", ""))
    ]
    assert found == [("ci.yaml: test", "native")]


def test_sudo_keeps_the_variables_of_tests() -> None:
    """sudo drops all variables that are not listed."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())
    (line,) = [words for words in commands(workflow["jobs"]["test"]) if ".ci/run" in words]
    assert line[0] == "sudo"
    (kept,) = [word.partition("=")[2].split(",") for word in line if word.startswith("--preserve-env")]
    own = workflow["jobs"]["test"]["env"].keys() | workflow["env"].keys()
    assert own == {VARIABLE, "RLRUN_CACHE"}
    assert set(kept) == own | {"CI"}


def test_go_of_each_job_builds_the_modules_of_clusters() -> None:
    """`GOTOOLCHAIN` is local: an older Go refuses a module instead of fetching the Go that the module needs."""
    files = [tool.folder / "go.mod" for name, tool in binaries.TOOLS.items() if name not in binaries.BY_HAND]
    needed = max(version(found[1]) for file in files if (found := re.search(r"^go (\S+)", file.read_text(), re.M)))
    given = [
        version(step["with"]["go-version"])
        for job in jobs().values()
        for step in job.get("steps", ())
        if step.get("uses", "").startswith("actions/setup-go@")
    ]
    assert given
    assert min(given) > needed[:2], "the newest patch of a version is not always installed"


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def test_kind_job_runs_demo_with_known_options() -> None:
    job = jobs()["ci.yaml: kind"]
    (words,) = [words for words in commands(job) if "tests.cluster.demo" in words]
    options = demo.parser().parse_args(words[words.index("tests.cluster.demo") + 1 :])
    assert (options.provider, options.stubs) == ("kind", True)
    assert job["env"][VARIABLE] == options.provider
    assert job["env"][VARIABLE] in PROVIDERS
    assert job["timeout-minutes"] <= 30
    (install,) = [words[-1] for words in commands(job) if words[:2] == ["go", "install"]]
    assert re.fullmatch(r"sigs\.k8s\.io/kind@v\d+\.\d+\.\d+", install), "its node image is named by digest"


def test_workflow_caches_contain_only_programs_keyed_by_inputs() -> None:
    """A cluster's state or an image of another commit must not reach a run; a complete cache is never replaced by a partial one."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())
    keys = {}
    for name, job in workflow["jobs"].items():
        (cache,) = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/cache@")]
        assert cache["path"] == f"{workflow['env']['RLRUN_CACHE']}/bin"
        assert "hashFiles('tests/cluster/kube/**', 'tests/cluster/binaries.py'" in cache["key"]
        (go,) = [s["with"]["go-version"] for s in job["steps"] if s.get("uses", "").startswith("actions/setup-go@")]
        assert f"-go{go}-" in cache["key"]
        keys[name] = cache["key"].partition("${{")[0]
    assert len(set(keys.values())) == len(keys), "jobs build different programs"


def test_run_of_stubs_is_a_valid_run_on_gpus() -> None:
    example = yaml.safe_load(demo.EXAMPLE.read_text())
    run = RLRun.model_validate(demo.stub_run(example))
    assert (run.spec.trainer.gpus_per_replica, run.spec.inference.gpus_per_replica) == (2, 1)
    assert run.spec.trainer.gpus_per_replica <= demo.GPUS_PER_NODE
    assert run.spec.evaluation is None
    assert run.spec.max_steps == demo.STUB_STEPS
    assert example["spec"]["maxSteps"] != demo.STUB_STEPS, "the example itself stays as it is"
    assert run.metadata.name == demo.RUN


@pytest.mark.parametrize("stubs", [True, False])
def test_demo_requires_learning_only_from_real_roles(stubs: bool) -> None:
    outcome = demo.Outcome("Complete", 1.0, (0.5,) * 30, (), {})
    assert demo._judge(outcome, learns=not stubs) == (0 if stubs else 1)
    failed = demo.Outcome("Failed", 1.0, (), (), {})
    assert demo._judge(failed, learns=not stubs) == 1
