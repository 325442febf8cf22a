"""Learning rates as a function of the update's number."""

from __future__ import annotations

import dataclasses

import pytest

from tests.workers.tiny_training import long_stage, segment_of, short_stage
from workers.schedule import learning_rate
from workers.spec import CheckpointRef, DecayShape, Segment, SegmentKind

SHORT = short_stage("corpus")
TRUNK_POINT = CheckpointRef(segment="trunk", step=80)


def decay(horizon_steps: int, final_rate_ratio: float = 0.25, shape: DecayShape = "linear") -> Segment:
    stage = dataclasses.replace(SHORT, final_rate_ratio=final_rate_ratio, decay_shape=shape)
    return segment_of("short_decay", stage, parent=TRUNK_POINT, horizon_steps=horizon_steps)


def test_trunk_warms_up_to_the_peak_and_stays_there() -> None:
    trunk = segment_of("short_trunk", SHORT)
    assert [learning_rate(trunk, step) for step in range(4)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert {learning_rate(trunk, step) for step in (3, 4, 100, 10**9)} == {SHORT.peak_rate}


def test_decay_falls_linearly_and_ends_exactly_at_the_floor() -> None:
    rates = [learning_rate(decay(5), step) for step in range(5)]
    assert rates == pytest.approx([0.0085, 0.007, 0.0055, 0.004, 0.0025])
    assert rates[-1] == SHORT.end_rate


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", {0: 0.95, 4: 0.75, 9: 0.5, 14: 0.25, 18: 0.05, 19: 0.0}),
        ("one_sqrt", {0: 0.776393, 4: 0.5, 9: 0.292893, 14: 0.133975, 18: 0.025321, 19: 0.0}),
        ("cosine", {0: 0.993844, 4: 0.853553, 9: 0.5, 14: 0.146447, 19: 0.0}),
    ],
)
def test_shapes_of_a_decay_over_the_last_fifth_of_a_hundred_updates(
    shape: DecayShape, expected: dict[int, float]
) -> None:
    """The curves of Hägele et al. (2405.18392): their updates 81, 85, 90, ... of 100 are our 0, 4, 9, ... of 20."""
    stage = dataclasses.replace(SHORT, final_rate_ratio=0.0, decay_shape=shape, peak_rate=1.0)
    segment = segment_of("short_decay", stage, parent=TRUNK_POINT, horizon_steps=20)
    assert {step: learning_rate(segment, step) for step in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 1 / 3, 1.0])
@pytest.mark.parametrize(("horizon", "shape"), [(1, "linear"), (3, "cosine"), (7, "one_sqrt"), (1000, "linear")])
def test_decay_never_leaves_the_range_between_peak_and_floor(horizon: int, shape: DecayShape, ratio: float) -> None:
    """B13: past its end the rate neither falls below the floor nor turns negative."""
    segment = decay(horizon, ratio, shape)
    floor = SHORT.peak_rate * ratio
    rates = [learning_rate(segment, step) for step in range(3 * horizon)]
    assert all(floor <= rate <= SHORT.peak_rate for rate in rates)
    assert set(rates[horizon - 1 :]) == {floor}


def test_eight_steps_with_a_decay_over_the_last_four() -> None:
    """B13: the seventh of eight updates runs at a quarter of the peak."""
    assert learning_rate(decay(4, 0.0), 7 - 4 - 1) == pytest.approx(0.25 * SHORT.peak_rate)


def test_decay_to_nothing_over_ten_thousand_updates() -> None:
    """B11: after 2,500 updates three quarters are left, after 5,000 one half; the number of processes has no say."""
    stage = dataclasses.replace(SHORT, peak_rate=1e-4, final_rate_ratio=0.0)
    segment = segment_of("short_decay", stage, parent=TRUNK_POINT, horizon_steps=10_000)
    assert learning_rate(segment, 2_499) == pytest.approx(7.5e-5)
    assert learning_rate(segment, 4_999) == pytest.approx(5.0e-5)
    assert learning_rate(segment, 9_998) > 0
    assert learning_rate(segment, 9_999) == 0


def test_constant_long_stage_keeps_its_start_rate_after_an_optional_warm_up() -> None:
    stage = long_stage("corpus")
    assert [learning_rate(segment_of("long_constant", stage), step) for step in range(3)] == [0.00125, 0.0025, 0.0025]
    no_warmup = segment_of("long_constant", dataclasses.replace(stage, warmup_steps=0))
    assert {learning_rate(no_warmup, step) for step in (0, 1, 10**6)} == {0.0025}


def test_linear_decay_of_the_long_stage_ends_at_its_share_of_the_start_rate() -> None:
    stage = dataclasses.replace(long_stage("corpus", final_rate_ratio=0.1), warmup_steps=0)
    segment = segment_of("long_linear_decay", stage, horizon_steps=10)
    rates = [learning_rate(segment, step) for step in range(10)]
    assert rates == pytest.approx([0.0025 * (1 - 0.09 * (step + 1)) for step in range(10)])
    assert rates[-1] == 0.0025 * 0.1


@pytest.mark.parametrize("shape", ["linear", "one_sqrt", "cosine"])
def test_one_decay_runs_through_sub_phases_of_other_lengths_without_a_reset(shape: DecayShape) -> None:
    stage = dataclasses.replace(long_stage("corpus", final_rate_ratio=0.1), decay_shape=shape, warmup_steps=6)
    whole = segment_of("long_linear_decay", stage, horizon_steps=12)
    longer = dataclasses.replace(stage, seq_len=2 * stage.seq_len, rope_base=1e6)
    phases = [
        (dataclasses.replace(whole, stage=stage), 4),
        (dataclasses.replace(whole, stage=longer, stage_offset_steps=4), 5),
        (dataclasses.replace(whole, stage=stage, stage_offset_steps=9), 3),
    ]
    in_phases = [learning_rate(phase, step) for phase, steps in phases for step in range(steps)]
    assert in_phases == [learning_rate(whole, step) for step in range(12)]
    assert in_phases[-1] == stage.start_rate * 0.1


def test_follow_up_decays_over_its_horizon_and_is_constant_without_one() -> None:
    stage = dataclasses.replace(long_stage("corpus", final_rate_ratio=0.01), warmup_steps=0)
    rates = [learning_rate(segment_of("follow_up", stage, horizon_steps=4), step) for step in range(4)]
    assert rates == pytest.approx([0.0025 * (1 - 0.99 * done) for done in (0.25, 0.5, 0.75, 1.0)])
    assert {learning_rate(segment_of("follow_up", stage), step) for step in (0, 10**6)} == {0.0025}


def test_resumed_run_reads_the_same_curve() -> None:
    """B15: warm-up 100, resumed at 150 and twice more; there is no state that could restart."""
    trunk = segment_of("short_trunk", dataclasses.replace(SHORT, warmup_steps=100))
    unbroken = [learning_rate(trunk, step) for step in range(1000)]
    pieces = [range(150), range(150, 400), range(400, 401), range(401, 1000)]
    assert [learning_rate(trunk, step) for piece in pieces for step in piece] == unbroken
    assert unbroken[150] == SHORT.peak_rate


@pytest.mark.parametrize(
    ("kind", "of_short", "horizon"),
    [
        ("short_trunk", False, None),
        ("long_constant", True, None),
        ("short_decay", True, None),
        ("short_decay", True, 0),
        ("long_linear_decay", False, None),
        ("follow_up", True, None),
    ],
)
def test_schedule_that_does_not_fit_its_stage_is_refused(
    kind: SegmentKind, of_short: bool, horizon: int | None
) -> None:
    segment = segment_of(kind, SHORT if of_short else long_stage("corpus"), horizon_steps=horizon)
    with pytest.raises(ValueError, match=r"cannot have|needs horizon_steps"):
        learning_rate(segment, 0)


def test_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        learning_rate(segment_of("short_trunk", SHORT), -1)
