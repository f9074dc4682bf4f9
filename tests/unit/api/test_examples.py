"""Examples are valid manifests whose environments load."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.run_manifest import parse_manifest, read_manifest
from rlrun.environments.registry import load_environment

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_manifest_resolves(path: Path) -> None:
    run = read_manifest(path)
    config = resolve_spec(run.spec, name=run.metadata.name, uid="u", output_dir="/run")
    for environment in config.orchestrator.environments:
        assert len(load_environment(environment.id, environment.args).tasks("train"))
    assert run.metadata.name == path.stem


def test_readme_manifest_is_valid(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    file = tmp_path / "run.yaml"
    file.write_text(readme.split("```yaml\n")[1].split("```")[0])
    assert read_manifest(file).metadata.name == "quickstart"


def test_concepts_page_objectives_are_valid() -> None:
    """The snippet is one part of a specification, and its documented effects must be correct."""
    page = (Path(__file__).parents[3] / "docs" / "concepts.md").read_text()
    snippet = page.split("### An objective for one environment")[1].split("```yaml\n")[1].split("```")[0]
    head = "apiVersion: rlrun.io/v1alpha1\nkind: RLRun\nmetadata: {name: a}\nspec:\n  model: {path: /m}\n"
    run, _ = parse_manifest(head + "".join(f"  {line}\n" for line in snippet.splitlines()), "page.yaml")
    trainer = resolve_spec(run.spec, name="a", uid="u", output_dir="/run").trainer
    (own,) = [own.merged_over(trainer.algorithm) for own in trainer.environment_algorithms.values()]
    assert (own.effective_loss.name, own.effective_aggregation, own.regularizers.kl) == (
        "ppo",
        "seq_mean_token_mean",
        0.01,
    )
    assert trainer.algorithm.effective_loss.name == "aipo"
