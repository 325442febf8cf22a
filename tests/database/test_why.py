"""Why work is not done yet, in words."""

from __future__ import annotations

import datetime as dt

import pytest

from database.why import why

NOW = dt.datetime(2026, 7, 1, 12, 0, 0, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"state": "SUCCEEDED"}, None),
        ({"state": "SUCCEEDED", "reason": "no key token"}, "no key token"),
        ({"state": "FAILED", "reason": "parent failed: loss is nan"}, "parent failed: loss is nan"),
        ({"state": "READY"}, "no free worker"),
        ({"state": "READY", "reason": "x", "not_before": NOW - dt.timedelta(seconds=1)}, "no free worker"),
        (
            {"state": "READY", "reason": "no space left", "not_before": NOW + dt.timedelta(seconds=90)},
            "backing off until 12:01:30 UTC after: no space left",
        ),
        (
            {"state": "PENDING", "waiting_for": "short_trunk of d64 at step 512"},
            "waiting on the checkpoint of short_trunk of d64 at step 512",
        ),
        ({"state": "PENDING"}, "about to be scheduled"),
        ({"state": "RUNNING", "progress": "step 3 of 8"}, "running, step 3 of 8"),
    ],
)
def test_reason(facts: dict[str, object], said: str | None) -> None:
    given = {"reason": None, "not_before": None, "now": NOW, "leader_alive": True} | facts
    assert why(**given) == said  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["PENDING", "READY", "RUNNING"])
def test_missing_scheduler_explains_all_open_work(state: str) -> None:
    said = why(state=state, reason=None, not_before=None, now=NOW, leader_alive=False)
    assert said is not None
    assert said.startswith("no scheduler is running")
