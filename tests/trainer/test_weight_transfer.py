"""Versions from the memory of real ranks to engine servers in this process, over the trainer's channel and gloo."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from rlrun.config.models.checkpoint import WeightSyncConfig
from rlrun.config.models.language_models import LoRAConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.inference.weights.delta_folders import Rebuilder
from rlrun.inference.weights.incoming import Fetching
from rlrun.inference.weights.receive import Receiver, RefusedError, Staging
from tests.trainer.conftest import KEY, Orchestrator, Run

BUCKET_BYTES = 4096
"""Bucket size that gives about twenty buckets of the tiny model."""
MakeRun = Callable[[str], Run]


@pytest.fixture
def receivers(tmp_path: Path) -> Iterator[list[Receiver]]:
    """Create the servers of two engines without the engines."""
    memory = tmp_path / "memory"
    memory.mkdir()
    made = [Receiver(api_key=KEY, expected=None, make_fetch=Fetching, staging=Staging(memory)) for _ in range(2)]
    yield made
    for receiver in made:
        receiver.close()
    assert list(memory.iterdir()) == []


def fetch(receivers: list[Receiver], run: Run, version: int) -> list[Path | BaseException]:
    """Return the folder that each receiver gets, or its error."""

    async def all_of_them() -> list[Path | BaseException]:
        url = f"http://127.0.0.1:{run.port}"
        return await asyncio.gather(*(one.fetch(url, version) for one in receivers), return_exceptions=True)

    return asyncio.run(all_of_them())


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def start(
    run: Run,
    ranks: int,
    environment: dict[str, str] | None = None,
    transport: Literal["Filesystem", "NCCL"] = "NCCL",
    **options: Any,
) -> Orchestrator:
    """Start the ranks; `deltas` in `options` enables differences between bfloat16 versions of small steps."""
    if "deltas" in options:
        options |= {"dtype": "bfloat16", "optimizer": OptimizerConfig(lr=1e-6)}
    sync = WeightSyncConfig(transport=transport, deltas=options.pop("deltas", "Never"))
    sizes = {"TEST_BUCKET_BYTES": str(BUCKET_BYTES)}
    run.start(ranks=ranks, weight_sync=sync, environment=sizes | (environment or {}), **options)
    orchestrator = Orchestrator(run, 1)
    orchestrator.wait_for("published", 0)
    return orchestrator


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_received_version_equals_written_version(ranks: int, make_run: MakeRun, receivers: list[Receiver]) -> None:
    run = make_run("sent")
    orchestrator = start(run, ranks)
    for step in (1, 2):
        orchestrator.send_batch(step)
        orchestrator.wait_for("trained", step)
        version = orchestrator.wait_for("published", step)
        folders = fetch(receivers, run, step)
    assert version.path is not None, "this step has a checkpoint"
    written = tensors(Path(version.path))
    for folder in folders:
        assert isinstance(folder, Path), folder
        assert len(list(folder.glob("*.safetensors"))) > 2 * ranks
        received = tensors(folder)
        assert received.keys() == written.keys()
        assert all(received[n].dtype == written[n].dtype and torch.equal(received[n], written[n]) for n in written)
    found = re.findall(r"root (\d) holds (\d+) bytes of version 2", run.groups[-1].text())
    held, whole = {int(root): int(size) for root, size in found}, [tensor.nbytes for tensor in written.values()]
    assert held.keys() == set(range(ranks))
    assert sum(held.values()) == sum(whole)
    assert max(held.values()) <= sum(whole) / ranks + max(BUCKET_BYTES, *whole), "it falls with the ranks"


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == wanted[n].dtype and torch.equal(found[n].view(torch.uint8), wanted[n].view(torch.uint8))
        for n in wanted
    )


def bytes_of(run: Run, orchestrator: Orchestrator, step: int) -> tuple[float, float]:
    """Return the bytes of a version in the trainer's metrics of a step: as sent, and as a whole."""
    metrics = orchestrator.wait_for("trained", step).metrics
    return metrics["weights/sent_bytes"], metrics["weights/bytes"]


@pytest.mark.full
def test_sent_differences_give_the_written_versions(make_run: MakeRun, receivers: list[Receiver]) -> None:
    run = make_run("sent")
    orchestrator = start(run, 2, deltas="Auto")
    for step in range(5):
        if step:
            orchestrator.send_batch(step)
        version = orchestrator.wait_for("published", step)
        folders = fetch(receivers, run, step)
        for folder in folders:
            assert isinstance(folder, Path), folder
        if step % 2 == 0 and step:
            assert version.path is not None, "this step has a checkpoint"
            assert all(same(tensors(Path(str(folder))), tensors(Path(version.path))) for folder in folders)
    sent, whole = bytes_of(run, orchestrator, 4)  # version 3
    assert 0 < sent < 0.3 * whole
    said = {int(number) for number in re.findall(r"version (\d) goes to .* sent as \d+ of", run.groups[-1].text())}
    assert said == {1, 2, 3, 4}


@pytest.mark.full
def test_written_differences_are_rebuilt_by_engines(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("written")
    orchestrator = start(run, 2, transport="Filesystem", deltas="Auto", max_steps=5)
    memories = [tmp_path / "steady", tmp_path / "late"]
    for memory in memories:
        memory.mkdir()
    versions: dict[int, dict[str, torch.Tensor]] = {}
    steady, late = (Rebuilder(expected=None, staging=Staging(memory)) for memory in memories)
    for step in range(5):
        if step:
            orchestrator.send_batch(step)
        version = orchestrator.wait_for("published", step)
        assert version.path is not None
        if not step:
            assert Path(version.path) == run.paths.version(0, 1)
            continue
        assert Path(version.path) == run.paths.delta(step, 1)
        folder = steady.make(Path(version.path))
        versions[step] = {name: tensor.clone() for name, tensor in tensors(folder).items()}
        if step % 2 == 0:  # step with a checkpoint
            assert same(versions[step], tensors(run.paths.version(step, 1)))
    sent, whole = bytes_of(run, orchestrator, 4)
    assert sent == sum(path.stat().st_size for path in run.paths.delta(4, 1).glob("*.bin")) < 0.3 * whole
    assert whole == sum(tensor.nbytes for tensor in versions[4].values())
    assert same(tensors(late.make(run.paths.delta(3, 1))), versions[3])
    assert same(tensors(late.make(run.paths.delta(4, 1))), versions[4])


@pytest.mark.full
def test_adapters_are_published_whole(make_run: MakeRun) -> None:
    run = make_run("adapters")
    lora = LoRAConfig(rank=4)
    orchestrator = start(run, 1, transport="Filesystem", deltas="Auto", lora=lora)
    orchestrator.send_batch(1)
    assert orchestrator.wait_for("published", 1).path == str(run.paths.version(1, 1))
    assert "weights/bytes" not in orchestrator.wait_for("trained", 1).metrics
    assert run.paths.deltas_on_disk() == []


@pytest.mark.full
def test_rank_killed_while_sending_leaves_no_partial_version(make_run: MakeRun, receivers: list[Receiver]) -> None:
    run = make_run("killed")
    orchestrator = start(run, 2, {"TEST_DIE_SENDING": "1"})
    assert all(isinstance(folder, Path) for folder in fetch(receivers, run, 0))
    orchestrator.send_batch(1)
    orchestrator.wait_for("published", 1)
    for refused in fetch(receivers, run, 1):
        assert isinstance(refused, RefusedError)
        assert "the transfer of version 1" in str(refused)
        assert not refused.gone, "another attempt has it again"
    assert not any(list(receiver._staging._process_folder().glob("v*")) for receiver in receivers)
