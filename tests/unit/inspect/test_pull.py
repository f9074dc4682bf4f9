"""`rlrun pull` copies parts of a run out of a cluster completely, or not at all."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from rlrun.cli.main import main
from rlrun.runtime import exit_codes
from tests.unit.inspect.broken import run
from tests.unit.inspect.recorded import PODS, Recorded, Use, of_run

STORAGE = {"storage": {"claimName": "a-data", "path": "/data/a"}}
NEWEST = "weights/v00000009.a0002"


def packed(*names: str, cut: int = 0) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(name)
            archive.addfile(entry, io.BytesIO(name.encode()))
    return out.getvalue()[:cut] if cut else out.getvalue()


@pytest.fixture
def cluster(use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Cluster with a run whose newest model is incomplete."""
    monkeypatch.chdir(tmp_path)
    return use(
        of_run(
            run("Running", **STORAGE),
            ("ls -1 /data/a/weights/v00000012", "config.json\n"),
            ("ls -1 /data/a/weights/v", "COMPLETE\nconfig.json\n"),
            (
                "ls -1 /data/a/weights",
                "v00000003.a0001\nv00000012.a0002\nv00000009.a0002\nv00000015.a0002.tmp\nv99/../../x\n",
            ),
            ("ls -1 /data/a/checkpoints", ""),
            pods=PODS,
        )
    )


def test_pull_copies_newest_complete_model(
    cluster: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.streams[f"tar -C /data/a -cf - -- {NEWEST}"] = packed(f"{NEWEST}/config.json", f"{NEWEST}/COMPLETE")
    assert main(["pull", "a", "model"]) == 0
    assert capsys.readouterr().out == f"a-model: {NEWEST} of a, 2 files\n"
    assert sorted(path.name for path in (tmp_path / "a-model").iterdir()) == ["COMPLETE", "config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["a-model"]
    assert main(["pull", "a", "model"]) == exit_codes.USAGE
    cluster.streams = {"weights/v00000003.a0001": packed("weights/v00000003.a0001/config.json")}
    assert main(["pull", "a", "model", "--step", "3", "--to", "old"]) == 0
    cluster.streams = {"-- metrics.jsonl": packed("metrics.jsonl")}
    assert main(["pull", "a", "metrics", "--to", "m.jsonl"]) == 0
    assert (tmp_path / "m.jsonl").read_text() == "metrics.jsonl"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model", "--step", "12"], "no complete folder in weights of step 12; existing steps: 3, 9, 12"),
        (["checkpoint"], "no complete folder in checkpoints; there are no steps yet"),
        (["traces", "--step", "3"], "--step is for a model or a checkpoint"),
    ],
)
def test_pull_of_missing_part_is_explained(
    cluster: Recorded, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "a", *words]) == exit_codes.USAGE
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "stream",
    [b"", packed(f"{NEWEST}/config.json", cut=100), packed(f"{NEWEST}/x", "../../out"), packed("elsewhere/x")],
    ids=["empty", "cut", "out of the folder", "another folder"],
)
def test_incomplete_stream_leaves_no_files(
    cluster: Recorded, stream: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.streams[NEWEST] = stream
    assert main(["pull", "a", "model"]) == exit_codes.FAILURE
    assert "is incomplete" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert not (tmp_path.parent / "out").exists()


ENTRIES: dict[str, list[tuple[str, bytes, str]]] = {
    "a link that leads out, and a file through it": [
        (f"{NEWEST}/out", tarfile.SYMTYPE, "../../.."),
        (f"{NEWEST}/out/victim", tarfile.REGTYPE, ""),
    ],
    "a second name of a file outside": [(f"{NEWEST}/x", tarfile.LNKTYPE, "../../victim")],
    "a second name through a link": [
        (f"{NEWEST}/out", tarfile.SYMTYPE, "../../.."),
        (f"{NEWEST}/x", tarfile.LNKTYPE, f"{NEWEST}/out/victim"),
        (f"{NEWEST}/x", tarfile.REGTYPE, ""),
    ],
    "an absolute path": [("/tmp/victim", tarfile.REGTYPE, "")],
    "a path that leads out": [(f"{NEWEST}/../../../victim", tarfile.REGTYPE, "")],
    "a file in the place of a folder": [(f"{NEWEST}/a", tarfile.REGTYPE, ""), (f"{NEWEST}/a/b", tarfile.REGTYPE, "")],
    "a name twice": [(f"{NEWEST}/a", tarfile.REGTYPE, ""), (f"{NEWEST}/a", tarfile.REGTYPE, "")],
}


def linked(entries: list[tuple[str, bytes, str]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, link in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, link
            entry.size = 1 if kind == tarfile.REGTYPE else 0
            archive.addfile(entry, io.BytesIO(b"!"))
    return out.getvalue()


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=list(ENTRIES))
def test_pull_writes_only_below_target(
    cluster: Recorded, tmp_path: Path, entries: list[tuple[str, bytes, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("the user's own")
    cluster.streams[NEWEST] = linked(entries)
    code = main(["pull", "a", "model"])
    assert victim.read_text() == "the user's own"
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))
    assert victim.stat().st_nlink == 1
    refused = code == exit_codes.FAILURE and "is incomplete" in capsys.readouterr().err
    assert refused != (tmp_path / "a-model").exists()


def test_second_names_are_kept_and_links_are_named(
    cluster: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.streams[NEWEST] = linked(
        [
            (f"{NEWEST}/a", tarfile.REGTYPE, ""),
            (f"{NEWEST}/b", tarfile.LNKTYPE, f"{NEWEST}/a"),
            (f"{NEWEST}/link", tarfile.SYMTYPE, "a"),
            (f"{NEWEST}/pipe", tarfile.FIFOTYPE, ""),
        ]
    )
    assert main(["pull", "a", "model"]) == 0
    assert sorted(path.name for path in (tmp_path / "a-model").iterdir()) == ["a", "b"]
    assert (tmp_path / "a-model" / "b").read_text() == "!"
    told = capsys.readouterr()
    assert "2 files" in told.out
    assert f"2 links and devices were skipped: {NEWEST}/link, {NEWEST}/pipe" in told.err


def test_pull_copies_whole_run_folder(cluster: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.streams["tar -C /data/a -cf - -- ."] = packed("./run.json", "./attempts/0001.json")
    assert main(["pull", "a", "run", "--to", "here"]) == 0
    assert capsys.readouterr().out == "here: the folder of a, 2 files\n"
    assert (tmp_path / "here" / "attempts" / "0001.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
