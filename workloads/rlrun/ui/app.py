"""Routes of the page: typed, read-only responses about the runs that the caller may see, and the static files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import yaml
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse

from rlrun.inspect.comparison import RunFields, fields_of_folder, fields_of_spec
from rlrun.ui import overview, rollout_answers, rollout_views, run_answers
from rlrun.ui import page_curves as drawn
from rlrun.ui.confine import OutsideError
from rlrun.ui.guard import PlainJSONResponse, Redactor
from rlrun.ui.live import Feed
from rlrun.ui.rollout_tokens import rollout_reasons, rollout_tokens
from rlrun.ui.rollout_views import Source
from rlrun.ui.run_registry import OpenRun, UnknownRunError
from rlrun.ui.shown import ForbiddenError, Run, Runs
from rlrun.ui.static_files import StaticFiles
from rlrun.ui.traces import Filter, Order

_STEP = 99_999_999
Step = Annotated[int | None, Query(ge=0, le=_STEP)]


def _visible_runs(request: Request) -> Runs:
    found: Runs = request.app.state.runs_of(request)
    return found


def _visible_run(run: str, request: Request) -> Run:
    return _visible_runs(request).get(run)


VisibleRuns = Annotated[Runs, Depends(_visible_runs)]
"""Runs that the caller may see. Routes reach runs only through this dependency and `One`."""
VisibleRun = Annotated[Run, Depends(_visible_run)]
"""Run in the URL, if the caller may see it."""


def _source(step: Step = None, evaluation: Step = None) -> Source:
    return Source(step, evaluation)


def _filter(
    environment: str | None = None,
    reward_min: Annotated[float | None, Query(alias="rewardMin", allow_inf_nan=False)] = None,
    reward_max: Annotated[float | None, Query(alias="rewardMax", allow_inf_nan=False)] = None,
    tokens_min: Annotated[int | None, Query(alias="tokensMin", ge=0)] = None,
    tokens_max: Annotated[int | None, Query(alias="tokensMax", ge=0)] = None,
    group: Annotated[int | None, Query(ge=0)] = None,
) -> Filter:
    return Filter(environment, reward_min, reward_max, tokens_min, tokens_max, group)


FromTrace = Annotated[Source, Depends(_source)]
"""Trace in the query: of a step, or of an evaluation."""
Wanted = Annotated[Filter, Depends(_filter)]
"""Filter of rollouts in the query."""


def make_app(runs_of: Callable[[Request], Runs], redactor: Redactor, static: StaticFiles, feed: Feed) -> FastAPI:
    """Return the application without its guard.

    Args:
        runs_of: function that returns the runs that the sender of a request may see.
        redactor: remover of secrets in every response.
        static: files of the page.
        feed: change events of all runs.
    """
    # FastAPI's documentation pages load scripts from other hosts, so they are disabled.
    app = FastAPI(
        title="rlrun ui", docs_url=None, redoc_url=None, openapi_url=None, default_response_class=PlainJSONResponse
    )
    app.state.runs_of = runs_of
    _add_problems(app)
    _add_runs(app, redactor)
    _add_curves(app)
    _add_rollouts(app, redactor)

    @app.get("/api/me")
    def me(request: Request, runs: VisibleRuns) -> run_answers.Me:
        return run_answers.Me(user=runs.user, session=request.scope.get("state", {}).get("session") is not None)

    @app.get("/api/events")
    async def events(runs: VisibleRuns) -> Response:
        if (why := feed.explain_refusal(runs.user)) is not None:
            return _problem_response(429, why)
        view = None if runs.user is None else runs.visible_fingerprints
        # A buffering proxy would delay the events; nginx buffers unless this header disables it.
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(feed.stream_events(view, runs.user), media_type="text/event-stream", headers=headers)

    @app.get("/api/{rest:path}")
    def no_answer(rest: str) -> Response:
        return _problem_response(404, f"the route /api/{rest} does not exist")

    @app.api_route("/{path:path}", methods=["GET", "HEAD"])
    def file(path: str) -> Response:
        found = static.get(path)
        if found is None:
            return Response(
                f"the file /{path} does not exist; open the page at /\n", status_code=404, media_type="text/plain"
            )
        caching = "public, max-age=31536000, immutable" if found.hashed else "no-cache"
        return Response(found.content, media_type=found.kind, headers={"Cache-Control": caching})

    return app


def _problem_response(status: int, text: str) -> PlainJSONResponse:
    return PlainJSONResponse({"problem": text}, status_code=status)


def _add_problems(app: FastAPI) -> None:
    """Convert exceptions into responses with one sentence and no traceback."""

    @app.exception_handler(UnknownRunError)
    def answer_unknown_run(_request: Request, error: Exception) -> Response:
        return _problem_response(
            404, f"the run {error.args[0]!s:.100} does not exist; it may have been removed or renamed"
        )

    @app.exception_handler(OutsideError)
    def answer_outside(_request: Request, error: Exception) -> Response:
        return _problem_response(403, str(error))

    @app.exception_handler(ForbiddenError)
    def answer_forbidden(_request: Request, error: Exception) -> Response:
        return _problem_response(403, str(error))

    @app.exception_handler(LookupError)
    def answer_missing(_request: Request, error: Exception) -> Response:
        return _problem_response(
            404, str(error.args[0]) if error.args and isinstance(error.args[0], str) else "it no longer exists"
        )

    @app.exception_handler(OSError)
    def answer_unreadable(_request: Request, error: Exception) -> Response:
        assert isinstance(error, OSError)
        name = str(error.filename or "a file").rpartition("/")[2]
        if isinstance(error, FileNotFoundError):
            return _problem_response(404, f"the run's folder has no {name}")
        return _problem_response(500, f"{name}: {error.strerror or 'it is unreadable'}")

    @app.exception_handler(RequestValidationError)
    def answer_invalid_request(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return _problem_response(422, f"{'.'.join(str(part) for part in first['loc'][1:])}: {first['msg']}")


def _add_runs(app: FastAPI, redactor: Redactor) -> None:
    @app.get("/api/runs")
    def every(runs: VisibleRuns) -> run_answers.RunList:
        return redactor.redact_model(overview.run_list(runs))

    @app.get("/api/runs/{run}")
    def get_run(run: VisibleRun) -> run_answers.RunView:
        return redactor.redact_model(overview.run_view(run))

    @app.get("/api/runs/{run}/manifest")
    def manifest(run: VisibleRun) -> run_answers.Manifest:
        document = redactor.redact_document(run.read_manifest())
        return run_answers.Manifest(text=yaml.safe_dump(document, sort_keys=False, allow_unicode=True))

    @app.get("/api/runs/{run}/history")
    def history(run: VisibleRun) -> run_answers.History:
        return redactor.redact_model(overview.config_history(run.open_files(), redactor.redact_document))

    @app.get("/api/runs/{run}/lineage")
    def lineage(run: VisibleRun, runs: VisibleRuns) -> run_answers.Lineage:
        return redactor.redact_model(overview.run_lineage(run, runs))

    @app.get("/api/compare")
    def compare(
        runs: VisibleRuns, run: Annotated[list[str], Query(min_length=2, max_length=8)]
    ) -> run_answers.Comparison:
        found = [runs.get(one) for one in run]
        return redactor.redact_model(overview.compare_runs(found, [_manifest_fields(one, redactor) for one in found]))


def _manifest_fields(run: Run, redactor: Redactor) -> RunFields:
    """Return the fields of a run's manifest without secrets."""
    document = run.read_manifest()
    spec = document.get("spec")
    if isinstance(spec, dict):
        found = fields_of_spec(spec)
    else:
        files = run.open_files()
        roles = document if "trainer" in document or "orchestrator" in document else {"trainer": document}
        found = fields_of_folder(files.paths, roles, files.fence.open)
    return replace(found, values=redactor.redact_document(dict(found.values)))


def _add_curves(app: FastAPI) -> None:
    @app.get("/api/runs/{run}/curves")
    def curves(
        run: VisibleRun,
        metric: Annotated[list[str], Query(min_length=1, max_length=24)],
        first: Step = None,
        last: Step = None,
        smooth: Annotated[int, Query(ge=0, le=200)] = 1,
        points: Annotated[int, Query(ge=4, le=4000)] = 1000,
    ) -> run_answers.Curves:
        index = run.open_files().read_steps()
        return drawn.draw_curves(index, metric, first=first, last=last, smooth=smooth, points=points)

    @app.get("/api/runs/{run}/sparkline")
    def sparkline(run: VisibleRun) -> run_answers.Sparkline:
        return drawn.draw_sparkline(overview.steps_of(run)[0])

    @app.get("/api/runs/{run}/timeline")
    def timeline(
        run: VisibleRun, first: Step = None, last: Step = None, spans: Annotated[int, Query(ge=1, le=400)] = 80
    ) -> run_answers.Timeline:
        return drawn.draw_timeline(run.open_files().read_steps(), first=first, last=last, spans=spans)

    @app.get("/api/runs/{run}/staleness")
    def staleness(run: VisibleRun, step: Annotated[int, Query(ge=1, le=_STEP)]) -> run_answers.Staleness:
        return overview.staleness_histogram(run.open_files(), step)


def _add_rollouts(app: FastAPI, redactor: Redactor) -> None:
    @app.get("/api/runs/{run}/traces")
    def traced(run: VisibleRun) -> rollout_answers.TracedSteps:
        return rollout_views.list_traced_steps(run.open_files(), redactor.redact_text(run.label))

    @app.get("/api/runs/{run}/rollouts")
    def page(
        run: VisibleRun,
        source: FromTrace,
        wanted: Wanted,
        order: Order = "trace",
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> rollout_answers.RolloutPage:
        found = run.open_files()
        index = found.read_trace_index(source.trace_path(found))
        return rollout_views.rollout_page(index, wanted, order, redactor.redact_text, offset=offset, limit=limit)

    @app.get("/api/runs/{run}/rollouts/{number}")
    def rollout(run: VisibleRun, number: int, source: FromTrace) -> rollout_answers.RolloutView:
        row, whole = rollout_views.whole_rollout(run.open_files(), source, number)
        return rollout_views.rollout_view(redactor.redact_text(run.label), row, whole, redactor.redact_text)

    def locate_rollout(run: OpenRun, step: int, number: int) -> tuple[int, int, int]:
        """Return attempt, group and rollout of a row of a trace."""
        row, _ = rollout_views.whole_rollout(run, Source(step, None), number)
        attempt = row["attempt"] if isinstance(row["attempt"], int) else 0
        return attempt, row["group"] or 0, row["rollout"] or 0

    @app.get("/api/runs/{run}/rollouts/{number}/tokens")
    def coloured(run: VisibleRun, number: int, step: Annotated[int, Query(ge=1, le=_STEP)]) -> rollout_answers.Tokens:
        found = run.open_files()
        return rollout_tokens(found, step, *locate_rollout(found, step, number), redactor.secret_spans)

    @app.get("/api/runs/{run}/rollouts/{number}/reasons")
    def explain_rollout(
        run: VisibleRun, number: int, step: Annotated[int, Query(ge=1, le=_STEP)]
    ) -> rollout_answers.Reasons:
        found = run.open_files()
        return rollout_reasons(found, run.fetch, step, locate_rollout(found, step, number), redactor.redact_text)

    @app.get("/api/runs/{run}/rollouts/{number}/diff/{other}")
    def diff(run: VisibleRun, number: int, other: int, source: FromTrace) -> rollout_answers.DiffView:
        found = run.open_files()
        first, second = (rollout_views.whole_rollout(found, source, one) for one in (number, other))
        return rollout_views.rollout_difference(first, second, redactor.redact_text)
