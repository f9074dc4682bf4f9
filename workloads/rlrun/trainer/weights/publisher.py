"""Publication of a run's versions: schedule, receivers, and retries until the volume accepts them. Every rank runs the same code."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import TrainerConfig
from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import FAILING_SECONDS, RefusedError, Volume, retry_pauses
from rlrun.protocol.messages.buckets import BUCKET_BYTES, plan_buckets, root_ranks
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.batch_feed import TICK_SECONDS
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.checkpoints.dcp import Together
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.shared_model import Policy
from rlrun.trainer.weights import export, hf_writer, version_retention
from rlrun.trainer.weights.bucketing import bucket_layout, gather_buckets
from rlrun.trainer.weights.delta_writer import Compared, DeltaWriter
from rlrun.trainer.weights.weight_transfer import Follower, Outbox


class Publisher:
    """Publisher of one run's versions.

    Args:
        config: configuration of the run.
        attempt: attempt that has started.
        policy: policy whose current parameters are published.
        paths: paths of the run.
        channel: channel to the orchestrator, on rank 0.
        volume: receiver of the volume's refusals.
        check_stop: stop point that all ranks call together while they wait for the volume; raises on all of them after a request to stop.
        replay: true if the run has no orchestrator.
    """

    def __init__(
        self,
        config: TrainerConfig,
        attempt: Attempt,
        policy: Policy,
        *,
        paths: RunPaths,
        channel: Channel | None,
        volume: Volume,
        check_stop: Callable[[], None],
        replay: bool,
    ) -> None:
        self._config, self._attempt, self._policy, self._group = config, attempt, policy, policy.group
        self._paths, self._channel, self._volume, self._check_stop = paths, channel, volume, check_stop
        self._sends = config.task == "RL" and config.weight_sync.transport == "NCCL" and not replay
        """Whether engines receive versions from this process."""
        self._outbox: Outbox | None = None
        self._follower: Follower | None = None
        self._deltas: DeltaWriter | None = None
        """Writer of differences, or None if all versions are complete."""
        self.handed: tuple[int, int] | None = None
        """Bytes of the newest reported version that an engine receives, and bytes of the complete version; None if all versions are
        complete.
        """
        self._root: int | None = None
        """Number of this rank's root, or None if it is not a root."""
        whole = config.lora is None or not config.lora.served_as_adapter
        if self._sends:
            self._open_outbox()
        elif config.task == "RL" and config.weight_sync.deltas == "Auto" and whole and not replay:
            self._deltas = DeltaWriter(
                policy.module,
                config.model.dtype,
                paths=paths,
                attempt=attempt.attempt,
                group=policy.group,
                bucket_bytes=BUCKET_BYTES,
            )
        # Last: from here on engines can send requests, which need all objects above.
        if channel is not None and self._outbox is not None:
            channel.offer = self._outbox.offer

    def is_due(self, step: int, *, last: bool, saved: bool) -> bool:
        """Return whether the version of a step is published.

        Engines need every version; without engines only the last version and those with a checkpoint are published, for users.

        Args:
            step: trained step.
            last: true for the last step.
            saved: true if the step gets a checkpoint.
        """
        return self._config.task == "RL" or saved or last or self._export_due(step, last=last)

    def publish(self, step: int, *, last: bool, saved: bool) -> None:
        """Publish the parameters as the version of `step`; for the arguments see `is_due`.

        Raises:
            StopAgreed: all ranks stop.
        """
        module, group = self._policy.module, self._group
        delta: Path | None = None
        path = self._paths.version(step, self._attempt.attempt)
        dtype, adapters, files = self._config.model.dtype, self._config.lora, self._policy.files
        # The whole version goes to the volume if users or checkpoints need it, or if engines have no other way to get it.
        exports = step > self._attempt.base_step and self._export_due(step, last=last)
        written = exports or last or saved or not (self._sends or self._deltas)
        output, doing = self._paths.export(step, self._attempt.attempt), f"publish the weights of step {step}"
        if adapters is not None and adapters.served_as_adapter:
            about = lora.adapter_config(module, adapters, self._config.model.name or self._policy.source)
            self._write_until_accepted(
                doing, lambda: hf_writer.publish_adapter(module, path, config=about, dtype=dtype, group=group)
            )
            if exports:  # an export contains the whole model
                self._write_until_accepted(
                    f"export step {step}",
                    lambda: hf_writer.publish_version(module, output, files=files, dtype=dtype, group=group),
                )
        else:
            # Copy into the roots' memory before slow writes, so that engines can request the version as early as possible.
            if self._sends:
                self._copy_to_roots(step)
            version = None if self._deltas is None else self._deltas.compare(step)
            if self._deltas is not None and version is not None:
                written = written or self._deltas.whole_due(version)
            if written:
                self._write_until_accepted(
                    doing, lambda: hf_writer.publish_version(module, path, files=files, dtype=dtype, group=group)
                )
            if version is not None:
                delta = self._write_difference(version, doing, whole=written)
            if exports:
                self._write_until_accepted(f"export step {step}", lambda: self._export_version(path, output))
        # Announce the version after it is available, then delete versions that no engine needs any more.
        if group.leads:
            if self._channel is not None:
                self._channel.append_event("published", step, path=delta or (path if written else None))
                reach("weights.told")
            version_retention.delete_superfluous(
                self._paths, attempt=self._attempt, max_async_level=self._config.algorithm.max_async_level
            )

    def metrics(self) -> dict[str, float]:
        """Return the bytes of the newest reported version that an engine receives, and of the complete version; empty if all are
        complete.
        """
        if self.handed is None:
            return {}
        sent, whole = self.handed
        return {"weights/sent_bytes": float(sent), "weights/bytes": float(whole)}

    def _write_difference(self, version: Compared, doing: str, *, whole: bool) -> Path | None:
        """Write the difference if there is one, and return its folder. `whole` is true if the complete version is on the volume too."""
        writer, folder = self._deltas, None
        assert writer is not None
        if version.about is not None:
            self._write_until_accepted(doing, lambda: writer.write(version, whole=whole))
            folder = self._paths.delta(version.step, self._attempt.attempt)
        writer.set_base(version, whole=whole)
        self.handed = version.sent, version.size
        if self._group.leads:
            logger.info(
                f"version {version.step}: {version.sent} of {version.size} bytes for engines with the previous version"
            )
        return folder

    def close(self) -> None:
        """Stop all transfers."""
        if self._outbox is not None:
            self._outbox.close()
        if self._follower is not None:
            self._follower.close()

    def _open_outbox(self) -> None:
        """Create the outbox or follower if this rank is a root."""
        group, roots = self._group, root_ranks(self._group.world_size)
        differs = self._config.weight_sync.deltas == "Auto"
        self._root = roots.index(group.rank) if group.rank in roots else None
        self._layout = bucket_layout(self._policy.module, self._config.model.dtype)
        self._buckets = plan_buckets(self._layout, bucket_bytes=BUCKET_BYTES, roots=len(roots))
        if group.leads:
            self._outbox = Outbox(
                group.device, self._config.host, roots=len(roots), bucket_bytes=BUCKET_BYTES, differs=differs
            )
        # The followers can connect only after rank 0's store listens.
        port = group.broadcast(None if self._outbox is None else self._outbox.port)
        if self._root is not None and not group.leads:
            self._follower = Follower(self._root, group.device, port, differs=differs)

    def _copy_to_roots(self, step: int) -> None:
        """Copy the current parameters into the host memory of the roots."""
        kept = gather_buckets(
            self._policy.module,
            self._buckets,
            dtype=self._config.model.dtype,
            root=self._root,
            pinned=self._group.device.type == "cuda",
            roots=root_ranks(self._group.world_size),
        )
        if self._outbox is not None:
            self.handed = self._outbox.handed if self._config.weight_sync.deltas == "Auto" else None
            self._outbox.hold(step, self._layout, kept)
        if self._follower is not None:
            self._follower.hold(step, kept)

    def _export_due(self, step: int, *, last: bool) -> bool:
        return export.is_due(self._config.checkpoint.export, step, last=last)

    def _export_version(self, version: Path, output: Path) -> None:
        together = Together(self._group, output.parent, "export the model")
        with together.catch_refusal():
            if self._group.leads:
                export.export_version(version, output)
        together.compare_results()

    def _write_until_accepted(self, doing: str, act: Callable[[], object]) -> None:
        """Repeat a required write until the volume accepts it.

        Args:
            doing: action in the message `cannot ...`.
            act: collective write, which the volume refuses on all ranks or on none.

        Raises:
            StopAgreed: all ranks stop.
            RoleError: the volume has failed for `FAILING_SECONDS`.
        """
        failed = 0.0
        for pause in retry_pauses():
            try:
                act()
            except RefusedError as error:
                self._volume.refuse(doing, error.trouble)
                failed = failed + pause if error.trouble.reason == "StorageFailing" else 0.0
                if failed > FAILING_SECONDS:  # sum of pauses, which are the same on all ranks
                    raise RoleError(f"{error} (after {FAILING_SECONDS:.0f} s)", exit_codes.STORAGE) from error
            else:
                self._volume.accept(doing)
                return
            # A number of ticks is the same on all ranks, unlike their clocks.
            for _ in range(math.ceil(pause / TICK_SECONDS)):
                self._check_stop()
                time.sleep(TICK_SECONDS)
