"""Plots of metric curves as SVG and PNG."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from rlrun.cli.main import main
from rlrun.inspect.curves import draw_svg, metric_curve
from rlrun.runtime import exit_codes


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rewards in (("a", [0.1, 0.2, 0.9]), ("b", [0.3, 0.3, 0.3])):
        root = tmp_path / "runs" / name
        root.mkdir(parents=True)
        (root / "run.json").write_text("{}")
        lines = [{"step": step, "reward/mean": reward, "time": 1.0} for step, reward in enumerate(rewards, 1)]
        (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_curves_are_drawn(runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "runs/a", "runs/b", "--metric", "reward/mean", "--smooth", "5"]) == 0
    text = capsys.readouterr().out
    assert "reward/mean" in text
    assert "runs/b" in text
    assert main(["plot", "runs/a", "--svg", "a.svg"]) == 0
    picture = ElementTree.fromstring(Path("a.svg").read_text())
    points = [one.get("points") for one in picture.iter() if one.tag.endswith("polyline")]
    assert points == ["70.0,320.0 455.0,285.0 840.0,40.0"]


def test_png_shows_same_curves_as_svg(runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "runs/a", "runs/b", "--metric", "reward/mean", "--png", "a.png"]) == 0
    with Image.open("a.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1720, 720))
        blue, red = (0x1F, 0x77, 0xB4), (0xD6, 0x27, 0x28)
        corners = {(140, 640): blue, (1679, 80): blue, (140, 500): red, (1678, 500): red}
        assert {place: picture.getpixel(place) for place in corners} == corners
        assert picture.getpixel((30, 30)) == (255, 255, 255)


def test_png_without_pillow_recommends_svg(
    runs: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["plot", "runs/a", "--png", "a.png"]) != 0
    assert "run pip install pillow, or use --svg" in capsys.readouterr().err
    assert not Path("a.png").exists()


def test_unknown_metric_is_refused_with_suggestion(runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "runs/a", "--metric", "reward/men"]) == exit_codes.USAGE
    assert "unknown metric 'reward/men' (did you mean reward/mean?)" in capsys.readouterr().err


def test_smoothing_averages_last_values_without_invalid_ones() -> None:
    lines = [{"step": step, "m": value} for step, value in enumerate([1.0, 3.0, float("nan"), 5.0, "x", True])]
    assert metric_curve("l", lines, "m", 2).values == [1.0, 2.0, 4.0]
    assert metric_curve("l", lines, "m").steps == [0, 1, 3]


def test_long_curve_keeps_peaks_and_ends() -> None:
    values = [float(step % 7) for step in range(5000)]
    values[1234], values[4001] = 99.0, -99.0
    found = metric_curve("l", [{"step": step, "m": value} for step, value in enumerate(values)], "m")
    assert 900 < len(found.steps) <= 1000
    assert list(found.steps) == sorted(set(found.steps))
    points = dict(zip(found.steps, found.values, strict=True))
    assert (points[1234], points[4001], points[0], points[4999]) == (99.0, -99.0, 0.0, values[-1])
    assert all(values[step] == value for step, value in points.items())


def test_svg_label_is_escaped() -> None:
    assert "<script>" not in draw_svg("<script>", [metric_curve("<script>", [{"step": 1, "m": 1.0}], "m")])
