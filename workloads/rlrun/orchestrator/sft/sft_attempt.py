"""One attempt of a supervised run: data, tokenizer, trainer, then the pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.config.models.data import DataConfig
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.environments.dataset_rows import Rows
from rlrun.hub.fetch import model_source
from rlrun.hub.repository import show_source
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.aio.volume_access import in_thread
from rlrun.orchestrator.attempt import Stop, feed_trainer, open_training
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.sft.chat_samples import ChatEncoder
from rlrun.orchestrator.sft.samples import Encoder, Mixture, Reader, base_position, held_out
from rlrun.orchestrator.sft.sft_pipeline import DataPipeline, TrainingData
from rlrun.orchestrator.trainer.shared_trainer import Connection
from rlrun.orchestrator.trainer.trainer_client import TrainerClient
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.batch import Sample
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import model_folder
from rlrun.protocol.files.volume_faults import Volume
from rlrun.runtime import exit_codes


def load_chat(config: OrchestratorConfig) -> ChatEncoder:
    """Load the model's tokenizer and chat template.

    Raises:
        RoleError: the tokenizer is missing or its chat template is unusable.
    """
    made = model_folder(Path(config.output_dir), config.shared_with)
    source = model_source(config.model, made, with_weights=False, trained=True)
    return load_encoder(source, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code)


def load_encoder(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatEncoder:
    """Load tokenizer and chat template of a model folder or hub name.

    Raises:
        RoleError: the tokenizer is missing or its chat template is unusable.
    """
    try:
        return ChatEncoder.load(source, revision=revision, trust_remote_code=trust_remote_code)
    except (TemplateError, OSError, ValueError, KeyError) as error:
        reason = f"one of its files lacks the key {error}" if isinstance(error, KeyError) else str(error)
        raise RoleError(
            f"model: the tokenizer of {show_source(source)} is unusable: {reason}", exit_codes.DATA
        ) from error


def check_encoder(*, folder: str, trust_remote_code: bool) -> list[str]:
    """Load tokenizer and chat template of a model folder, for `rlrun validate`. Returns no notices.

    Raises:
        RoleError: the run would be refused at its start.
    """
    load_encoder(folder, trust_remote_code=trust_remote_code)
    return []


def open_sources(data: DataConfig) -> list[Rows]:
    """Open the rows of all sources.

    Raises:
        RoleError: a source is unusable; the error names it and the problem.
    """
    return [Rows(source, f"data.sources[{index}]") for index, source in enumerate(data.sources)]


def make_mixture(data: DataConfig, sources: list[Rows], seed: int) -> Mixture:
    """Create the order in which a run reads its sources."""
    return Mixture(
        seed,
        tuple(len(rows) for rows in sources),
        tuple(source.weight for source in data.sources),
        shuffle=data.shuffle,
        epochs=data.epochs,
        all_exhausted=data.stopping == "AllExhausted",
    )


def expected_steps(data: DataConfig, mixture: Mixture) -> int | None:
    """Return the number of steps for which the data suffices if no row is skipped, or None if it is unlimited or
    unknown before reading.
    """
    if mixture.length is None or data.batch_tokens is not None:
        return None
    return -(-mixture.length // data.batch_size)


def make_pipeline(
    config: OrchestratorConfig,
    attempt: Attempt,
    *,
    sources: list[Rows],
    validation: Rows | None,
    trainer: TrainerClient,
    signal: Signal,
    volume: Volume,
) -> DataPipeline:
    """Create an attempt's pipeline from the state on disk.

    Raises:
        RoleError: the tokenizer, the data or the base checkpoint is unusable.
    """
    data = config.data
    assert data is not None
    encoder = Encoder(data, load_chat(config), config.seq_len)
    fingerprints = tuple(rows.fingerprint for rows in sources)
    mixture = make_mixture(data, sources, config.seed)
    expected = expected_steps(data, mixture)
    if expected is not None and expected > config.max_steps:
        logger.warning(
            f"data.epochs ({data.epochs}) takes {expected} steps, but the run ends at maxSteps {config.max_steps}"
        )
    held: tuple[Sample, ...] = ()
    if validation is not None and data.validation is not None:
        held = held_out(validation, encoder, limit=data.validation.max_samples)
    position = base_position(RunPaths(Path(config.output_dir)), attempt, fingerprints)
    reader = Reader(data, sources, mixture, encoder.encode, position)
    content = TrainingData(reader, fingerprints, expected, held)
    return DataPipeline(config, attempt, content, trainer=trainer, signal=signal, volume=volume)


async def feed_attempt(config: OrchestratorConfig, *, attempt: int, api_key: str, stop: Stop | None = None) -> int:
    """Feed the trainer of one attempt until the end.

    Args:
        config: configuration of the role, with `data`.
        attempt: number of the attempt.
        api_key: the run's key for trainer and progress.
        stop: reaction of the role to signals.

    Returns:
        0 if every step is trained and saved; 143 if the run was stopped earlier.

    Raises:
        RoleError: the run cannot continue; possibly inside an exception group.
    """
    data = config.data
    assert data is not None
    connection = Connection(config, api_key, attempt=attempt)
    async with open_training(connection, config, attempt, api_key, stop) as running:
        sources = await in_thread(partial(open_sources, data))
        validation = None
        if data.validation is not None:
            validation = await in_thread(partial(Rows, data.validation, "data.validation"))
        async with connection as trainer:
            begun = await running.read_file()
            pipeline = await in_thread(
                partial(
                    make_pipeline,
                    config,
                    begun,
                    sources=sources,
                    validation=validation,
                    trainer=trainer,
                    signal=running.signal,
                    volume=running.volume,
                )
            )
            return await feed_trainer(running, pipeline, connection, trainer)
