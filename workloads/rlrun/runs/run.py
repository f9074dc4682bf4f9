"""`Run`: one run as a Python object, with the same results and effects as the commands of the same names."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rlrun.inspect import screen
from rlrun.inspect import trace_rollouts as traces
from rlrun.inspect.run_changes import patch_of
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.source import ClusterRun, FolderRun, NotFoundError, find_run, read_run
from rlrun.inspect.why import explain_run
from rlrun.runs import run_process, run_views, volume_reader
from rlrun.runs.blocks import RunError, translate_errors
from rlrun.runs.run_process import Held, make_kubectl
from rlrun.runs.run_views import Picture, Rollouts, Words, compare_curves, draw_metric

if TYPE_CHECKING:
    import pandas

    from rlrun.runs.blocks import SpecFields

_NO_PANDAS = "run.metrics() needs pandas, which is not installed: pip install 'pandas>=2.2.2', or use run.metric_rows()"


class Run(Held):
    """A run: its manifest, and the running or finished run after it was started or opened.

    Args:
        name: RFC 1035 label of at most 40 characters.
        namespace: namespace in the cluster.
        labels: labels of the resource.
        **spec: fields of the specification by Python names; blocks are models of `rlrun.runs.blocks` or mappings.

    Raises:
        ManifestError: all problems, each with field, value and fix.
    """

    @translate_errors
    def __init__(
        self,
        name: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        **spec: Unpack[SpecFields],
    ) -> None:
        from rlrun.runs.written_manifest import build_manifest

        self._set_manifest(build_manifest(name, namespace, labels, spec))

    @classmethod
    @translate_errors
    def load(cls, source: str | Path | Mapping[str, Any], *, name: str | None = None) -> Run:
        """Load a run from a manifest: a file (YAML or JSON), or a mapping with its content.

        Args:
            source: path of the file, or the mapping.
            name: new name of the run. Default: the name in the manifest.

        Raises:
            ManifestError: all problems, with their lines.
        """
        from rlrun.runs import written_manifest

        made = cls.__new__(cls)
        found = (
            written_manifest.manifest_from_mapping(source)
            if isinstance(source, Mapping)
            else written_manifest.read_manifest(Path(source))
        )
        made._set_manifest(found if name is None else written_manifest.rename_run(found, name))
        return made

    @classmethod
    @translate_errors
    def open(
        cls,
        where: str | Path,
        *,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | Path | None = None,
    ) -> Run:
        """Open an existing run: a folder on this machine, or a name in a cluster.

        Args:
            where: folder written by `rlrun local`, or the name of an RLRun.
            namespace: namespace in the cluster. With it, `where` is always a name.
            context: context of the kubeconfig.
            kubeconfig: path of the kubeconfig.

        Raises:
            RunError: the run does not exist.
        """
        in_cluster = namespace is not None or context is not None or kubeconfig is not None
        made = cls.__new__(cls)
        made._set_manifest(None)
        made._place = find_run(str(where), cluster_only=in_cluster)
        made._api = make_kubectl(namespace, context, kubeconfig)
        if isinstance(made._place, ClusterRun):
            read_run(made._place, made._api, time.time(), events=False)
        return made

    @property
    def name(self) -> str:
        """Name of the run."""
        if self._manifest is not None:
            return self._manifest.name
        return self._place.name if isinstance(self._place, ClusterRun) else self.status().name

    @property
    def folder(self) -> Path | None:
        """Folder of a run on this machine; None if it is in a cluster or not started."""
        return self._place.root if isinstance(self._place, FolderRun) else None

    @translate_errors
    def to_yaml(self) -> str:
        """Return the manifest without defaults; for an unchanged file the text of the file.

        Raises:
            RunError: the run was opened and has no manifest here.
        """
        return self._require_manifest().to_yaml()

    @translate_errors
    def save(self, path: str | Path) -> Path:
        """Write the manifest to a file; an existing file is replaced."""
        Path(path).write_text(self._require_manifest().to_yaml())
        return Path(path)

    @translate_errors
    def set(self, *words: str, **fields: Unpack[SpecFields]) -> Run:
        """Change fields: of the manifest before the start, of the RLRun afterwards, like `rlrun set`.

        Args:
            *words: changes such as `trainer.replicas=2`; null removes a field.
            **fields: fields by Python names; a block changes only its fields, and None removes a field.

        Raises:
            ManifestError: the changed manifest is invalid; nothing is changed.
            RunError: the API server refuses the change, or the run was started on this machine.
        """
        from rlrun.runs import written_manifest

        if isinstance(self._place, FolderRun):
            raise RunError(
                f"{self._place.root} was started with its manifest; change the manifest and resume: "
                "Run.load(FILE).set(...).local(FOLDER, resume=True)"
            )
        if self._place is None:
            self._manifest = written_manifest.change_fields(self._require_manifest(), words, fields)
            return self
        for change in (patch_of(words) if words else {}, written_manifest.patch_of_fields(fields) if fields else {}):
            if change:
                run_process.patch_run(self._api, self._place.name, change)
        return self

    @translate_errors
    def local(
        self,
        folder: str | Path | None = None,
        *,
        wait: bool = False,
        resume: bool = False,
        options: Sequence[str] = (),
    ) -> Run:
        """Start all roles on this machine in the background; they outlive this process.

        Args:
            folder: folder of the run. Default: runs/NAME.
            wait: whether to return only when the run is complete.
            resume: whether to resume the run in the folder.
            options: additional options of `rlrun local`, such as `--trainer-gpu-ids 0,1`.

        Raises:
            RunError: the folder is not free.
            RunFailedError: the run failed, with `wait`.
        """
        from rlrun.runs.run_process import launch_roles

        if self._manifest is None:
            raise RunError(
                "this run was opened without a manifest; resume it with Run.load(FILE).local(FOLDER, resume=True)"
            )
        root = Path(folder if folder is not None else Path("runs") / self._manifest.name).absolute()
        self._launched = launch_roles(self._manifest, root, resume=resume, options=options)
        self._place = FolderRun(root)
        return self.wait() if wait else self

    @translate_errors
    def apply(
        self, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | Path | None = None
    ) -> Run:
        """Apply the manifest to a cluster with `kubectl`; returns at once.

        Raises:
            RunError: the API server refuses the manifest or is unreachable.
        """
        manifest = self._require_manifest()
        document = dict(manifest.document)
        if namespace is not None:
            document["metadata"] = document["metadata"] | {"namespace": namespace}
        api = make_kubectl(namespace or manifest.namespace, context, kubeconfig)
        run_process.apply_manifest(api, document)
        self._api, self._place = api, ClusterRun(manifest.name)
        return self

    @translate_errors
    def status(self) -> Snapshot:
        """Return the current state of the run: phase, progress, conditions, failures."""
        return self._read_snapshot(time.time())

    @translate_errors
    def why(self) -> Words:
        """Explain why the run waits, restarted or failed, and how to fix it, like `rlrun why`."""
        now = time.time()
        return Words(screen.explanation_text(explain_run(self._read_snapshot(now), now), now))

    @translate_errors
    def wait(
        self, phase: str = "Complete", *, step: int | None = None, timeout: float | None = None, every: float = 1.0
    ) -> Run:
        """Wait for a phase or for a trained step. Ctrl-C ends only the wait; the run continues.

        Args:
            phase: one of the nine phases; ignored with `step`.
            step: number of trained steps to wait for.
            timeout: timeout in seconds. Default: no timeout.
            every: seconds between two checks.

        Raises:
            RunFailedError: the run failed or stopped earlier; the message is the text of `why`.
            WaitTimeoutError: the timeout has passed.
        """
        from rlrun.runs.run_process import wait_for

        wait_for(self._require_place(), self._api, self._launched, phase=phase, step=step, timeout=timeout, every=every)
        return self

    @translate_errors
    def metric_rows(self) -> list[dict[str, object]]:
        """Return the metrics, one mapping per step, as in metrics.jsonl."""
        return list(volume_reader.metric_lines(self._require_place(), self._api))

    def metrics(self) -> pandas.DataFrame:
        """Return the metrics as a table with one row per step and the step as index.

        Raises:
            RunError: pandas is not installed, or is incompatible with the installed numpy.
        """
        try:
            import pandas
        except ImportError:
            raise RunError(_NO_PANDAS) from None
        except ValueError as error:  # pandas was built for another version of numpy
            raise RunError(f"pandas cannot be imported: {error}; pip install -U 'pandas>=2.2.2'") from None
        rows = self.metric_rows()
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()

    @translate_errors
    def rollouts(
        self,
        step: int | None = None,
        *,
        evaluation: int | None = None,
        worst: int | None = None,
        best: int | None = None,
        environment: str | None = None,
    ) -> Rollouts:
        """Return the rollouts of a step: messages, rewards, advantages, policy versions.

        Args:
            step: trained step. Default: the newest step with a trace.
            evaluation: policy version whose evaluation answers to return instead.
            worst: number of rollouts with the lowest rewards.
            best: number of rollouts with the highest rewards.
            environment: name of the environment. Default: all.

        Raises:
            RunError: the rollouts do not exist; the message lists the existing ones.
        """
        label, rows = volume_reader.read_trace(self._require_place(), self._api, step, evaluation)
        volume_reader.check_environment(rows, environment, "environment")
        found = traces.choose_rollouts(rows, worst=worst, best=best, environment=environment)
        return Rollouts(found, traces.summarize_step(label, rows, len(found)))

    @translate_errors
    def checkpoints(self) -> list[volume_reader.Checkpoint]:
        """Return the complete checkpoints, oldest first: step, attempt, path, size in bytes."""
        return volume_reader.read_checkpoints(self._require_place(), self._api)

    @translate_errors
    def plot(self, *others: Run, metric: str | None = None, smooth: int = 1) -> Picture:
        """Draw a metric of this run and others.

        Args:
            *others: other runs in the same plot.
            metric: name of the metric. Default: reward/mean, or loss if it is missing.
            smooth: number of steps of the moving mean.

        Raises:
            RunError: a run lacks the metric; the message lists the existing ones.
        """
        return draw_metric([one._read_curve() for one in (self, *others)], metric, smooth)

    @translate_errors
    def compare(self, *others: Run) -> Words:
        """Compare the curves of runs at their common steps, and list the differences of their configurations."""
        if not others:
            raise RunError("compare needs at least one other run, such as a.compare(b)")
        return compare_curves([one._read_curve() for one in (self, *others)])

    @translate_errors
    def suspend(self) -> Run:
        """Save the last trained step and free all GPUs; returns at once. `resume` continues the run."""
        place = self._require_place()
        if isinstance(place, FolderRun):
            run_process.request_stop(place)
        else:
            run_process.patch_run(self._api, place.name, {"spec": {"suspend": True}})
        return self

    @translate_errors
    def resume(self) -> Run:
        """Resume a suspended run. On this machine this needs the manifest.

        Raises:
            RunError: the run was opened from a folder; the message contains the command that resumes it.
        """
        place = self._require_place()
        if isinstance(place, ClusterRun):
            run_process.patch_run(self._api, place.name, {"spec": {"suspend": False}})
            return self
        if self._manifest is None:
            raise NotFoundError(
                f"a run opened from a folder is not resumed from Python; resume it in a terminal with: {run_process.resume_command(place)}"
            )
        return self.local(place.root, resume=True)

    @translate_errors
    def stop(self, *, timeout: float | None = None) -> Run:
        """Save the last trained step and wait until all roles of the run have stopped.

        Raises:
            WaitTimeoutError: it took longer than `timeout` seconds.
        """
        from rlrun.runs.run_process import wait_until_stopped

        place = self._require_place()
        if isinstance(place, ClusterRun) or run_process.is_running(place):
            self.suspend()
        elif self._launched is not None:
            self._launched.interrupt()
        wait_until_stopped(place, self._api, self._launched, timeout=timeout)
        return self

    def __repr__(self) -> str:
        if self._place is None:
            return f"<Run {self._require_manifest().name}: not started>"
        try:
            return run_views.status_line(self.status())
        except RunError as error:
            return f"<Run {self._place}: {error}>"

    def _repr_html_(self) -> str:
        try:
            if self._place is None:
                return run_views.render_text(self._require_manifest().to_yaml())
            now = time.time()
            seen = self._read_snapshot(now)
            return run_views.render_html(seen, explain_run(seen, now), self._rows_or_empty())
        except Exception as error:  # an error of the display must not break the cell
            return run_views.render_text(str(error))

    def _rows_or_empty(self) -> list[dict[str, object]]:
        try:
            return self.metric_rows()
        except RunError:
            return []
