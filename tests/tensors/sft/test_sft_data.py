"""SFT data: files, unusable rows, batches and resumption from a position."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlrun.config.models.data import DataConfig, DataSetConfig
from rlrun.environments.dataset_rows import RowError, Rows
from rlrun.orchestrator.sft.chat_samples import ChatEncoder, Encoded
from rlrun.orchestrator.sft.samples import (
    Encoder,
    Position,
    Reader,
    Snapshot,
    base_position,
    held_out,
    make_sample,
    write_snapshot,
)
from rlrun.orchestrator.sft.sft_attempt import expected_steps, make_mixture, open_sources
from rlrun.protocol.files.attempts import first_attempt, next_attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from tests.tensors.sft.conftest import TEMPLATES, chat, make_tokenizer

Write = Callable[..., Path]
CHATS = [chat(f"question {i}", f"answer {i}") for i in range(10)]


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(make_tokenizer(TEMPLATES["chatml"]))


def data_config(*paths: Path, **settings: Any) -> DataConfig:
    weights = settings.pop("weights", [1.0] * len(paths))
    sources = [{"path": str(path), "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    return DataConfig.model_validate({"sources": sources, "batchSize": 4, **settings})


def reader(config: DataConfig, encoder: ChatEncoder, *, seq_len: int = 64, position: Position | None = None) -> Reader:
    sources = open_sources(config)
    encode = Encoder(config, encoder, seq_len).encode
    return Reader(config, sources, make_mixture(config, sources, 0), encode, position or Position())


# ---- files


def test_all_data_formats_give_equal_rows(jsonl: Write, tmp_path: Path) -> None:
    rows = [*CHATS, {"messages": [*CHATS[0]["messages"], {"role": "tool", "content": "x", "tool_call_id": "7"}]}]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=3)
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    with pa.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    (saved / "cache-1.arrow").write_bytes(b"of another computation")
    files = [jsonl(rows), tmp_path / "data.parquet", tmp_path / "saved"]
    for path in files:
        found = Rows(DataSetConfig(path=str(path)), "data.sources[0]")
        assert [found.row(i) for i in range(len(found))] == rows
    assert Rows(DataSetConfig(path=str(files[1])), "x").describe_place(2) == "data.parquet row 3"


def test_data_folder_is_filtered_by_split(jsonl: Write, tmp_path: Path) -> None:
    jsonl(CHATS[:2], "set/train-00000-of-00002.jsonl")
    jsonl(CHATS[2:5], "set/train-00001-of-00002.jsonl")
    jsonl(CHATS[5:], "set/test.jsonl")
    rows = Rows(DataSetConfig(path=str(tmp_path / "set"), split="train"), "data.sources[0]")
    assert [rows.row(i) for i in range(len(rows))] == CHATS[:5]
    assert rows.describe_place(3) == "train-00001-of-00002.jsonl line 2"
    with pytest.raises(RoleError, match=r"has no .jsonl, .csv, .parquet or .arrow file of split 'dev'"):
        Rows(DataSetConfig(path=str(tmp_path / "set"), split="dev"), "data.sources[0]")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("none.jsonl", None, "no file or folder"),
        ("data.xlsx", "a,b", "data.xlsx is not a .jsonl, .csv, .parquet or .arrow file"),
        ("data.csv", "a,b", "has no rows"),
        ("empty.jsonl", "\n\n", "has no rows"),
        ("broken.parquet", "no parquet", "cannot read"),
    ],
)
def test_unreadable_data_source_is_named(tmp_path: Path, name: str, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RoleError, match=rf"^data.sources\[0\].*{problem}"):
        open_sources(data_config(tmp_path / name))


# ---- unusable rows


def test_broken_line_is_named_by_its_line_number(jsonl: Write) -> None:
    rows = Rows(DataSetConfig(path=str(jsonl([CHATS[0], "", "{broken", "[1]"]))), "x")
    assert len(rows) == 3
    with pytest.raises(RowError, match=r"data.jsonl line 3: it is not JSON"):
        rows.row(1)
    with pytest.raises(RowError, match=r"data.jsonl line 4: it is a list, expected one JSON object per line"):
        rows.row(2)


def test_malformed_row_fails_run_or_is_skipped(jsonl: Write, encoder: ChatEncoder) -> None:
    path = jsonl([CHATS[0], {"messages": [{"role": "user"}]}, *CHATS[1:4]])
    with pytest.raises(
        RoleError, match=r"data.jsonl line 2: messages\[0\].content is None.*set data.malformed to Skip"
    ):
        reader(data_config(path, shuffle=False), encoder).batch()
    skipping = reader(data_config(path, shuffle=False, malformed="Skip"), encoder)
    assert [sample.task_id for sample in skipping.batch()] == [f"data.jsonl line {n}" for n in (1, 3, 4, 5)]
    assert skipping.position == Position(5, {"skipped_malformed": 1})


def test_too_long_row_is_truncated_skipped_or_refused(jsonl: Write, encoder: ChatEncoder) -> None:
    path = jsonl([chat("q", "a"), chat("q", "a long " * 40), chat("why " * 40, "a")])
    config = data_config(path, shuffle=False, epochs=1)
    cut = reader(config, encoder, seq_len=32)
    samples = cut.batch()
    assert [len(sample) <= 32 for sample in samples] == [True, True]
    assert samples[1].loss_mask[-1]  # truncated in the middle of the reply
    assert cut.exhausted
    # The third row has no learned token after truncation.
    assert cut.position.counters == {"truncated": 2, "skipped_nothing_learned": 1}
    skipping = reader(config.model_copy(update={"too_long": "Skip"}), encoder, seq_len=32)
    assert len(skipping.batch()) == 1
    assert skipping.position.counters == {"skipped_too_long": 2}
    with pytest.raises(
        RoleError, match=r"line 2 has \d+ tokens, but seqLen is 32; increase seqLen, or set data.tooLong"
    ):
        reader(config.model_copy(update={"too_long": "Fail"}), encoder, seq_len=32).batch()


def test_data_without_usable_rows_ends_the_run(jsonl: Write, encoder: ChatEncoder) -> None:
    path = jsonl([{"messages": [{"role": "user", "content": "only a question"}]}] * 3)
    with pytest.raises(RoleError, match="no row is usable: 3 skipped nothing learned") as error:
        reader(data_config(path), encoder).batch()
    assert error.value.code == exit_codes.DATA


# ---- batches and positions


def test_batches_are_cut_by_rows_or_tokens(jsonl: Write, encoder: ChatEncoder) -> None:
    path = jsonl(CHATS)
    by_rows = reader(data_config(path, epochs=1), encoder)
    assert [len(by_rows.batch()) for _ in range(4)] == [4, 4, 2, 0]
    by_tokens = reader(data_config(path, epochs=1, batchTokens=100), encoder)
    sizes = []
    while batch := by_tokens.batch():
        sizes.append(sum(len(sample) for sample in batch))
    longest = max(len(sample) for sample in reader(data_config(path, batchSize=10), encoder).batch())
    assert all(100 - longest < size <= 100 for size in sizes[:-1])
    assert by_tokens.position.draws == 10


@pytest.mark.parametrize("settings", [{}, {"batchTokens": 90}, {"malformed": "Skip"}])
def test_resumed_reader_returns_the_same_samples(jsonl: Write, encoder: ChatEncoder, settings: dict[str, Any]) -> None:
    rows: list[Any] = [*CHATS, {"no": "chat"}] if "malformed" in settings else CHATS
    config = data_config(jsonl(rows), jsonl(CHATS[:3], "b.jsonl"), weights=[2.0, 1.0], epochs=2, **settings)

    def rest(position: Position) -> list[list[tuple[str, str, int]]]:
        found, batches = reader(config, encoder, position=position), []
        while batch := found.batch():
            batches.append([(s.environment, s.task_id, s.group) for s in batch])
        return batches

    whole = rest(Position())
    assert len(whole) > 3
    again = reader(config, encoder)
    for number in range(len(whole)):
        again.batch()
        assert not again.exhausted or number == len(whole) - 1
        assert rest(Position(**json.loads(json.dumps(vars(again.position))))) == whole[number + 1 :]


def test_mixture_keeps_proportions_in_every_batch(jsonl: Write, encoder: ChatEncoder) -> None:
    config = data_config(jsonl(CHATS), jsonl(CHATS, "b.jsonl"), weights=[3.0, 1.0])
    found = reader(config, encoder)
    for _ in range(10):
        assert sorted(Counter(sample.environment for sample in found.batch()).values()) == [1, 3]


def test_expected_steps_follow_from_epochs_and_rows(jsonl: Write) -> None:
    path = jsonl(CHATS)
    for settings, steps in (({"epochs": 3}, 8), ({}, None), ({"epochs": 3, "batchTokens": 64}, None)):
        config = data_config(path, **settings)
        assert expected_steps(config, make_mixture(config, open_sources(config), 0)) == steps


def test_only_tokens_with_weight_carry_loss() -> None:
    encoded = Encoded(np.array([5, 6, 7, 8], np.int32), np.array([0, 0, 1, 0.5], np.float32))
    made = make_sample(encoded, source="s", place="p", number=0)
    assert made.loss_mask.tolist() == [False, False, True, True]
    assert made.versions.tolist()[:2] == [-1, -1]
    assert made.advantages.tolist() == [0, 0, 1, 0.5]


def test_held_out_rows_are_the_first_rows(jsonl: Write, encoder: ChatEncoder) -> None:
    config = data_config(jsonl(CHATS))
    samples = held_out(open_sources(config)[0], Encoder(config, encoder, 64), limit=3)
    assert [sample.task_id for sample in samples] == ["data.jsonl line 1", "data.jsonl line 2", "data.jsonl line 3"]


def test_position_survives_restart_but_not_changed_data(jsonl: Write, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    fingerprints = tuple(rows.fingerprint for rows in open_sources(data_config(jsonl(CHATS))))
    first = first_attempt(world_size=2, config_hash="x")
    assert base_position(paths, first, fingerprints) == Position()
    write_snapshot(paths.checkpoint(5, 1), Snapshot(5, Position(20, {"truncated": 1}), fingerprints))
    second = next_attempt(first, 5, attempt=2, world_size=1, config_hash="x")
    assert base_position(paths, second, fingerprints) == Position(20, {"truncated": 1})
    other = tuple(rows.fingerprint for rows in open_sources(data_config(jsonl([*CHATS[:-1], chat("q", "b")]))))
    with pytest.raises(RoleError, match=r"data.sources\[0\] has other files than when it was saved"):
        base_position(paths, second, other)
    (paths.checkpoint(5, 1) / "orchestrator" / "data.json").write_text("{}")
    with pytest.raises(RoleError, match=r"orchestrator/data.json is unreadable"):
        base_position(paths, second, fingerprints)
