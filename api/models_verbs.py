"""What may be asked of a grid, and the answer: what it did, and how the grid stands after it."""

from __future__ import annotations

from pydantic import Field

from api.models import Body, Count, GridDetail, Time, Verb


class Obeyed(Body):
    """What a verb did. Counts that a verb has no use for are 0."""

    verb: Verb
    at: Time
    repeated: bool = Field(description="It had been done before, at this time and with these counts.")
    preview: bool = Field(description="Nothing was done: this is what would be.")
    segments: Count = Field(
        description="That stopped (cancel), wait (pause), go on (resume) or were opened again (retry-failed)."
    )
    segments_kept: Count = Field(description="That go on because other grids ask for them too.")
    evaluations: Count = Field(description="Like `segments`.")
    evaluations_kept: Count = Field(description="Like `segments_kept`.")
    attempts: Count = Field(description="That ran, and stopped (cancel) or end at their next checkpoint (pause).")
    cells_measured: Count = Field(description="Of the grid; they stay measured.")
    tokens_saved: Count = Field(description="That will not be trained (cancel).")


class GridAnswer(GridDetail):
    """The grid after a verb."""

    obeyed: Obeyed
