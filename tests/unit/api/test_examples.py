"""Every example is a valid manifest whose environments load."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.api.manifest import read_manifest
from rlrun.api.resolve import resolve
from rlrun.environments.registry import load

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_resolves(path: Path) -> None:
    run = read_manifest(path)
    config = resolve(run.spec, name=run.metadata.name, uid="u", output_dir="/run")
    for environment in config.orchestrator.environments:
        assert len(load(environment.id, environment.args).tasks("train"))
    assert run.metadata.name == path.stem


def test_the_manifest_of_the_readme_is_valid(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    file = tmp_path / "run.yaml"
    file.write_text(readme.split("```yaml\n")[1].split("```")[0])
    assert read_manifest(file).metadata.name == "quickstart"
