"""Tokens of a rollout, and the explanation of its advantage, from the packed batch of its step.

The tokens have log-probs, advantages and versions; the run's tokenizer decodes them. The explanation covers advantage, versions and
tokens, with commands for further analysis.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.extras import explain_import
from rlrun.ui import rollout_answers
from rlrun.ui.run_registry import OpenRun

if TYPE_CHECKING:
    from rlrun.protocol.files.batch import Sample


_BATCH_BYTES_MAX = 2 << 30
_TOKENIZER_BYTES_MAX = 128 << 20
_TOKENS_MAX = 20_000
"""Maximum number of tokens of a sequence in a response."""
_LETTER_TOKENS = 8
"""More tokens than one character can have; text that is still incomplete after that is shown as broken."""
HIDDEN = "•"
Spans = Callable[[str], Sequence[tuple[int, int]]]
"""Function from a text to the spans of secrets in it."""
Decode = Callable[[Sequence[int]], str]


def rollout_tokens(
    run: OpenRun, step: int, attempt: int, group: int, rollout: int, secrets: Spans
) -> rollout_answers.Tokens:
    """Return the tokens of a trained rollout, if the batch of its step is still on the volume.

    Raises:
        OutsideError: a file of the batch is a link to the outside.
    """
    refused = readable_batch(run, step, attempt)
    if refused is not None:
        return _no_tokens(refused)
    try:
        from rlrun.protocol.files.batch import BatchError, read_batch
    except ImportError as error:
        return _no_tokens(explain_import(error) or str(error))
    try:
        samples = [
            one
            for one in read_batch(run.paths.batch(step, attempt)).samples
            if (one.group, one.rollout) == (group, rollout)
        ]
    except BatchError as error:
        return _no_tokens(str(error))
    decode = load_decoder(run)
    found = [_sequence_tokens(sample, decode, secrets) for sample in samples]
    return rollout_answers.Tokens(
        sequences=found, decoded=decode is not None, why=None if found else "the batch does not contain this rollout"
    )


def readable_batch(run: OpenRun, step: int, attempt: int) -> str | None:
    """Return why the batch of a step cannot be read, or None.

    Raises:
        OutsideError: a file of the batch is a link to the outside.
    """
    folder = run.paths.batch(step, attempt)
    try:
        for name in ("batch.json", "samples.safetensors"):
            with run.fence.open(folder / name) as file:
                large = file.seek(0, 2) > _BATCH_BYTES_MAX
    except FileNotFoundError:
        return (
            f"the batch of step {step} is no longer on the volume: batches are kept only until a checkpoint covers them"
        )
    return f"the batch of step {step} has more than {_BATCH_BYTES_MAX >> 30} GiB" if large else None


def _no_tokens(why: str) -> rollout_answers.Tokens:
    return rollout_answers.Tokens(sequences=[], decoded=False, why=why)


def _sequence_tokens(sample: Sample, decode: Decode | None, secrets: Spans) -> rollout_answers.TokenSequence:
    ids = sample.input_ids[:_TOKENS_MAX].tolist()
    texts = [str(one) for one in ids] if decode is None else hide_secrets(token_pieces(ids, decode), secrets)
    return rollout_answers.TokenSequence(
        texts=texts,
        sampled=sample.loss_mask[:_TOKENS_MAX].tolist(),
        logprobs=[round(value, 4) for value in sample.logprobs[:_TOKENS_MAX].tolist()],
        advantages=[round(value, 4) for value in sample.advantages[:_TOKENS_MAX].tolist()],
        versions=sample.versions[:_TOKENS_MAX].tolist(),
        cut=len(sample) - len(ids),
    )


def token_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token; joined, the texts are the decoded sequence.

    Each token is decoded after the previous ones, because spaces may depend on them. A character of several tokens belongs to the last
    of them; the texts of the others are empty.
    """
    found, before, shown = [], 0, 0  # tokens before..shown are the context that was emitted last
    for at in range(len(ids)):
        known, text = decode(ids[before:shown]), decode(ids[before : at + 1])
        if text.endswith("\ufffd") and at + 1 - shown < _LETTER_TOKENS and at + 1 < len(ids):
            found.append("")
            continue
        found.append(text[len(known) :])
        before, shown = shown, at + 1
    return found


def hide_secrets(texts: Sequence[str], secrets: Spans) -> list[str]:
    """Return the texts of tokens; a text that overlaps a secret is replaced by a dot."""
    spans = secrets("".join(texts))
    found, begin = [], 0
    for text in texts:
        end = begin + len(text)
        found.append(HIDDEN if any(start < end and begin < stop for start, stop in spans) else text)
        begin = end
    return found


def load_decoder(run: OpenRun) -> Decode | None:
    """Return the tokenizer in the run's folder, or None if there is no readable one."""
    paths = run.paths
    published = [*reversed(paths.versions_on_disk()[-2:])]
    for folder in (paths.model, *(one.path for one in published)):
        if (found := _load_tokenizer(run, folder / "tokenizer.json")) is not None:
            return found
    return None


def _load_tokenizer(run: OpenRun, path: Path) -> Decode | None:
    try:
        with run.fence.open(path) as file:
            content = file.read(_TOKENIZER_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(content.decode())
    except Exception:  # a damaged file can raise any error
        return None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


def rollout_reasons(
    run: OpenRun, fetch: tuple[str, str], step: int, place: tuple[int, int, int], clean: Callable[[str], str]
) -> rollout_answers.Reasons:
    """Explain a trained rollout, with one block of lines per sample, if the batch of its step is still on the volume.

    Args:
        run: run with the batch.
        fetch: command that copies the run's folder to this machine (empty if local), and the name of that folder.
        step: step of the batch.
        place: attempt, group and rollout.
        clean: function that removes secrets from a line.

    Raises:
        OutsideError: a file is a link to the outside.
    """
    attempt, group, rollout = place
    sample = f"{group}/{rollout}"
    refused, samples = readable_batch(run, step, attempt), list[tuple[int, list[str]]]()
    try:
        samples = [] if refused is not None else _explained_samples(run, step, attempt, group, rollout)
        refused = refused or (None if samples else "the batch does not contain this rollout")
    except ImportError as error:
        refused = explain_import(error) or str(error)
    except ValueError as error:
        refused = clean(str(error))
    if len(samples) > 1:  # GROUP/ROLLOUT is ambiguous for several samples; an index is not
        sample = str(samples[0][0])
    shown = [[clean(line) for line in lines] for _, lines in samples]
    commands = next_commands(run.paths, shlex.quote(fetch[1]), step, sample)
    return rollout_answers.Reasons(
        samples=shown, fetch=fetch[0] or None if commands else None, commands=commands, why=refused
    )


def next_commands(paths: RunPaths, folder: str, step: int, sample: str) -> list[rollout_answers.NextCommand]:
    """Return commands for a step that can succeed with the batches and checkpoints that still exist.

    Args:
        paths: paths of the run.
        folder: shell-quoted folder of the run.
        step: step of the rollout.
        sample: name of the sample on the command line.
    """
    batches = {batch.step for batch in paths.batches_on_disk()}
    saved = [checkpoint.step for checkpoint in complete_checkpoints(paths)]
    replay, found = f"rlrun replay {folder} --step {step}", list[tuple[str, str]]()
    start = max((one for one in (0, *saved) if one < step), default=None)
    if start is not None and batches.issuperset(range(start + 1, step + 1)):
        found.append(("Loss of each token", f"{replay} --sample {sample}"))
        found.append(("Repeat the whole step", replay))
    elif step in batches:
        found.append(("The same explanation in a terminal", f"{replay} --sample {sample} --no-compute"))
    if saved:
        manifest = "" if paths.manifest.is_file() else " --manifest run.yaml"
        found.append(("Start a new run from a checkpoint", f"rlrun fork {folder}{manifest}"))
    return [rollout_answers.NextCommand(about=about, command=command) for about, command in found]


def _explained_samples(run: OpenRun, step: int, attempt: int, group: int, rollout: int) -> list[tuple[int, list[str]]]:
    """Return index and explanation lines of each sample of a rollout.

    Raises:
        ImportError: a package is missing.
        ValueError: the batch or the configuration cannot be read.
    """
    from rlrun.config.algorithm.names import is_import_path
    from rlrun.config.loading.loader import load_file
    from rlrun.config.loading.problems import ConfigError
    from rlrun.config.models.roles import OrchestratorConfig
    from rlrun.protocol.files.batch import read_batch
    from rlrun.protocol.files.failures import RoleError
    from rlrun.replay.advantage_explanation import advantage_settings
    from rlrun.replay.sample_explanation import report_sample, report_text

    batch = read_batch(run.paths.batch(step, attempt))
    settings, note = {}, None
    try:
        with run.fence.open(run.paths.run_json):
            config = load_file(OrchestratorConfig, run.paths.run_json, section="orchestrator")
        settings = advantage_settings(config) if config.task == "RL" else {}
    except (OSError, ConfigError) as error:
        note = f"run.json cannot be read, so the estimator is unknown: {str(error).splitlines()[0]}"
    own = {name: one.name for name, one in settings.items() if is_import_path(one.name)}
    settings = {
        name: one for name, one in settings.items() if name not in own
    }  # the page does not execute functions of users
    found = []
    for index, sample in enumerate(batch.samples):
        if (sample.group, sample.rollout) != (group, rollout):
            continue
        try:
            lines = report_text(report_sample(batch, index, settings), None).splitlines()
        except RoleError as error:
            raise ValueError(str(error)) from None
        if (function := own.get(sample.environment)) is not None:
            lines.append(f"  {function} is the run's own estimator: only rlrun replay calls it, not this page")
        found.append((index, [*lines, *([f"  {note}"] if note else [])]))
    return found
