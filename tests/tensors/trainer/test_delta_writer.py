"""Weight differences of one rank over optimizer steps, compared with whole versions and read by an engine."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlrun.config.models.language_models import DType, ModelConfig
from rlrun.inference.weights.delta_folders import Rebuilder
from rlrun.inference.weights.receive import Staging
from rlrun.protocol.files.attempts import first_attempt
from rlrun.protocol.files.batch import Sample
from rlrun.protocol.files.paths import COMPLETE, Artifact, RunPaths
from rlrun.protocol.files.volume_faults import RefusedError
from rlrun.protocol.messages.buckets import read_manifest
from rlrun.trainer.learning.forward import token_logprobs
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling.model_files import model_files
from rlrun.trainer.modeling.shard import load_model, shard_model
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import delta_writer, hf_writer
from rlrun.trainer.weights.delta_writer import Compared, DeltaWriter
from rlrun.trainer.weights.version_retention import delete_superfluous

BUCKET_BYTES = 20_000
STEPS = 5


class Run:
    """Model that is trained and published like in the publisher."""

    def __init__(
        self, folder: Path, source: Path, group: Group, dtype: DType, make_sample: Callable[..., Sample]
    ) -> None:
        self.make_sample = make_sample
        self.paths, self.group, self.dtype = RunPaths(folder / "run"), group, dtype
        config = ModelConfig(path=str(source), dtype=dtype)
        self.model: nn.Module = load_model(config, str(source))
        self.files = model_files(self.model, config, str(source))
        shard_model(self.model, group)
        self.writer = self.new_writer(1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.reference = folder / "reference"

    def new_writer(self, attempt: int) -> DeltaWriter:
        return DeltaWriter(
            self.model,
            self.dtype,
            paths=self.paths,
            attempt=attempt,
            group=self.group,
            bucket_bytes=BUCKET_BYTES,
        )

    def train(self, seed: int) -> None:
        samples = [self.make_sample(length, seed=seed) for length in (9, 14)]
        self.optimizer.zero_grad()
        (-token_logprobs(self.model, micro_batch(samples, torch.device("cpu"))).sum()).backward()
        self.optimizer.step()

    def publish(self, step: int, *, whole: bool = False) -> tuple[Path, Compared]:
        """Return the folder for engines."""
        version = self.writer.compare(step)
        whole = whole or self.writer.whole_due(version)
        path = self.paths.version(step, 1)
        if whole:
            hf_writer.publish_version(self.model, path, files=self.files, dtype=self.dtype, group=self.group)
        if version.about is not None:
            path = self.writer.write(version, whole=whole)
        self.writer.set_base(version, whole=whole)
        return path, version

    def whole(self, step: int) -> dict[str, Tensor]:
        """Return the same version, written as a whole."""
        path = self.reference / f"v{step}"
        hf_writer.publish_version(self.model, path, files=self.files, dtype=self.dtype, group=self.group)
        return tensors(path)


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {name: tensor.clone() for name, tensor in load_file(path).items()}
    return found


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == wanted[n].dtype and torch.equal(found[n].view(torch.uint8), wanted[n].view(torch.uint8))
        for n in wanted
    )


@pytest.fixture
def make_run(
    tmp_path: Path,
    solo: Group,
    source: Path,
    make_model: Callable[..., nn.Module],
    make_sample: Callable[..., Sample],
) -> Callable[[str, bool, DType], Run]:
    def make(family: str, tied: bool, dtype: DType) -> Run:
        make_model(family, tied=tied).save_pretrained(source)
        return Run(tmp_path, source, solo, dtype, make_sample)

    return make


def engine(memory: Path) -> Rebuilder:
    memory.mkdir(exist_ok=True)
    return Rebuilder(expected=None, staging=Staging(memory))


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [("qwen3", True, "bfloat16"), ("llama", False, "bfloat16"), ("llama", False, "float32")],
)
def test_rebuilt_version_equals_whole_version(
    family: str, tied: bool, dtype: DType, tmp_path: Path, make_run: Callable[[str, bool, DType], Run]
) -> None:
    run, steady = make_run(family, tied, dtype), engine(tmp_path / "steady")
    for step in range(STEPS):
        if step:
            run.train(step)
        folder, version = run.publish(step, whole=step == 3)
        wanted = run.whole(step)
        if not step or dtype == "float32":  # nearly all elements of a master weight change in each step
            assert folder == run.paths.version(step, 1)
            assert version.sent == version.size
            assert same(tensors(folder), wanted)
            continue
        assert folder == run.paths.delta(step, 1)
        assert version.sent < 0.2 * version.size
        assert sum(path.stat().st_size for path in folder.glob("*.bin")) == version.sent
        assert same(tensors(steady.make(folder)), wanted)
        assert same(tensors(engine(tmp_path / f"late-{step}").make(folder)), wanted)


def test_refused_version_is_not_used_as_base(
    tmp_path: Path, make_run: Callable[[str, bool, DType], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reader = make_run("qwen3", False, "bfloat16"), engine(tmp_path / "memory")
    run.publish(0)
    run.train(1)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(delta_writer, "fsync_path", full)
        with pytest.raises(RefusedError, match="cannot publish weights"):
            run.publish(1)
    assert [path.name for path in run.paths.weights.iterdir()] == ["v00000000.a0001"], "nothing of it is left"
    run.train(2)
    folder, _ = run.publish(2)
    assert read_manifest(folder).whole_base == "v00000000.a0001"
    assert same(tensors(reader.make(folder)), run.whole(2))


def test_new_attempt_starts_with_a_whole_version(make_run: Callable[[str, bool, DType], Run]) -> None:
    run = make_run("qwen3", False, "bfloat16")
    run.publish(0)
    run.writer = run.new_writer(2)
    version = run.writer.compare(0)
    assert version.about is None
    assert run.writer.whole_due(version)


def test_whole_version_is_due_and_needed_deltas_are_kept(
    tmp_path: Path, make_run: Callable[[str, bool, DType], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_writer, "WHOLE_EVERY", 4)
    run, attempt = make_run("qwen3", False, "bfloat16"), first_attempt(world_size=1, config_hash="")
    published: dict[int, Path] = {}
    for step in range(11):
        run.train(step)
        published[step], _ = run.publish(step)
        delete_superfluous(run.paths, attempt=attempt, max_async_level=1)
        for late in sorted(published)[-3:]:
            if late not in (0,):
                assert engine(tmp_path / f"{step}-{late}").make(published[late])
    assert steps(run.paths.versions_on_disk()) == [8]
    assert steps(run.paths.deltas_on_disk()) == [8, 9, 10]
    assert all((path / COMPLETE).exists() for path in run.paths.weights.iterdir())


def steps(found: Sequence[Artifact]) -> list[int]:
    return [artifact.step for artifact in found]
