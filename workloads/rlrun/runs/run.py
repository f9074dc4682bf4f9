"""`Run`: one run as a Python object. What it shows and does is what the commands of the same names show and do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rlrun.inspect import rollouts as traces
from rlrun.inspect import screen
from rlrun.inspect.change import patch_of
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.source import ClusterRun, FolderRun, NotFoundError, find_run, read_run
from rlrun.inspect.why import explain_run
from rlrun.runs import acts, page, reading
from rlrun.runs.errors import RunError, translated
from rlrun.runs.held import Held, access
from rlrun.runs.pictures import compared, drawn
from rlrun.runs.results import Picture, Rollouts, Words

if TYPE_CHECKING:
    import pandas

    from rlrun.runs.fields import SpecFields

_NO_PANDAS = "run.metrics() needs pandas, which is not installed: pip install 'pandas>=2.2.2', or use run.metric_rows()"


class Run(Held):
    """A run: its manifest, and, once it was started or opened, the run itself.

    Args:
        name: RFC 1035, at most 40 characters.
        namespace: in the cluster.
        labels: of the resource.
        **spec: fields of the specification by Python names; blocks are models of `rlrun.runs.blocks` or mappings.

    Raises:
        ManifestError: every problem, each by field, value and fix.
    """

    @translated
    def __init__(
        self,
        name: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        **spec: Unpack[SpecFields],
    ) -> None:
        from rlrun.runs.manifest import built

        self._begin(built(name, namespace, labels, spec))

    @classmethod
    @translated
    def load(cls, source: str | Path | Mapping[str, Any], *, name: str | None = None) -> Run:
        """Run of a manifest: a file (YAML or JSON), or a mapping that one was read into.

        Args:
            source: the file or the mapping.
            name: another name than it has.

        Raises:
            ManifestError: every problem, with its line.
        """
        from rlrun.runs import manifest

        made = cls.__new__(cls)
        found = manifest.of_document(source) if isinstance(source, Mapping) else manifest.read(Path(source))
        made._begin(found if name is None else manifest.renamed(found, name))
        return made

    @classmethod
    @translated
    def open(
        cls,
        where: str | Path,
        *,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | Path | None = None,
    ) -> Run:
        """Run that exists: a folder of this machine, or a name in a cluster.

        Args:
            where: the folder that `rlrun local` has written, or the name.
            namespace: in the cluster; with it, `where` is never a folder.
            context: of the kubeconfig.
            kubeconfig: file.

        Raises:
            RunError: there is no such run.
        """
        in_cluster = namespace is not None or context is not None or kubeconfig is not None
        made = cls.__new__(cls)
        made._begin(None)
        made._place = find_run(str(where), cluster_only=in_cluster)
        made._api = access(namespace, context, kubeconfig)
        if isinstance(made._place, ClusterRun):
            read_run(made._place, made._api, time.time(), events=False)
        return made

    @property
    def name(self) -> str:
        """The run's name."""
        if self._manifest is not None:
            return self._manifest.name
        return self._place.name if isinstance(self._place, ClusterRun) else self.status().name

    @property
    def folder(self) -> Path | None:
        """Folder of a run on this machine; None: it is in a cluster, or not started."""
        return self._place.root if isinstance(self._place, FolderRun) else None

    @translated
    def to_yaml(self) -> str:
        """Manifest as it was written, without defaults; of a file that was not changed, the file's text.

        Raises:
            RunError: the run was opened and has no manifest here.
        """
        return self._written().to_yaml()

    @translated
    def save(self, path: str | Path) -> Path:
        """Write the manifest to a file; a file that is there is replaced."""
        Path(path).write_text(self._written().to_yaml())
        return Path(path)

    @translated
    def set(self, *words: str, **fields: Unpack[SpecFields]) -> Run:
        """Change fields: of the manifest before the run is started, of the RLRun afterwards, as `rlrun set` does.

        Args:
            *words: `trainer.replicas=2`; null takes a field out.
            **fields: by Python names; a block changes the fields that it names, None takes a field out.

        Raises:
            ManifestError: the manifest would not be valid; nothing is changed then.
            RunError: the API server refuses the change, or the run is one of this machine and was started.
        """
        from rlrun.runs import manifest

        if isinstance(self._place, FolderRun):
            raise RunError(
                f"{self._place.root} has begun with its manifest; change the manifest and go on: "
                "Run.load(FILE).set(...).local(FOLDER, resume=True)"
            )
        if self._place is None:
            self._manifest = manifest.changed(self._written(), words, fields)
            return self
        for change in (patch_of(words) if words else {}, manifest.patch_of_fields(fields) if fields else {}):
            if change:
                acts.patch(self._api, self._place.name, change)
        return self

    @translated
    def local(
        self,
        folder: str | Path | None = None,
        *,
        wait: bool = False,
        resume: bool = False,
        options: Sequence[str] = (),
    ) -> Run:
        """Start all roles on this machine, in the background; they outlive this process.

        Args:
            folder: the run's folder; default: runs/NAME.
            wait: return when the run is complete.
            resume: go on with the run in the folder.
            options: further options of `rlrun local`, such as `--trainer-gpu-ids 0,1`.

        Raises:
            RunError: the folder is not free.
            RunFailedError: with `wait`, the run has failed.
        """
        from rlrun.runs.launch import launch

        if self._manifest is None:
            raise RunError(
                "this run was opened without a manifest: Run.load(FILE).local(FOLDER, resume=True) goes on with it"
            )
        root = Path(folder if folder is not None else Path("runs") / self._manifest.name).absolute()
        self._launched = launch(self._manifest, root, resume=resume, options=options)
        self._place = FolderRun(root)
        return self.wait() if wait else self

    @translated
    def apply(
        self, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | Path | None = None
    ) -> Run:
        """Apply the manifest to a cluster, through `kubectl`; returns at once.

        Raises:
            RunError: the API server refuses the manifest, or cannot be reached.
        """
        manifest = self._written()
        document = dict(manifest.document)
        if namespace is not None:
            document["metadata"] = document["metadata"] | {"namespace": namespace}
        api = access(namespace or manifest.namespace, context, kubeconfig)
        acts.apply(api, document)
        self._api, self._place = api, ClusterRun(manifest.name)
        return self

    @translated
    def status(self) -> Snapshot:
        """One look at the run: phase, progress, conditions, failures."""
        return self._seen(time.time())

    @translated
    def why(self) -> Words:
        """Why the run waits, restarted or failed, and what to do; as `rlrun why` says it."""
        now = time.time()
        return Words(screen.explanation_text(explain_run(self._seen(now), now), now))

    @translated
    def wait(
        self, phase: str = "Complete", *, step: int | None = None, timeout: float | None = None, every: float = 1.0
    ) -> Run:
        """Wait for a phase, or for a trained step. Ctrl-C ends the wait alone; the run goes on.

        Args:
            phase: one of the nine phases; not looked at where `step` is given.
            step: return when that many steps are trained.
            timeout: in seconds; default: none.
            every: seconds between two looks.

        Raises:
            RunFailedError: the run has failed, or stopped, before; with the words of `why`.
            WaitTimeoutError: it took longer.
        """
        from rlrun.runs.waiting import wait_for

        wait_for(self._there(), self._api, self._launched, phase=phase, step=step, timeout=timeout, every=every)
        return self

    @translated
    def metric_rows(self) -> list[dict[str, object]]:
        """Metrics, one mapping per step, as metrics.jsonl has them."""
        return list(reading.metric_lines(self._there(), self._api))

    def metrics(self) -> pandas.DataFrame:
        """Metrics as a table, one row per step; the index is the step.

        Raises:
            RunError: pandas is not installed, or is of no use with the numpy that is.
        """
        try:
            import pandas
        except ImportError:
            raise RunError(_NO_PANDAS) from None
        except ValueError as error:  # one that was built for another numpy
            raise RunError(f"pandas cannot be imported: {error}; pip install -U 'pandas>=2.2.2'") from None
        rows = self.metric_rows()
        return pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()

    @translated
    def rollouts(
        self,
        step: int | None = None,
        *,
        evaluation: int | None = None,
        worst: int | None = None,
        best: int | None = None,
        environment: str | None = None,
    ) -> Rollouts:
        """Rollouts of a step: messages, rewards, advantages, policy versions.

        Args:
            step: a trained step; default: the newest one that has a trace.
            evaluation: held-out answers of this policy version instead.
            worst: so many with the lowest rewards.
            best: so many with the highest rewards.
            environment: those of one environment.

        Raises:
            RunError: there are none; says which there are.
        """
        label, rows = reading.trace(self._there(), self._api, step, evaluation)
        reading.of_environment(rows, environment, "environment")
        found = traces.choose_rollouts(rows, worst=worst, best=best, environment=environment)
        return Rollouts(found, traces.summarize_step(label, rows, len(found)))

    @translated
    def checkpoints(self) -> list[reading.Checkpoint]:
        """Complete checkpoints, oldest first: step, attempt, path, size in bytes."""
        return reading.checkpoints(self._there(), self._api)

    @translated
    def plot(self, *others: Run, metric: str | None = None, smooth: int = 1) -> Picture:
        """Curve of a metric, of this run and others.

        Args:
            *others: drawn beside it.
            metric: default: reward/mean, or loss where there is none.
            smooth: mean of the last so many steps.

        Raises:
            RunError: a run has no such metric; says which there are.
        """
        return drawn([one._curve() for one in (self, *others)], metric, smooth)

    @translated
    def compare(self, *others: Run) -> Words:
        """Curves beside each other at the steps that all have, and what differs in the configurations."""
        if not others:
            raise RunError("compare needs another run: a.compare(b)")
        return compared([one._curve() for one in (self, *others)])

    @translated
    def suspend(self) -> Run:
        """Save the last trained step and free all GPUs; returns at once. `resume` goes on."""
        place = self._there()
        if isinstance(place, FolderRun):
            acts.ask_to_stop(place)
        else:
            acts.patch(self._api, place.name, {"spec": {"suspend": True}})
        return self

    @translated
    def resume(self) -> Run:
        """Go on with a suspended run; on this machine, with one whose manifest is here.

        Raises:
            RunError: the run was opened from a folder; says the command that goes on with it.
        """
        place = self._there()
        if isinstance(place, ClusterRun):
            acts.patch(self._api, place.name, {"spec": {"suspend": False}})
            return self
        if self._manifest is None:
            raise NotFoundError(
                f"what a folder says is not executed; go on with it in a terminal: {acts.go_on_command(place)}"
            )
        return self.local(place.root, resume=True)

    @translated
    def stop(self, *, timeout: float | None = None) -> Run:
        """Save the last trained step and wait until everything of the run is stopped.

        Raises:
            WaitTimeoutError: it took longer than `timeout` seconds.
        """
        from rlrun.runs.waiting import wait_until_stopped

        place = self._there()
        if isinstance(place, ClusterRun) or acts.is_running(place):
            self.suspend()
        elif self._launched is not None:
            self._launched.interrupt()
        wait_until_stopped(place, self._api, self._launched, timeout=timeout)
        return self

    def __repr__(self) -> str:
        if self._place is None:
            return f"<Run {self._written().name}: not started>"
        try:
            return page.line(self.status())
        except RunError as error:
            return f"<Run {self._place}: {error}>"

    def _repr_html_(self) -> str:
        try:
            if self._place is None:
                return page.manifest(self._written().to_yaml())
            now = time.time()
            seen = self._seen(now)
            return page.html(seen, explain_run(seen, now), self._rows())
        except Exception as error:  # a picture never breaks the cell that shows it
            return page.manifest(str(error))

    def _rows(self) -> list[dict[str, object]]:
        try:
            return self.metric_rows()
        except RunError:
            return []
