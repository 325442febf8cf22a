"""The HTTP service, built by a factory: an engine goes in, an application comes out. Nothing happens at import."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from sqlalchemy import Engine

from api.dependencies import check_query
from api.errors import install
from api.models import ProblemBody
from api.openapi import describe
from api.routes import dashboard, docs, fits, grids, health, imports, measures, observations, predictions, verbs
from database.engine import session_factory

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    dashboard.router,
    docs.router,
    grids.router,
    verbs.router,
    measures.router,
    observations.router,
    imports.router,
    fits.router,
    predictions.router,
)

_DESCRIPTION = """Scaling-law experiments for long-context continual pre-training.

Counts of tokens and parameters are int64; JavaScript rounds those above 2^53. Times are RFC 3339 in UTC. Numbers that
do not exist are null, never NaN. Every error is `application/problem+json` (RFC 9457)."""


class _Service(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return describe(self)


def create_app(engine: Engine, *, dispose: bool = False) -> FastAPI:
    """The application on a results database.

    Args:
        engine: where the results are. Requests take connections from its pool for single transactions only.
        dispose: close the pool when the application shuts down.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if dispose:
            engine.dispose()

    app = _Service(
        title="Longlaw",
        version=version("longlaw"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # the stock page loads its script from elsewhere; api.routes.docs has one of our own
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        dependencies=[Depends(check_query)],
        responses={"default": {"description": "Any error.", "model": ProblemBody}},
    )
    app.state.engine = engine
    app.state.sessions = session_factory(engine)
    for router in ROUTERS:
        app.include_router(router)
    install(app)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name
