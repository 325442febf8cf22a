"""`longlaw report`: its tables against numbers computed by hand, and its sentences where measurements are missing."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from api.app import create_app
from database.attempts import record_evaluation
from database.engine import create_engine, session_factory
from database.models import Evaluation as Row
from database.work import claim_evaluation, promote
from fitting.agreement import concordance
from fitting.predict import log_longppl
from longlaw.cli import app
from longlaw.client import Client
from longlaw.report_command import write_report
from longlaw.report_data import NothingMeasuredError, gather
from longlaw.report_measured import noise_of, steps
from tests.api import seeding, seeding_measures
from tests.api.conftest import serve
from tests.conftest import MakeDatabase
from workers.results import DocumentScore, Evaluation

LONG = (512, 1024, 2048, 4096)
SHORT = (1728, 5184)
#: What a rule adds to log LongPPL; a long seed adds or takes away SEED, and on every other D_l WOBBLE more.
RULES = {"last_m": 0.0, "raw": 0.05, "decayed": 0.08}
SEED, WOBBLE = 0.02, 0.005
_SCHEDULER = uuid.UUID(int=1)


def y(n_params: int, short: int, long: int, seed: int, rule: str) -> float:
    """The log LongPPL that is recorded for a cell."""
    sign = 1 if seed else -1
    wobble = WOBBLE if LONG.index(long) % 2 else -WOBBLE
    return float(log_longppl(seeding.LAW, n_params, short, long)) + sign * (SEED + wobble) + RULES[rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded:
    url: str
    grids: tuple[str, ...]
    sizes: dict[str, int]


def _constant(**changes: Any) -> dict[str, Any]:
    """Three scales x two D_s x four D_l x two long seeds; the newest checkpoint too on one scale."""
    averaged, raw = [{"name": "last_m", "m": 2, "spacing": 64}], [{"name": "raw"}]
    observed = [{"scale": "d64", "short_tokens": short, "long_tokens": [*LONG], "rules": raw} for short in SHORT]
    asked = {"short_tokens": [*SHORT], "long_tokens": [*LONG], "seeds": {"short": [0], "long": [0, 1]}}
    return seeding.fittable(**asked | {"name": "Seeded, both", "rules": averaged, "cells": observed} | changes)


def _decayed() -> dict[str, Any]:
    scales = {"d64": _constant()["scales"]["d64"]}
    return _constant(name="decayed", protocol="linear_decay", scales=scales, rules=[{"name": "raw"}], cells=[])


def _finish(session: Session, rule_of: Callable[[Row], str]) -> None:
    """Trains everything and records what `y` says; ShortPPL falls five times as slowly along D_l."""
    while (segment := seeding.next_segment(session)) is not None:
        seeding.train(session, segment)
    promote(session)  # once: all checkpoints are there
    while (claimed := claim_evaluation(session, scheduler_id=_SCHEDULER, worker="worker-1", lease_s=60)) is not None:
        row = session.scalars(select(Row).where(Row.key == claimed.key, Row.state == "RUNNING")).one()
        value = y(row.n_params, row.short_tokens or 0, row.long_tokens, row.long_seed, rule_of(row))
        falling = seeding.LAW[4] * row.long_tokens ** -seeding.LAW[5]
        scores = DocumentScore(
            key_sum=10 * value, key_count=10, short_sum=20.0, short_count=10, all_sum=300.0, all_count=100
        )
        assert record_evaluation(
            session,
            claimed.token,
            Evaluation(
                log_longppl=value,
                log_longppl_se=0.01,
                log_shortppl=1.5 + 0.2 * falling,
                log_shortppl_se=0.02,
                log_ppl=3.0,
                log_ppl_se=0.03,
                key_gap=row.long_tokens / 4096,
                key_count=10,
                short_count=10,
                all_count=100,
                documents=(scores,),
                reason=None,
            ),
        )


@pytest.fixture(scope="module")
def seeded(migrated_database: MakeDatabase) -> Iterator[Seeded]:
    with migrated_database() as database_url:
        engine = create_engine(database_url, application_name="longlaw-test")
        with session_factory(engine).begin() as session:
            one = seeding.submit_grid(session, _constant())
            _finish(session, lambda row: "raw" if row.rule["name"] == "raw" else "last_m")
            two = seeding.submit_grid(session, _decayed())
            _finish(session, lambda row: "decayed")
        with serve(create_app(engine)) as url:
            sizes = {scale.scale: scale.n_params for scale in one.plan.per_scale}
            yield Seeded(url=url, grids=(str(one.grid_id), str(two.grid_id)), sizes=sizes)
        engine.dispose()


@pytest.fixture(scope="module")
def page(seeded: Seeded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with Client(seeded.url) as client:
        return write_report(client, seeded.grids, tmp_path_factory.mktemp("report"))


def _section(page: Path, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, page.read_text()
    return found[1]


def _rows(section: str) -> dict[str, list[str]]:
    """Lines of its tables: the first field -> the others; of the lines with one first field, the last."""
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


def test_page_and_its_images_lie_where_they_are_linked(page: Path) -> None:
    assert page.name == "Seeded-both.md"
    assert page.read_text().startswith("# Seeded, both\n")
    linked = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
    assert len(linked) == len(set(linked)) == 7
    for image in linked:
        content = (page.parent / image).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20], "big") == 1400  # twice the 700 pixels it is read at
    on_disk = {f"images/Seeded-both/{path.name}" for path in (page.parent / "images" / "Seeded-both").iterdir()}
    assert on_disk == set(linked)


def test_tokens_are_those_of_shared_and_of_separate_runs(page: Path) -> None:
    short = 3 * (sum(SHORT) // 9 + max(SHORT) * 8 // 9)  # one trunk and two decays for each scale
    constant = 3 * len(SHORT) * 2 * max(LONG)
    decayed = len(SHORT) * 2 * sum(LONG)
    one_by_one = 2 * (len(LONG) * sum(SHORT) + len(SHORT) * sum(LONG))
    text = _section(page, "What was run")
    rows = _rows(text)
    assert rows["Seeded, both"] == ["constant", "48 of 48", "64", f"{3 * one_by_one:,}"]
    assert rows["decayed"] == ["linear_decay", "16 of 16", "16", f"{one_by_one:,}"]
    assert f"trains {short + constant + decayed:,} tokens" in text
    assert f"would take {4 * one_by_one:,}: {4 * one_by_one / (short + constant + decayed):.1f} times" in text


def test_longppl_is_listed_for_both_seeds_and_its_steps_are_counted(page: Path, seeded: Seeded) -> None:
    text = _section(page, "LongPPL over D_l")
    n = seeded.sizes["d64"]
    values = [f"{y(n, 5184, long, 0, 'last_m'):.3f} / {y(n, 5184, long, 1, 'last_m'):.3f}" for long in LONG]
    assert f"| d64 | 5,184 | {' | '.join(values)} |" in text
    assert "Along D_l LongPPL falls in 36 of 36 steps." in text
    assert "Along D_s LongPPL falls in 24 of 24 steps." in text
    assert "Along N LongPPL falls in 32 of 32 steps." in text


def test_growth_of_the_gap_is_counted(page: Path) -> None:
    text = _section(page, "Use of distant context")
    assert "The gap grows in 36 of 36 steps along D_l." in text
    assert "In the median it is 0.125 nats at D_l = 512 and 1.000 at 4,096." in text
    assert "| d32 | 1,728 | 0.125 / 0.125 | 0.250 / 0.250 | 0.500 / 0.500 | 1.000 / 1.000 |" in text


def test_noise_between_seeds_splits_into_offset_and_rest(page: Path) -> None:
    def nats(*deviations: float) -> str:  # two runs that lie as far to either side: one degree of freedom a pair
        return f"{math.sqrt(2 * statistics.fmean(deviation**2 for deviation in deviations)):.3f}"

    along = math.sqrt(2 * 4 * WOBBLE**2 / 3)  # four places leave three degrees of freedom
    wanted = [nats(SEED - WOBBLE, SEED + WOBBLE), nats(SEED), f"{along:.3f}"]
    rows = _rows(_section(page, "Noise between long seeds"))
    assert rows["all"] == ["24", *wanted]
    assert rows["d128"] == ["8", *wanted]


def test_law_is_fitted_to_everything_with_its_intervals_and_bounds(page: Path) -> None:
    text = _section(page, "The law, fitted to everything")
    assert "fitted to 48 measurements from 6 short checkpoints" in text
    rows = _rows(text)
    assert {"A", "alpha", "B_s", "beta_s", "B_l", "beta_l", "C"} < set(rows)
    assert len(rows["C"]) == 4
    assert "offset C" in text
    assert "times as much" in text


def test_forms_are_judged_on_the_largest_long_budget_and_the_largest_size(page: Path, seeded: Seeded) -> None:
    text = _section(page, "Which form predicts what it has not seen")
    by_length, by_size = text.split("**Held out: largest N**")
    assert "(4,096; 12 rows held out, 36 fitted, 3 smaller values among them)" in by_length
    assert f"({seeded.sizes['d128']:,}; 16 rows held out, 32 fitted, 2 smaller values among them)" in by_size
    assert "no exponent along it can be known" in by_size
    held = [y(n, short, 4096, seed, "last_m") for n in seeded.sizes.values() for short in SHORT for seed in (0, 1)]
    mean = statistics.fmean(
        y(n, short, long, seed, "last_m")
        for n in seeded.sizes.values()
        for short in SHORT
        for seed in (0, 1)
        for long in LONG[:-1]
    )
    off = 100 * statistics.fmean(abs(math.expm1(mean - value)) for value in held)
    bias = statistics.fmean(mean - value for value in held)
    assert _rows(by_length)["mean of y"][2:5:2] == [f"{off:.1f} %", f"{bias:+.3f}"]
    # the law made these numbers, so nothing but the seeds is left: one lies as far above it as the other below
    assert _rows(by_length)["long_context"][2] == f"{100 * (SEED + WOBBLE):.1f} %"


def test_trajectories_are_forecast_from_their_first_three_points(page: Path, seeded: Seeded) -> None:
    text = _section(page, "A trajectory forecast from its beginning")
    rows = _rows(text)
    assert "fitted to D_l up to 2,048 and judged on 4,096" in text
    assert rows["all"][0] == "12"
    assert re.search(r"A 90 % interval .* holds it in \d+ of 12 trajectories", text)
    n = seeded.sizes["d32"]
    carried = [
        abs(math.expm1(y(n, short, 2048, seed, "last_m") - y(n, short, 4096, seed, "last_m")))
        for short in SHORT
        for seed in (0, 1)
    ]
    assert rows["d32"][4] == f"{100 * statistics.fmean(carried):.1f} %"


def test_protocols_differ_by_what_was_put_between_them(page: Path, seeded: Seeded) -> None:
    text = _section(page, "The two protocols on the same cells")
    rows = _rows(text)
    assert rows["last_m(m=2, spacing=64)"][0] == "16"
    assert rows["last_m(m=2, spacing=64)"][2:4] == ["-0.080 ± 0.000", "0.080"]
    assert rows["raw"][2:4] == ["-0.030 ± 0.000", "0.030"]
    cells = [(short, long, seed) for short in SHORT for long in LONG for seed in (0, 1)]
    one, other = ([math.exp(y(seeded.sizes["d64"], *cell, rule)) for cell in cells] for rule in ("last_m", "decayed"))
    assert rows["last_m(m=2, spacing=64)"][1] == f"{concordance(one, other):.3f}"
    assert "higher than linear decay in 0 of 16 cells" in text
    assert "4 trajectories come from 2 short checkpoints of d64" in text


def test_rules_are_compared_to_the_newest_checkpoint(page: Path) -> None:
    text = _section(page, "Observation rules on the same cells")
    assert _rows(text)["last_m(m=2, spacing=64)"] == ["16", "4", "-0.050 ± 0.000", *["-0.050"] * 4]
    assert "is lower than `raw` in 16 of 16 cells; the mean difference is -0.050 ± 0.000 nats, beyond two" in text


def test_elasticity_ratio_is_that_of_the_recorded_curves(page: Path) -> None:
    rows = _rows(_section(page, "LongPPL against ShortPPL"))
    # the wobble between seeds takes the single trajectories off the five that the curves were made with, to both sides
    for long in LONG:
        defined, ratio = rows[f"{long:,}"][1], float(rows[f"{long:,}"][2].split()[0])
        assert defined == "12"
        assert ratio == pytest.approx(5, rel=0.25)
    secants = [
        statistics.median(
            (y(1, 1, before, seed, "last_m") - y(1, 1, after, seed, "last_m"))
            / (0.2 * seeding.LAW[4] * (before ** -seeding.LAW[5] - after ** -seeding.LAW[5]))
            for seed in (0, 1)
        )
        for before, after in itertools.pairwise(LONG)
    ]
    assert [rows[f"{long:,}"][3] for long in LONG] == ["-", *(f"{secant:.2f}" for secant in secants)]


def test_caveats_follow_from_the_grid_file(page: Path) -> None:
    text = _section(page, "What this does not show")
    assert "counting reference" in text
    assert "D_l = 0 is not measured" in text
    assert "copied" not in text  # this recipe has neither
    assert "convolution" not in text


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A report of two scales x one D_s x two D_l under one seed, protocol and rule."""

    url: str
    grid_id: str
    page: Path


@pytest.fixture(scope="module")
def small(migrated_database: MakeDatabase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    with migrated_database() as database_url:
        engine = create_engine(database_url, application_name="longlaw-test")
        with session_factory(engine).begin() as session:
            grid_id = str(seeding.submit_grid(session).grid_id)
            seeding.finish(session)
        with serve(create_app(engine)) as url, Client(url) as client:
            page = write_report(client, [grid_id], tmp_path_factory.mktemp("small"), name="../small report")
            yield Small(url=url, grid_id=grid_id, page=page)
        engine.dispose()


@pytest.mark.parametrize(
    ("title", "reason"),
    [
        ("Use of distant context", "did not measure key tokens under local context"),
        ("Noise between long seeds", "more than one long seed"),
        ("The law, fitted to everything", "need at least 7 distinct observations, have 4"),
        ("A trajectory forecast from its beginning", "it takes four D_l"),
        ("The two protocols on the same cells", "under both protocols"),
        ("Observation rules on the same cells", "no cell was measured under another rule"),
        ("LongPPL against ShortPPL", "at four D_l or more"),
    ],
)
def test_what_the_measurements_do_not_allow_is_left_out_with_a_sentence(small: Small, title: str, reason: str) -> None:
    section = _section(small.page, title)
    assert re.search(rf"\*Left out: .*{re.escape(reason)}", section)
    assert "|" not in section


def test_name_never_becomes_a_path(small: Small) -> None:
    assert small.page.name == "small-report.md"
    assert (small.page.parent / "images" / "small-report" / "longppl.png").exists()


def test_command_writes_the_same_page_to_the_byte(small: Small, tmp_path: Path) -> None:
    arguments = ["report", small.grid_id, "--out", str(tmp_path), "--name", "small-report", "--url", small.url]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 2
    for path in written:
        assert path.read_bytes() == (small.page.parent / path.relative_to(tmp_path)).read_bytes(), path


def test_grid_without_measurements_is_an_error_that_says_so(service: str) -> None:
    with Client(service) as client:
        grid_id = client.submit(seeding.document()).id
        with pytest.raises(NothingMeasuredError, match="longlaw grid watch"):
            gather(client, [grid_id])


def test_grid_measured_without_known_short_tokens_is_told_apart(migrated_database: MakeDatabase) -> None:
    asked = seeding_measures.looked_at()
    asked["scales"] = {seeding_measures.RELEASED: asked["scales"][seeding_measures.RELEASED]}
    with migrated_database() as database_url:
        engine = create_engine(database_url, application_name="longlaw-test")
        with session_factory(engine).begin() as session:
            grid_id = str(seeding.submit_grid(session, asked).grid_id)
            seeding.finish(session, lambda row: 2.0)
        with serve(create_app(engine)) as url, Client(url) as client:
            assert client.grid(grid_id).cells["MEASURED"] == 3
            with pytest.raises(NothingMeasuredError, match="D_s, which is unknown"):
                gather(client, [grid_id])
        engine.dispose()


def test_steps_tell_the_largest_rise_and_where(seeded: Seeded) -> None:
    with Client(seeded.url) as client:
        main = gather(client, seeded.grids[:1]).main
    chain = next(iter(main.by_trajectory().values()))
    found = steps([chain], lambda item: -item.log_longppl)
    rises = [one.log_longppl - other.log_longppl for one, other in itertools.pairwise(chain)]
    assert (found.count, found.down) == (3, 0)
    assert found.largest_rise == pytest.approx(max(rises))
    assert found.where is not None
    assert found.where[1].long_tokens == LONG[rises.index(max(rises)) + 1]
    assert noise_of(main, scale="no such scale") is None
