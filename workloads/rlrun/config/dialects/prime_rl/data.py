"""Keys of `[data]`, `[val]` and what else a file of `sft` has beside the trainer's keys."""

from __future__ import annotations

from rlrun.config.dialects.conversions import defer_value, if_set, loss_roles, map_choice, only_values, read_place
from rlrun.config.dialects.rows import Row, ignored_key, mapped_key, refused_key, same_key

_ONE = "data.sources[0]"
_PACKED = "rows are packed into micro-batches of trainer.micro_batch_tokens: the result is the same"
_STOPPING = "the run ends at max_steps; data.epochs ends it with the data"

ROWS: tuple[Row, ...] = (
    mapped_key("data.type", "data.sources", by=defer_value("data_type"), text="fake: with --bench alone"),
    mapped_key("data.fake", "data.sources", by=defer_value("data_fake"), text="with --bench alone"),
    mapped_key("data.length", "data.sources", by=defer_value("data_length"), text="with --bench alone"),
    ignored_key("data.input_ids", "fake data are random tokens"),
    mapped_key("data.name", f"{_ONE}.name", f"{_ONE}.path", by=read_place, text="a name with a path's form is path"),
    mapped_key("data.path", f"{_ONE}.path"),
    mapped_key("data.split", f"{_ONE}.split"),
    mapped_key("data.splits", f"{_ONE}.split", by=defer_value("splits"), text="a source each"),
    mapped_key("data.probabilities", f"{_ONE}.weight", by=defer_value("probabilities"), text="of the source of each split"),
    mapped_key("data.subsets", f"{_ONE}.split", by=defer_value("subsets"),
        text="a source each: the files and folders of that name, of every split"),
    ignored_key("data.stopping_strategy", _STOPPING, only_values(("first_exhausted", "all_exhausted"), _STOPPING, _STOPPING)),
    same_key("data.shuffle"),
    same_key("data.batch_size"),
    mapped_key("data.seed", "seed"),
    mapped_key("data.seq_len", "seq_len"),
    ignored_key("data.micro_batch_size", _PACKED),
    ignored_key("data.pack_function", _PACKED),
    ignored_key("data.num_workers", "rows are read by one process, ahead of the trainer"),
    refused_key(
        "data.num_examples", "there is none: write the rows into a file of their own, and name it in data.sources[].path", f"{_ONE}.path",
    ),
    mapped_key("data.loss_mask", "data.loss_roles", by=loss_roles),
    mapped_key("data.source[].dataset", "data.sources[].name", "data.sources[].path", by=read_place,
        text="a name with a path's form is path"),
    mapped_key("data.source[].name", "data.sources[].name", "data.sources[].path", by=read_place, text="a name with a path's form is path"),
    mapped_key("data.source[].split", "data.sources[].split", by=if_set),
    mapped_key("data.source[].weight", "data.sources[].weight", by=if_set),
    mapped_key("data.source[].probability", "data.sources[].weight", by=if_set),
    mapped_key("data.source[].type", "data.sources", by=defer_value("data_type"), text="fake: with --bench alone"),
    refused_key(
        "data.source[].subset",
        "there is none: write it as data.sources[].split, which takes the files and folders with that in their name",
        "data.sources[].split",
    ),
    mapped_key("val.interval", "data.validation.interval"),
    mapped_key("val.data.name", "data.validation.name", "data.validation.path", by=read_place, text="a name with a path's form is path"),
    mapped_key("val.data.splits", "data.validation.split", by=map_choice({}, "write one split")),
    ignored_key("val.data.*", "validation reads its rows in order, in micro-batches of the trainer"),
    ignored_key("val.eval_on_start", "the loss is always measured before the first step"),
    ignored_key("loss_mask", "data.loss_mask says which messages are learned", only_values(({},), "an empty table", "write it in [data]")),
    ignored_key("eval", "supervised fine-tuning has no engines; eval measures its checkpoints afterwards"),
)  # fmt: skip
