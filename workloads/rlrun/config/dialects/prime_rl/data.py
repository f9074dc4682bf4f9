"""Keys of `[data]`, `[val]` and what else a file of `sft` has beside the trainer's keys."""

from __future__ import annotations

from rlrun.config.dialects.conversions import choice, later, loss_roles, only, optional, place
from rlrun.config.dialects.rows import Row, ignored, refused, same, to

_ONE = "data.sources[0]"
_PACKED = "rows are packed into micro-batches of trainer.micro_batch_tokens: the result is the same"
_STOPPING = "the run ends at max_steps; data.epochs ends it with the data"

ROWS: tuple[Row, ...] = (
    to("data.type", "data.sources", by=later("data_type"), text="fake: with --bench alone"),
    to("data.fake", "data.sources", by=later("data_fake"), text="with --bench alone"),
    to("data.length", "data.sources", by=later("data_length"), text="with --bench alone"),
    ignored("data.input_ids", "fake data are random tokens"),
    to("data.name", f"{_ONE}.name", f"{_ONE}.path", by=place, text="a name with a path's form is path"),
    to("data.path", f"{_ONE}.path"),
    to("data.split", f"{_ONE}.split"),
    to("data.splits", f"{_ONE}.split", by=later("splits"), text="a source each"),
    to("data.probabilities", f"{_ONE}.weight", by=later("probabilities"), text="of the source of each split"),
    to("data.subsets", f"{_ONE}.split", by=later("subsets"), text="a source each: the files and folders of that name, of every split"),
    ignored("data.stopping_strategy", _STOPPING, only(("first_exhausted", "all_exhausted"), _STOPPING, _STOPPING)),
    same("data.shuffle"),
    same("data.batch_size"),
    to("data.seed", "seed"),
    to("data.seq_len", "seq_len"),
    ignored("data.micro_batch_size", _PACKED),
    ignored("data.pack_function", _PACKED),
    ignored("data.num_workers", "rows are read by one process, ahead of the trainer"),
    refused(
        "data.num_examples", "there is none: write the rows into a file of their own, and name it in data.sources[].path", f"{_ONE}.path",
    ),
    to("data.loss_mask", "data.loss_roles", by=loss_roles),
    to("data.source[].dataset", "data.sources[].name", "data.sources[].path", by=place, text="a name with a path's form is path"),
    to("data.source[].name", "data.sources[].name", "data.sources[].path", by=place, text="a name with a path's form is path"),
    to("data.source[].split", "data.sources[].split", by=optional),
    to("data.source[].weight", "data.sources[].weight", by=optional),
    to("data.source[].probability", "data.sources[].weight", by=optional),
    to("data.source[].type", "data.sources", by=later("data_type"), text="fake: with --bench alone"),
    refused(
        "data.source[].subset",
        "there is none: write it as data.sources[].split, which takes the files and folders with that in their name",
        "data.sources[].split",
    ),
    to("val.interval", "data.validation.interval"),
    to("val.data.name", "data.validation.name", "data.validation.path", by=place, text="a name with a path's form is path"),
    to("val.data.splits", "data.validation.split", by=choice({}, "write one split")),
    ignored("val.data.*", "validation reads its rows in order, in micro-batches of the trainer"),
    ignored("val.eval_on_start", "the loss is always measured before the first step"),
    ignored("loss_mask", "data.loss_mask says which messages are learned", only(({},), "an empty table", "write it in [data]")),
    ignored("eval", "supervised fine-tuning has no engines; eval measures its checkpoints afterwards"),
)  # fmt: skip
