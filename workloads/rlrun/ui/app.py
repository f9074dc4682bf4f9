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


def _runs(request: Request) -> Runs:
    found: Runs = request.app.state.runs_of(request)
    return found


def _run(run: str, request: Request) -> Run:
    return _runs(request).get(run)


Seen = Annotated[Runs, Depends(_runs)]
"""Runs that the caller may see. Routes reach runs only through this dependency and `One`."""
One = Annotated[Run, Depends(_run)]
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
    def me(request: Request, runs: Seen) -> run_answers.Me:
        return run_answers.Me(user=runs.user, session=request.scope.get("state", {}).get("session") is not None)

    @app.get("/api/events")
    async def events(runs: Seen) -> Response:
        if (why := feed.refusal(runs.user)) is not None:
            return _problem(429, why)
        view = None if runs.user is None else runs.seen
        # A buffering proxy would delay the events; nginx buffers unless this header disables it.
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(feed.events(view, runs.user), media_type="text/event-stream", headers=headers)

    @app.get("/api/{rest:path}")
    def no_answer(rest: str) -> Response:
        return _problem(404, f"the route /api/{rest} does not exist")

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


def _problem(status: int, text: str) -> PlainJSONResponse:
    return PlainJSONResponse({"problem": text}, status_code=status)


def _add_problems(app: FastAPI) -> None:
    """Convert exceptions into responses with one sentence and no traceback."""

    @app.exception_handler(UnknownRunError)
    def unknown(_request: Request, error: Exception) -> Response:
        return _problem(404, f"the run {error.args[0]!s:.100} does not exist; it may have been removed or renamed")

    @app.exception_handler(OutsideError)
    def outside(_request: Request, error: Exception) -> Response:
        return _problem(403, str(error))

    @app.exception_handler(ForbiddenError)
    def forbidden(_request: Request, error: Exception) -> Response:
        return _problem(403, str(error))

    @app.exception_handler(LookupError)
    def lacking(_request: Request, error: Exception) -> Response:
        return _problem(
            404, str(error.args[0]) if error.args and isinstance(error.args[0], str) else "it no longer exists"
        )

    @app.exception_handler(OSError)
    def unread(_request: Request, error: Exception) -> Response:
        assert isinstance(error, OSError)
        name = str(error.filename or "a file").rpartition("/")[2]
        if isinstance(error, FileNotFoundError):
            return _problem(404, f"the run's folder has no {name}")
        return _problem(500, f"{name}: {error.strerror or 'it is unreadable'}")

    @app.exception_handler(RequestValidationError)
    def wrong(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return _problem(422, f"{'.'.join(str(part) for part in first['loc'][1:])}: {first['msg']}")


def _add_runs(app: FastAPI, redactor: Redactor) -> None:
    @app.get("/api/runs")
    def every(runs: Seen) -> run_answers.RunList:
        return redactor.model(overview.run_list(runs))

    @app.get("/api/runs/{run}")
    def one(run: One) -> run_answers.RunView:
        return redactor.model(overview.run_view(run))

    @app.get("/api/runs/{run}/manifest")
    def manifest(run: One) -> run_answers.Manifest:
        document = redactor.document(run.manifest())
        return run_answers.Manifest(text=yaml.safe_dump(document, sort_keys=False, allow_unicode=True))

    @app.get("/api/runs/{run}/history")
    def history(run: One) -> run_answers.History:
        return redactor.model(overview.config_history(run.files(), redactor.document))

    @app.get("/api/runs/{run}/lineage")
    def lineage(run: One, runs: Seen) -> run_answers.Lineage:
        return redactor.model(overview.run_lineage(run, runs))

    @app.get("/api/compare")
    def compare(runs: Seen, run: Annotated[list[str], Query(min_length=2, max_length=8)]) -> run_answers.Comparison:
        found = [runs.get(one) for one in run]
        return redactor.model(overview.compare_runs(found, [_fields(one, redactor) for one in found]))


def _fields(run: Run, redactor: Redactor) -> RunFields:
    """Return the fields of a run's manifest without secrets."""
    document = run.manifest()
    spec = document.get("spec")
    if isinstance(spec, dict):
        found = fields_of_spec(spec)
    else:
        files = run.files()
        roles = document if "trainer" in document or "orchestrator" in document else {"trainer": document}
        found = fields_of_folder(files.paths, roles, files.fence.open)
    return replace(found, values=redactor.document(dict(found.values)))


def _add_curves(app: FastAPI) -> None:
    @app.get("/api/runs/{run}/curves")
    def curves(
        run: One,
        metric: Annotated[list[str], Query(min_length=1, max_length=24)],
        first: Step = None,
        last: Step = None,
        smooth: Annotated[int, Query(ge=0, le=200)] = 1,
        points: Annotated[int, Query(ge=4, le=4000)] = 1000,
    ) -> run_answers.Curves:
        index = run.files().steps()
        return drawn.draw_curves(index, metric, first=first, last=last, smooth=smooth, points=points)

    @app.get("/api/runs/{run}/sparkline")
    def sparkline(run: One) -> run_answers.Sparkline:
        return drawn.draw_sparkline(overview.steps_of(run)[0])

    @app.get("/api/runs/{run}/timeline")
    def timeline(
        run: One, first: Step = None, last: Step = None, spans: Annotated[int, Query(ge=1, le=400)] = 80
    ) -> run_answers.Timeline:
        return drawn.draw_timeline(run.files().steps(), first=first, last=last, spans=spans)

    @app.get("/api/runs/{run}/staleness")
    def staleness(run: One, step: Annotated[int, Query(ge=1, le=_STEP)]) -> run_answers.Staleness:
        return overview.staleness_histogram(run.files(), step)


def _add_rollouts(app: FastAPI, redactor: Redactor) -> None:
    @app.get("/api/runs/{run}/traces")
    def traced(run: One) -> rollout_answers.TracedSteps:
        return rollout_views.traced(run.files(), redactor.text(run.label))

    @app.get("/api/runs/{run}/rollouts")
    def page(
        run: One,
        source: FromTrace,
        wanted: Wanted,
        order: Order = "trace",
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> rollout_answers.RolloutPage:
        found = run.files()
        index = found.trace(source.path(found))
        return rollout_views.rollout_page(index, wanted, order, redactor.text, offset=offset, limit=limit)

    @app.get("/api/runs/{run}/rollouts/{number}")
    def rollout(run: One, number: int, source: FromTrace) -> rollout_answers.RolloutView:
        row, whole = rollout_views.whole_rollout(run.files(), source, number)
        return rollout_views.rollout_view(redactor.text(run.label), row, whole, redactor.text)

    def place(run: OpenRun, step: int, number: int) -> tuple[int, int, int]:
        """Return attempt, group and rollout of a row of a trace."""
        row, _ = rollout_views.whole_rollout(run, Source(step, None), number)
        attempt = row["attempt"] if isinstance(row["attempt"], int) else 0
        return attempt, row["group"] or 0, row["rollout"] or 0

    @app.get("/api/runs/{run}/rollouts/{number}/tokens")
    def coloured(run: One, number: int, step: Annotated[int, Query(ge=1, le=_STEP)]) -> rollout_answers.Tokens:
        found = run.files()
        return rollout_tokens(found, step, *place(found, step, number), redactor.spans)

    @app.get("/api/runs/{run}/rollouts/{number}/reasons")
    def told(run: One, number: int, step: Annotated[int, Query(ge=1, le=_STEP)]) -> rollout_answers.Reasons:
        found = run.files()
        return rollout_reasons(found, run.fetch, step, place(found, step, number), redactor.text)

    @app.get("/api/runs/{run}/rollouts/{number}/diff/{other}")
    def diff(run: One, number: int, other: int, source: FromTrace) -> rollout_answers.DiffView:
        found = run.files()
        first, second = (rollout_views.whole_rollout(found, source, one) for one in (number, other))
        return rollout_views.rollout_difference(first, second, redactor.text)
