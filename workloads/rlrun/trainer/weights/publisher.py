"""Publication of versions of a run's weights: when, to which receivers, and until the volume takes them. The same on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from rlrun.config.models.roles import TrainerConfig
from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import RefusedError, Volume, pauses
from rlrun.protocol.messages.buckets import BUCKET_BYTES, plan_buckets, root_ranks
from rlrun.trainer.channel.batch_feed import TICK_SECONDS
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.checkpoints.collective_write import Together
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.shared_model import Policy
from rlrun.trainer.weights import export, hf_writer, retention
from rlrun.trainer.weights.bucketing import gather_buckets, layout
from rlrun.trainer.weights.transfer import Follower, Outbox


class Publisher:
    """Publisher of one run's versions.

    Args:
        config: the run's.
        attempt: which has begun.
        policy: whose parameters are published as they are at the time.
        paths: of the run.
        channel: to its orchestrator, on rank 0.
        volume: reports what it refuses.
        agree: called by all ranks together while they wait for the volume; raises on all of them when they are to stop.
        replay: true if there is no orchestrator.
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
        agree: Callable[[], None],
        replay: bool,
    ) -> None:
        self._config, self._attempt, self._policy, self._group = config, attempt, policy, policy.group
        self._paths, self._channel, self._volume, self._agree = paths, channel, volume, agree
        self._sends = config.task == "RL" and config.weight_sync.transport == "NCCL" and not replay
        """True if engines receive versions from this process."""
        self._outbox: Outbox | None = None
        self._follower: Follower | None = None
        self._root: int | None = None
        """Number of the root that this rank is; None: it is none."""
        if self._sends:
            self._open_outbox()
        if channel is not None and self._outbox is not None:
            channel.offer = self._outbox.offer

    def due(self, step: int, *, last: bool, saved: bool) -> bool:
        """True if a step's version is published: engines need every one; without engines those of checkpoints, and the last, are for
        people.

        Args:
            step: that was trained.
            last: whether no other follows.
            saved: whether it gets a checkpoint.
        """
        return self._config.task == "RL" or saved or last or self._export_due(step, last=last)

    def publish(self, step: int, *, last: bool, saved: bool) -> None:
        """Publish the parameters as the version of `step`; arguments as `due`.

        Raises:
            StopAgreed: all ranks are to stop.
        """
        module, group = self._policy.module, self._group
        path = self._paths.version(step, self._attempt.attempt)
        dtype, adapters, files = self._config.model.dtype, self._config.lora, self._policy.files
        exports = step > self._attempt.base_step and self._export_due(step, last=last)
        written = not self._sends or exports or last or saved
        output, doing = self._paths.export(step, self._attempt.attempt), f"publish the weights of step {step}"
        if adapters is not None and adapters.served_as_adapter:
            about = lora.adapter_config(module, adapters, self._config.model.name or self._policy.source)
            self._insist(doing, lambda: hf_writer.publish_adapter(module, path, config=about, dtype=dtype, group=group))
            if exports:  # an export is a whole model
                self._insist(
                    f"export step {step}",
                    lambda: hf_writer.publish(module, output, files=files, dtype=dtype, group=group),
                )
        else:
            if self._sends:
                self._hold(step)
            if written:
                self._insist(doing, lambda: hf_writer.publish(module, path, files=files, dtype=dtype, group=group))
            if exports:
                self._insist(f"export step {step}", lambda: self._export(path, output))
        if group.leads:
            if self._channel is not None:
                self._channel.emit("published", step, path=path if written else None)
                reach("weights.told")
            retention.delete_superfluous(
                self._paths, attempt=self._attempt, max_async_level=self._config.algorithm.max_async_level
            )

    def close(self) -> None:
        """Send nothing any more."""
        if self._outbox is not None:
            self._outbox.close()
        if self._follower is not None:
            self._follower.close()

    def _open_outbox(self) -> None:
        """Become a root, where this rank is to be one."""
        group, roots = self._group, root_ranks(self._group.world_size)
        differs = self._config.weight_sync.deltas == "Auto"
        self._root = roots.index(group.rank) if group.rank in roots else None
        self._layout = layout(self._policy.module, self._config.model.dtype)
        self._buckets = plan_buckets(self._layout, bucket_bytes=BUCKET_BYTES, roots=len(roots))
        if group.leads:
            self._outbox = Outbox(
                group.device, self._config.host, roots=len(roots), bucket_bytes=BUCKET_BYTES, differs=differs
            )
        port = group.broadcast(None if self._outbox is None else self._outbox.port)
        if self._root is not None and not group.leads:
            self._follower = Follower(self._root, group.device, port, differs=differs)

    def _hold(self, step: int) -> None:
        """Take the parameters as they are into the memory of the roots."""
        kept = gather_buckets(
            self._policy.module,
            self._buckets,
            dtype=self._config.model.dtype,
            root=self._root,
            pinned=self._group.device.type == "cuda",
            roots=root_ranks(self._group.world_size),
        )
        if self._outbox is not None:
            self._outbox.hold(step, self._layout, kept)
        if self._follower is not None:
            self._follower.hold(step, kept)

    def _export_due(self, step: int, *, last: bool) -> bool:
        return export.due(self._config.checkpoint.export, step, last=last)

    def _export(self, version: Path, output: Path) -> None:
        together = Together(self._group, output.parent, "export the model")
        with together.part():
            if self._group.leads:
                export.export_version(version, output)
        together.agree()

    def _insist(self, doing: str, act: Callable[[], None]) -> None:
        """Do what the run cannot go on without, again until the volume takes it.

        Args:
            doing: as the end of `cannot ...`.
            act: what all ranks do together; refused on all of them or on none.

        Raises:
            StopAgreed: all ranks are to stop.
        """
        for pause in pauses():
            try:
                act()
            except RefusedError as error:
                self._volume.refuse(doing, error.trouble)
            else:
                self._volume.accept(doing)
                return
            for _ in range(math.ceil(pause / TICK_SECONDS)):  # the same on all ranks, unlike their clocks
                self._agree()
                time.sleep(TICK_SECONDS)
