"""What a grid can be told: cancel, pause, resume, retry what failed. Each is harmless when repeated."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy.orm import Session, sessionmaker

from api.dependencies import ResourceId, Sessions
from api.errors import ResourceNotFoundError
from api.models import GridDetail, Verb
from api.models_verbs import GridAnswer, Obeyed
from database.reading import grid_standing
from database.verbs import obey

router = APIRouter(prefix="/v1", tags=["grids"])

Preview = Annotated[bool, Query(description="Only say what it would do.")]


@router.post("/grids/{grid_id}:cancel")
def cancel_grid(grid_id: ResourceId, sessions: Sessions, preview: Preview = False) -> GridAnswer:
    """Stops a grid for good: cells that are not measured become CANCELLED, measured ones and all checkpoints stay.

    What waits and what runs is CANCELLED at once, unless another grid asks for it; workers are told within a second,
    and have `LONGLAW_STOP_GRACE_S` to end. The same grid submitted again goes on from the checkpoints.
    """
    return _tell(sessions, grid_id, "cancel", preview=preview)


@router.post("/grids/{grid_id}:pause")
def pause_grid(grid_id: ResourceId, sessions: Sessions, preview: Preview = False) -> GridAnswer:
    """Lets nothing begin that only paused grids ask for.

    Training that runs ends at its next checkpoint and waits; evaluations that run are finished and recorded.
    """
    return _tell(sessions, grid_id, "pause", preview=preview)


@router.post("/grids/{grid_id}:resume")
def resume_grid(grid_id: ResourceId, sessions: Sessions, preview: Preview = False) -> GridAnswer:
    """Lets a paused grid go on, from its newest checkpoints; training that runs for other grids is not touched."""
    return _tell(sessions, grid_id, "resume", preview=preview)


@router.post("/grids/{grid_id}:retry-failed")
def retry_grid(grid_id: ResourceId, sessions: Sessions, preview: Preview = False) -> GridAnswer:
    """Opens again what failed, and what failed with it, with new retry budgets; the plan and its price stay.

    Training goes on from the newest checkpoints; what runs is not touched.
    """
    return _tell(sessions, grid_id, "retry-failed", preview=preview)


def _tell(sessions: sessionmaker[Session], grid_id: uuid.UUID, verb: Verb, *, preview: bool) -> GridAnswer:
    with sessions() as session:
        obeyed = obey(session, grid_id, verb)
        standing = grid_standing(session, grid_id)
        if obeyed is None or standing is None:
            raise ResourceNotFoundError(f"There is no grid {grid_id}.")
        if not preview:
            session.commit()
    detail = GridDetail.of(standing.grid, standing.progress, standing)
    told = Obeyed(
        verb=obeyed.verb,
        at=obeyed.at,
        repeated=obeyed.repeated,
        preview=preview,
        **dataclasses.asdict(obeyed.counts),
    )
    return GridAnswer(**dict(detail), obeyed=told)
