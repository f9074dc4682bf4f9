"""Complete curves with one value per step after kills, read with each tracker's own reader."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlrun.runtime import exit_codes
from rlrun.runtime.extras import install_extras
from tests.processes.tracking.conftest import SinkOf, needs
from tests.support.programs import finish, wait_for, wait_for_exit
from tests.support.python_path import before
from tests.support.tracked_run import UID

Curve = list[tuple[int, float]]


def of_tensorboard(root: Path) -> Curve:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(root / "tracking" / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars("loss/mean")]


def of_wandb(root: Path) -> Curve:
    """Return the last row of each step, as in a chart over `step`; no row of the history may occur twice."""
    from rlrun.tracking.backends.wandb_run import read_history

    rows: dict[int, tuple[int, float]] = {}
    for path in sorted((root / "tracking").glob(f"wandb/offline-run-*-{UID}/run-{UID}.wandb")):
        for number, row in read_history(path):
            assert number not in rows
            rows[number] = (int(row["step"]), float(row["loss/mean"]))
    assert sorted(rows) == list(range(len(rows)))
    return sorted(dict(row for _, row in sorted(rows.items())).items())


READERS: dict[str, Callable[[Path], Curve]] = {"tensorboard": of_tensorboard, "wandb": of_wandb}
CONFIGS: dict[str, dict[str, object]] = {"tensorboard": {}, "wandb": {"offline": True}}


@pytest.mark.parametrize("tracker", ["tensorboard", pytest.param("wandb", marks=pytest.mark.full)])
def test_killed_and_resumed_run_has_one_complete_curve(tracker: str, sink_of: Callable[..., SinkOf]) -> None:
    needs(tracker)
    sink = sink_of({tracker: CONFIGS[tracker]})
    run = sink.run
    sink.start()
    for step in range(1, 13):
        run.step(step)
        time.sleep(0.02)
    wait_for(lambda: sink.sent(tracker) >= 5)
    sink.kill()
    for step in range(13, 21):
        run.step(step)
    run.begin(2, base_step=8)
    sink.start()
    for step in range(9, 31):
        run.step(step)
    wait_for(lambda: sink.sent(tracker) >= 20)
    sink.kill()
    run.begin(3, base_step=30)
    for step in range(31, 41):
        run.step(step)
    sink.start()
    sink.finish()
    assert READERS[tracker](run.paths.root) == run.expected()
    assert [step for step, _ in run.expected()] == list(range(1, 41))


def test_tensorboard_gets_configuration_samples_and_histograms(sink_of: Callable[..., SinkOf]) -> None:
    needs("tensorboard")
    sink = sink_of({"tensorboard": {}, "samples": {"interval": 2}})
    for step in (1, 2):
        sink.run.step(step)
    assert wait_for_exit(sink.start("--once")) == exit_codes.OK
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(sink.run.paths.root / "tracking" / "tensorboard"), size_guidance={"histograms": 0})
    found.Reload()
    (config,) = found.Tensors("config")
    text = config.tensor_proto.string_val[0].decode()
    assert json.loads(text.removeprefix("```json\n").removesuffix("\n```"))["trainer"]["uid"] == UID
    (samples,) = found.Tensors("samples")
    assert "|reverse-text|7|user: abc|cba|0.25|-0.125|1|" in samples.tensor_proto.string_val[0].decode()
    (rewards,) = found.Histograms("distributions/rewards")
    value = rewards.histogram_value
    assert (value.num, value.min, value.max, value.sum) == (4, 0, 0.75, 1.5)
    assert sum(value.bucket) == 4


def test_wandb_gets_configuration_and_tables(sink_of: Callable[..., SinkOf]) -> None:
    needs("wandb")
    from wandb.proto import wandb_internal_pb2

    from rlrun.tracking.backends.wandb_run import read_messages

    sink = sink_of({"wandb": {"offline": True, "project": "p", "tags": ["t"]}, "samples": {"interval": 2}}, max_steps=2)
    for step in (1, 2):
        sink.run.step(step)
    assert wait_for_exit(sink.start("--once")) == exit_codes.OK
    (log,) = (sink.run.paths.root / "tracking").glob("wandb/offline-run-*/run-*.wandb")
    records = []
    for message in read_messages(log.read_bytes()):
        records.append(wandb_internal_pb2.Record())
        records[-1].ParseFromString(message)
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.run_id, run.project, run.display_name, list(run.tags)) == (UID, "p", "tracked", ["t"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["trainer"]["max_steps"] == 2
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    (table,) = log.parent.glob("files/media/table/samples_*.table.json")
    assert json.loads(table.read_text())["data"][0][1:5] == ["reverse-text", "7", "user: abc", "cba"]


def test_wandb_log_of_many_blocks_is_read_unchanged(sink_of: Callable[..., SinkOf]) -> None:
    """Some rows are longer than a block, and some blocks end within a header."""
    needs("wandb")
    sink = sink_of({"wandb": {"offline": True}}, max_steps=12)
    for step in range(1, 13):
        sink.run.step(step, **{f"env/reverse-text/{i}": float(i) for i in range(150 * step)})
    assert wait_for_exit(sink.start("--once")) == exit_codes.OK
    assert of_wandb(sink.run.paths.root) == sink.run.expected()


def test_missing_package_ends_only_its_tracker(sink_of: Callable[..., SinkOf], tmp_path: Path) -> None:
    sink = sink_of({"wandb": {"offline": True}})
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("raise ImportError('broken', name='wandb')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", before(tmp_path))
        process = sink.start("--once")
    output, _ = finish(process)
    assert process.returncode == exit_codes.FAILURE
    assert (
        f"wandb: needs the package wandb, which is not installed; install it: {install_extras('wandb')}; the run"
        in output
    )
