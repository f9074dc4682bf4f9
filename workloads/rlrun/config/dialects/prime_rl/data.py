"""Keys of `[data]`, `[val]` and other keys of a file for `sft`, except the trainer's."""

from __future__ import annotations

from rlrun.config.dialects.conversions import defer_value, if_set, loss_roles, map_choice, only_values, read_place
from rlrun.config.dialects.rows import Row, ignored_key, mapped_key, refused_key, same_key

_ONE = "data.sources[0]"
_PACKED = "rows are packed into micro-batches of trainer.micro_batch_tokens, with the same result"
_STOPPING = "the run ends at max_steps; data.epochs ends it with the data"

DATA_ROWS: tuple[Row, ...] = (
    mapped_key("data.type", "data.sources", by=defer_value("data_type"), text="fake: only with --bench"),
    mapped_key("data.fake", "data.sources", by=defer_value("data_fake"), text="only with --bench"),
    mapped_key("data.length", "data.sources", by=defer_value("data_length"), text="only with --bench"),
    ignored_key("data.input_ids", "fake data are random tokens"),
    mapped_key("data.name", f"{_ONE}.name", f"{_ONE}.path", by=read_place, text="a path becomes path"),
    mapped_key("data.path", f"{_ONE}.path"),
    mapped_key("data.split", f"{_ONE}.split"),
    mapped_key("data.splits", f"{_ONE}.split", by=defer_value("splits"), text="one source per split"),
    mapped_key("data.probabilities", f"{_ONE}.weight", by=defer_value("probabilities"), text="weight of the source of each split"),
    mapped_key("data.subsets", f"{_ONE}.split", by=defer_value("subsets"),
        text="one source per subset: the files and folders of that name, in every split"),
    ignored_key("data.stopping_strategy", _STOPPING, only_values(("first_exhausted", "all_exhausted"), _STOPPING, _STOPPING)),
    same_key("data.shuffle"),
    same_key("data.batch_size"),
    mapped_key("data.seed", "seed"),
    mapped_key("data.seq_len", "seq_len"),
    ignored_key("data.micro_batch_size", _PACKED),
    ignored_key("data.pack_function", _PACKED),
    ignored_key("data.num_workers", "one process reads rows ahead of the trainer"),
    refused_key(
        "data.num_examples", "not supported: write the rows into a separate file, and set data.sources[].path to it", f"{_ONE}.path",
    ),
    mapped_key("data.loss_mask", "data.loss_roles", by=loss_roles),
    mapped_key("data.source[].dataset", "data.sources[].name", "data.sources[].path", by=read_place,
        text="a path becomes path"),
    mapped_key("data.source[].name", "data.sources[].name", "data.sources[].path", by=read_place, text="a path becomes path"),
    mapped_key("data.source[].split", "data.sources[].split", by=if_set),
    mapped_key("data.source[].weight", "data.sources[].weight", by=if_set),
    mapped_key("data.source[].probability", "data.sources[].weight", by=if_set),
    mapped_key("data.source[].type", "data.sources", by=defer_value("data_type"), text="fake: only with --bench"),
    refused_key(
        "data.source[].subset",
        "not supported: write it as data.sources[].split, which selects files and folders by their names",
        "data.sources[].split",
    ),
    mapped_key("val.interval", "data.validation.interval"),
    mapped_key("val.data.name", "data.validation.name", "data.validation.path", by=read_place, text="a path becomes path"),
    mapped_key("val.data.splits", "data.validation.split", by=map_choice({}, "write one split")),
    ignored_key("val.data.*", "validation reads its rows in order, in micro-batches"),
    ignored_key("val.eval_on_start", "the loss is always measured before the first step"),
    ignored_key("loss_mask", "data.loss_mask selects the messages to train on", only_values(({},), "an empty table", "write it in [data]")),
    ignored_key("eval", "supervised fine-tuning has no engines; run eval to evaluate its checkpoints"),
)  # fmt: skip
