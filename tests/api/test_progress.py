"""How far a grid is and why what waits does, at every stage of its life."""

from __future__ import annotations

from collections import Counter

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker

from database.attempts import renew
from tests.api import seeding, seeding_measures
from tests.api.conftest import Measured
from workers.results import TrainProgress


def test_without_scheduler_everything_says_so(http: httpx.Client) -> None:
    grid_id = http.post("/v1/grids", json=seeding.document()).json()["id"]
    grid = http.get(f"/v1/grids/{grid_id}").json()
    assert grid["state"] == "PENDING"
    assert {item["why"][:23] for item in grid["waiting"]} == {"no scheduler is running"}
    assert sum(item["count"] for item in grid["waiting"] if item["kind"] == "SEGMENT") == 6
    assert (grid["tokens_done"], grid["eta_s"], grid["failures"]) == (0, None, [])
    cells = http.get(f"/v1/grids/{grid_id}/cells").json()["items"]
    assert {(cell["state"], cell["why"][:23]) for cell in cells} == {("PENDING", "no scheduler is running")}


def test_evaluation_after_a_follow_up_stage_is_named_by_it(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    with sessions.begin() as session:
        grid_id = seeding.submit_grid(session, seeding_measures.looked_at()).grid_id
        while (segment := seeding.next_segment(session)) is not None:
            seeding.train(session, segment)
    said: Counter[str] = Counter()
    with sessions.begin() as session:
        claimed = seeding.next_evaluation(session)
    while claimed is not None:
        said.update(attempt["what"] for attempt in http.get(f"/v1/grids/{grid_id}").json()["attempts"])
        with sessions.begin() as session:
            seeding.measure(session, claimed)
            claimed = seeding.next_evaluation(session)
    assert said == {"raw": 9, f"raw, after {seeding_measures.FOLLOW_UP}": 3}


def test_running_trunk_shows_its_tokens_and_what_waits_for_it(
    http: httpx.Client, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        grid_id = seeding.submit_grid(session).grid_id
        claimed = seeding.next_segment(session)
        assert claimed is not None
        progress = TrainProgress(step=12, stage_tokens=12 * 64, loss=3.5, learning_rate=0.01, tokens_per_s=1000.0)
        assert renew(session, claimed.token, lease_s=60, progress=progress)
    grid = http.get(f"/v1/grids/{grid_id}").json()
    assert grid["state"] == "RUNNING"
    (attempt,) = grid["attempts"]
    assert (attempt["kind"], attempt["what"], attempt["step"], attempt["target_step"]) == (
        "SEGMENT",
        "short_trunk",
        12,
        24,
    )
    assert (attempt["loss"], attempt["tokens_per_s"], attempt["worker"]) == (3.5, 1000.0, "worker-0")
    by_scale = {scale["scale"]: scale for scale in grid["scales"]}
    mine, other = by_scale[claimed.scale], by_scale["d32" if claimed.scale == "d64" else "d64"]
    assert (mine["tokens_done"], mine["tokens_per_s"], mine["segments"]["RUNNING"]) == (12 * 64, 1000.0, 1)
    assert (other["tokens_done"], other["segments"]["READY"]) == (0, 1)
    assert grid["tokens_done"] == 12 * 64
    assert grid["eta_s"] is None  # the other scale has no rate yet
    why = {(item["scale"], item["kind"], item["why"]) for item in grid["waiting"]}
    assert (other["scale"], "SEGMENT", "no free worker") in why
    assert (mine["scale"], "SEGMENT", f"waiting on the checkpoint of short_trunk of {mine['scale']}") in why
    cells = http.get(f"/v1/grids/{grid_id}/cells").json()["items"]
    waiting = {cell["why"] for cell in cells if cell["scale"] == mine["scale"]}
    assert waiting == {f"waiting on the checkpoint of short_trunk of {mine['scale']} at step 24 (training, step 12)"}


def test_progress_is_durable_tokens_and_never_above_the_total(
    http: httpx.Client, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        small = seeding.submit_grid(session).grid_id
        seeding.finish(session)
        larger = seeding.submit_grid(session, seeding.document(long_tokens=[512, 1024, 4096])).grid_id
    done = http.get(f"/v1/grids/{small}").json()
    assert done["state"] == "SUCCEEDED"  # though its open-ended segments go on for the other grid
    assert done["tokens_done"] == done["tokens_total"] == 2 * (27 * 64 + 1024)
    assert done["cells"]["MEASURED"] == 4
    assert done["waiting"] == []
    extended = http.get(f"/v1/grids/{larger}").json()
    assert extended["state"] == "PENDING" or extended["state"] == "RUNNING"
    assert extended["tokens_done"] == done["tokens_total"]
    assert extended["tokens_total"] == 2 * (27 * 64 + 4096)
    assert extended["cells"] == {"PENDING": 2, "RUNNING": 0, "MEASURED": 4, "FAILED": 0, "CANCELLED": 0}


def test_measured_cells_carry_their_values(reader: httpx.Client, measured: Measured) -> None:
    cells = reader.get(f"/v1/grids/{measured.grid_id}/cells", params={"limit": 100}).json()["items"]
    assert len(cells) == 36
    for cell in cells:
        (evaluation,) = cell["evaluations"]
        assert (cell["state"], cell["why"], evaluation["state"]) == ("MEASURED", None, "SUCCEEDED")
        assert evaluation["log_longppl"] > evaluation["log_shortppl"] == 2.0
        assert evaluation["rule"] == "raw"


def test_value_without_key_tokens_is_null_with_a_reason_and_no_observation(
    http: httpx.Client, sessions: sessionmaker[Session]
) -> None:
    """B91, B103: one value that does not exist spoils neither the page nor the fit."""
    with sessions.begin() as session:
        grid_id = seeding.submit_grid(session).grid_id
        seeding.finish(session, lambda row: None if row.long_tokens == 512 else 2.5)
    cells = http.get(f"/v1/grids/{grid_id}/cells").json()["items"]
    told = {(cell["long_tokens"], e["log_longppl"], e["reason"]) for cell in cells for e in cell["evaluations"]}
    assert told == {(512, None, "no key tokens"), (1024, 2.5, None)}
    assert {row["log_longppl"] for row in http.get("/v1/observations").json()["items"]} == {2.5}


def test_failed_work_is_named_with_its_reason(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    with sessions.begin() as session:
        grid_id = seeding.submit_grid(session).grid_id
        while (segment := seeding.next_segment(session)) is not None:
            seeding.train(session, segment)
        first = seeding.next_evaluation(session)
        assert first is not None
        seeding.fail_evaluation(session, first, "the loss is not a number at step 7")
        running = http.get(f"/v1/grids/{grid_id}")
        assert running.status_code == 404  # not committed yet: the API sees nothing half-done
    grid = http.get(f"/v1/grids/{grid_id}").json()
    assert grid["state"] == "RUNNING"
    with sessions.begin() as session:
        seeding.finish(session)
    grid = http.get(f"/v1/grids/{grid_id}").json()
    assert grid["state"] == "FAILED"
    assert grid["cells"] == {"PENDING": 0, "RUNNING": 0, "MEASURED": 3, "FAILED": 1, "CANCELLED": 0}
    (failure,) = grid["failures"]
    assert (failure["kind"], failure["count"], failure["reason"]) == (
        "EVALUATION",
        1,
        "the loss is not a number at step 7",
    )
    cells = http.get(f"/v1/grids/{grid_id}/cells").json()["items"]
    assert [cell["why"] for cell in cells if cell["state"] == "FAILED"] == ["the loss is not a number at step 7"]


def test_backing_off_says_until_when_and_after_what(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    with sessions.begin() as session:
        grid_id = seeding.submit_grid(session).grid_id
        seeding.scheduler_lives(session)
        session.execute(
            text("UPDATE segments SET state = 'READY', reason = 'worker lost', not_before = '2999-01-01T00:00:00Z'")
        )
    why = {item["why"] for item in http.get(f"/v1/grids/{grid_id}").json()["waiting"] if item["kind"] == "SEGMENT"}
    assert why == {"backing off until 00:00:00 UTC after: worker lost"}


@pytest.mark.parametrize("count", [1, 1000, 1701])
def test_grids_of_any_size_have_right_totals_and_reachable_last_cells(
    http: httpx.Client, sessions: sessionmaker[Session], count: int
) -> None:
    """B122."""
    with sessions.begin() as session:
        grid_id = seeding.submit_grid(session, seeding.document(long_tokens=[512], scales=_one_scale())).grid_id
        session.execute(
            text(
                "WITH one AS (SELECT * FROM cells), more AS ("
                "  INSERT INTO cells (grid_id, key, scale, n_params, short_tokens, long_tokens, short_seed, long_seed,"
                "                     plan_status)"
                "  SELECT one.grid_id, 'copy ' || n, one.scale, one.n_params, one.short_tokens, one.long_tokens,"
                "         one.short_seed, n, one.plan_status"
                "  FROM one, generate_series(2, :count) n RETURNING id"
                ") INSERT INTO cell_evaluations (cell_id, evaluation_key, series_id)"
                "  SELECT more.id, evaluation_key, series_id FROM more, cell_evaluations"
            ),
            {"count": count},
        )
    assert http.get(f"/v1/grids/{grid_id}").json()["cells"]["PENDING"] == count
    seen: list[int] = []
    cursor = None
    while True:
        page = http.get(
            f"/v1/grids/{grid_id}/cells", params={"limit": 500} | ({"cursor": cursor} if cursor else {})
        ).json()
        seen += [cell["long_seed"] for cell in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(seen) == [0, *range(2, count + 1)]


def _one_scale() -> dict[str, object]:
    return {"d32": {"layers": 1, "width": 32, "heads": 2, "ffn_width": 64}}
