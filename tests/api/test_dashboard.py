"""The dashboard in a real browser against a real service: what it shows is what the API says."""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from playwright.sync_api import BrowserContext, ConsoleMessage, Error, Page, Request, expect, sync_playwright
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker
from starlette.types import ASGIApp, Receive, Scope, Send

from api.app import create_app
from database.attempts import lose_attempts, renew
from fitting.predict import log_longppl
from tests.api import seeding, seeding_measures
from tests.api.conftest import LookedAt, Measured, serve
from tests.api.seeding_measures import DEPTHS, FOLLOW_UP, LENGTHS, RELEASED
from workers.results import TrainProgress

CHROMIUM = Path(os.environ.get("LONGLAW_TEST_CHROMIUM", "/usr/bin/chromium"))
HOSTILE = '<img src=x onerror="document.title=1"><b>bold</b>'
needs_browser = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"{CHROMIUM} is not there: install chromium, or name one in LONGLAW_TEST_CHROMIUM"
)
_ARGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*_ARGS])
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(_PATIENCE_MS)
        yield context
        browser.close()


class _Stage:
    """One address for the services of this module in turn: the browser then keeps plotly's script, compiled."""

    url: str
    app: ASGIApp

    def __init__(self) -> None:
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._open -= 1

    @contextmanager
    def plays(self, app: ASGIApp) -> Iterator[str]:
        """Serves `app`; ends when its last answer is given, since a closed page does not wait for that."""
        self.app = app
        yield self.url
        while self._open:
            time.sleep(0.01)


@pytest.fixture(scope="module")
def stage() -> Iterator[_Stage]:
    stage = _Stage()
    outer = FastAPI(openapi_url=None)
    outer.mount("/", stage)
    with serve(outer) as stage.url:
        yield stage


@pytest.fixture
def fresh(stage: _Stage, engine: Engine) -> Iterator[str]:
    """The address of a service on this test's own database."""
    with stage.plays(create_app(engine)) as url:
        yield url


@pytest.fixture
def fitted(stage: _Stage, measured: Measured) -> Iterator[str]:
    """The address of a service over the grid that was measured and fitted."""
    with stage.plays(create_app(measured.engine)) as url:
        yield url


@pytest.fixture
def probed(stage: _Stage, looked_at: LookedAt) -> Iterator[str]:
    """The address of a service over the grid that was trained and probed."""
    with stage.plays(create_app(looked_at.engine)) as url:
        yield url


@contextmanager
def _visit(browser: BrowserContext, url: str, *, expected_errors: str | None = None) -> Iterator[Page]:
    """The page at `url`. Leaving it fails where a script broke, the console has errors or a request went elsewhere."""
    trouble: list[str] = []
    elsewhere: list[str] = []
    origin = str(httpx.URL(url).copy_with(path="/", fragment=None))

    def broke(error: Error) -> None:
        trouble.append(str(error))

    def said(line: ConsoleMessage) -> None:
        if line.type in ("error", "warning"):
            trouble.append(line.text)

    def asked(sent: Request) -> None:
        if not sent.url.startswith((origin, "blob:", "data:")):
            elsewhere.append(sent.url)

    (page,) = browser.pages or [browser.new_page()]  # one window for all tests: Chromium draws its own frame in each
    page.on("pageerror", broke)
    page.on("console", said)
    page.on("request", asked)
    try:
        page.goto(url)
        yield page
        assert elsewhere == []
        assert [line for line in trouble if expected_errors is None or not re.search(expected_errors, line)] == []
    finally:
        page.remove_listener("pageerror", broke)
        page.remove_listener("console", said)
        page.remove_listener("request", asked)
        page.goto("about:blank")


def _traces(page: Page, kind: str, *, chart: str = "chart") -> list[dict[str, Any]]:
    """Traces of a chart: of the law's, `predicted`, `extrapolated`, `band`, or a role of points."""
    traces: list[dict[str, Any]] = page.evaluate(
        "([chart, kind]) => document.getElementById(chart).data.filter(item => item.meta === kind)"
        ".map(({x, y, z, name, marker, text}) => ({x, y, z, name, symbol: marker?.symbol, text}))",
        [chart, kind],
    )
    return traces


def _points(traces: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return sorted((x, y) for item in traces for x, y in zip(item["x"], item["y"], strict=True) if y is not None)


def test_page_allows_its_own_scripts_alone(reader: httpx.Client) -> None:
    answer = reader.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe-eval" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|//[a-z]", answer.text)


@pytest.mark.parametrize("name", ["", "static/dashboard.js", "static/plotly.min.js"])
def test_files_are_not_sent_twice(reader: httpx.Client, name: str) -> None:
    first = reader.get(f"/{name}")
    assert first.status_code == 200
    again = reader.get(f"/{name}", headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["cache-control"] == first.headers["cache-control"]
    assert ("max-age=604800" in first.headers["cache-control"]) == ("plotly" in name)


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "..%2f..%2fpyproject.toml", "%2e%2e"])
def test_static_serves_the_files_of_the_page_alone(reader: httpx.Client, name: str) -> None:
    """B111."""
    assert reader.get(f"/static/{name}").status_code == 404


@needs_browser
def test_chart_plots_the_numbers_of_the_api(
    browser: BrowserContext, fitted: str, reader: httpx.Client, measured: Measured
) -> None:
    asked: list[Request] = []
    with _visit(browser, fitted) as page:
        page.on("request", lambda sent: asked.append(sent) if sent.method == "POST" else None)
        expect(page.locator("#grid-list")).to_contain_text("small")
        cells = sum(reader.get(f"/v1/grids/{measured.grid_id}").json()["cells"].values())
        expect(page.locator("#tile-cells")).to_have_text(f"{cells} of {cells}")
        page.locator("#chart .main-svg").first.wait_for()
        rows = reader.get("/v1/observations", params={"series": measured.series_id, "limit": 100}).json()["items"]
        assert _points(_traces(page, "fitted")) == sorted((row["long_tokens"], row["log_longppl"]) for row in rows)

        page.select_option("#fit", "latest:long_tokens=largest")
        expect(page.locator("#legend")).to_contain_text("held out")
        fit = reader.get(f"/v1/fits/{measured.holdout_fit_id}").json()
        for role in ("fitted", "held_out"):
            expected = sorted((o["long_tokens"], o["log_longppl"]) for o in fit["observations"] if o["role"] == role)
            assert _points(_traces(page, role)) == expected
        assert all(trace["symbol"].endswith("-open") for trace in _traces(page, "held_out"))
        expect(page.locator("#fit-body")).to_contain_text(fit["explanation"][0])
        expect(page.locator("#fit-body")).to_contain_text(f"{fit['parameters'][0]['value']:.4g}"[:4])

        bodies = [json.loads(sent.post_data or "") for sent in asked]
        assert [body["fit"] for body in bodies] == [measured.fit_id, measured.holdout_fit_id]  # one for all curves
        body = bodies[-1]
        said = reader.post("/v1/predictions", json=body).json()["predictions"]
        inside = [
            (item["long_tokens"], item["log_longppl"]) for item in said if max(item["extrapolation"].values()) == 1
        ]
        assert _points(_traces(page, "predicted")) == sorted(inside)
        lines = set(_points(_traces(page, "predicted")) + _points(_traces(page, "extrapolated")))
        assert lines == {(item["long_tokens"], item["log_longppl"]) for item in said}
        ends = [(item["long_tokens"], item[end]) for item in said for end in ("low", "high") if item[end] is not None]
        assert _points(_traces(page, "band")) == sorted(ends)


@needs_browser
def test_training_and_probes_are_drawn_as_the_api_has_them(
    browser: BrowserContext, probed: str, looked_at: LookedAt
) -> None:
    path = f"{looked_at.url}/v1/grids/{looked_at.grid_id}"
    segments = httpx.get(f"{path}/training", trust_env=False).json()["items"]
    metrics = httpx.get(f"{path}/metrics", params={"limit": 1000}, trust_env=False).json()["items"]
    with _visit(browser, probed) as page:
        page.locator("#training-chart .main-svg").first.wait_for()
        for shown, name in (
            ("loss", "loss"),
            ("gradient_norm", "norm of the gradient"),
            ("tokens_per_s", "per second"),
        ):
            page.select_option("#training-value", shown)
            expect(page.locator("#training-chart")).to_have_attribute("aria-label", re.compile(name))
            expected = sorted(
                (item["tokens_before"] + point["step"] * item["tokens_per_step"], point[shown])
                for item in segments
                for point in item["points"]
            )
            assert _points(_traces(page, "line", chart="training-chart")) == expected
        joints = [x for trace in _traces(page, "joint", chart="training-chart") for x in trace["x"] if x is None]
        assert len(joints) == sum(item["parent"] is not None for item in segments)
        page.locator("#training-scales span", has_text="d64").click()
        expect(page.locator("#training-legend")).not_to_contain_text("d64")
        page.click("#training-rows summary")
        expect(page.locator("#training-table tbody")).to_contain_text("follow-up stage")

        page.locator("#heads-chart .main-svg").first.wait_for()
        expect(page.locator("#probe-legend")).to_contain_text(f"after {FOLLOW_UP}")
        label = f"{RELEASED} · D_s unknown · D_l 4.1k, after {FOLLOW_UP}"
        page.select_option("#probed", label=label)
        own = [row for row in metrics if row["scale"] == RELEASED and row["follow_up"] == FOLLOW_UP]
        expect(page.locator("#position-legend .of")).to_contain_text(FOLLOW_UP)
        at = {(row["depth"], row["length"]): row["value"] for row in own if row["metric"] == "passkey_accuracy"}
        (heat,) = _traces(page, "passkey", chart="passkey-chart")
        assert heat["z"] == [[at[depth, length] for length in LENGTHS] for depth in DEPTHS]
        (numbers,) = _traces(page, "numbers", chart="passkey-chart")
        assert numbers["text"] == [f"{100 * value:.0f} %" for value in at.values()]
        losses = [row["value"] for row in own if row["metric"] == "position_loss"]
        assert losses in [trace["y"] for trace in _traces(page, "position", chart="position-chart")]
        for kind, followed in (("long", False), ("follow-up", True)):
            rows = [row for row in metrics if (row["follow_up"] is not None) == followed]
            heads = sorted((row["long_tokens"], row["value"]) for row in rows if row["metric"] == "retrieval_heads")
            assert _points(_traces(page, kind, chart="heads-chart")) == heads
            needles = [row for row in rows if row["metric"] == "needle_nll" and row["length"] == LENGTHS[-1]]
            drawn = _points(_traces(page, kind, chart="needle-chart"))
            assert [number for point in drawn for number in point] == pytest.approx(_pooled(needles))
        page.click("#probe-rows summary")
        expect(page.locator("#probe-table tbody tr")).to_have_count(len(own))


def _pooled(rows: list[dict[str, Any]]) -> list[float]:
    """D_l and the mean over all tokens, of each evaluation in turn."""
    evaluations: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        evaluations.setdefault(row["evaluation_id"], []).append(row)
    points = sorted(
        (own[0]["long_tokens"], sum(row["value"] * row["count"] for row in own) / sum(row["count"] for row in own))
        for own in evaluations.values()
    )
    return [number for point in points for number in point]


@needs_browser
def test_imported_results_are_a_law_without_any_grid(
    browser: BrowserContext, fresh: str, sessions: sessionmaker[Session]
) -> None:
    sizes = [(n, s * n, ell * n) for n in (31_000_000, 66_000_000) for s in (90, 180, 270) for ell in (10, 20, 40)]
    rows: list[dict[str, Any]] = [
        {
            "n_params": n,
            "short_tokens": short,
            "long_tokens": long,
            "log_longppl": float(log_longppl(seeding.LAW, n, short, long)) + 1e-3 * math.sin(n + long),
        }
        for n, short, long in sizes
    ]
    rows.append(rows[0] | {"short_tokens": None})
    series = {"name": HOSTILE, "protocol": "cosine"}
    with _visit(browser, fresh) as page, httpx.Client(base_url=fresh, trust_env=False) as http:
        expect(page.locator("#no-series")).to_contain_text("longlaw import TABLE")
        answer = http.post("/v1/observations:import", json={"series": series, "observations": rows})
        assert answer.json()["inserted"] == len(rows), answer.text
        with sessions.begin() as session:
            (fit_id,) = seeding.fit_all(session)
        _look_again(page)
        expect(page.locator("#series")).to_contain_text(f"{HOSTILE}: cosine, raw (imported) (19 points)")
        expect(page.locator("#no-grids")).to_be_visible()
        expect(page.locator("#legend")).to_contain_text("law, extrapolated")
        known = [row for row in rows if row["short_tokens"] is not None]
        assert _points(_traces(page, "fitted")) == sorted((row["long_tokens"], row["log_longppl"]) for row in known)
        assert len(_points(_traces(page, "excluded"))) == 1
        assert len(_traces(page, "predicted")) == 6, "a curve for each N and D_s"
        expect(page.locator("#n-chips")).to_contain_text("N=31000000")
        page.fill("#at-n_params", "1e8")
        page.fill("#at-short_tokens", "90N")
        page.fill("#at-long_tokens", "5e9")
        page.click("#predict button")
        at = {"n_params": 1e8, "short_tokens": 9e9, "long_tokens": 5e9}
        (said,) = http.post("/v1/predictions", json={"fit": str(fit_id), "at": at}).json()["predictions"]
        expect(page.locator("#answer-log")).to_have_attribute("data-value", str(said["log_longppl"]))


@needs_browser
def test_form_answers_as_the_api_does(
    browser: BrowserContext, fitted: str, reader: httpx.Client, measured: Measured
) -> None:
    with _visit(browser, f"{fitted}/#fit={measured.fit_id}", expected_errors="422") as page:
        expect(page.locator("#at-n_params")).not_to_have_value("")  # the fit is there
        page.fill("#at-n_params", "1e5")
        page.fill("#at-short_tokens", "0.5N")
        page.fill("#at-long_tokens", "1_000")
        page.click("#predict button")
        at = {"n_params": 1e5, "short_tokens": 5e4, "long_tokens": 1000}
        (said,) = reader.post("/v1/predictions", json={"fit": measured.fit_id, "at": at}).json()["predictions"]
        expect(page.locator("#answer-log")).to_have_attribute("data-value", str(said["log_longppl"]))
        expect(page.locator("#answer-log")).to_have_text(f"{said['log_longppl']:.4f}")
        expect(page.locator("#answer")).to_contain_text("above the fitted range")
        expect(page.locator("#answer")).to_contain_text("inside the fitted range")

        page.fill("#at-long_tokens", "0")
        page.press("#at-long_tokens", "Enter")
        expect(page.locator("#at-long_tokens-note")).to_have_text("Input should be greater than 0")
        expect(page.locator("#at-long_tokens")).to_have_attribute("aria-invalid", "true")
        expect(page.locator("#at-long_tokens")).to_be_focused()
        page.fill("#at-long_tokens", "ten")
        expect(page.locator("#at-long_tokens-note")).to_contain_text("is not a number")


@needs_browser
def test_sizes_are_read_as_people_write_them(browser: BrowserContext, fresh: str) -> None:
    written = {"1e9": 1e9, "1_000_000": 1e6, "1,000,000.5": 1000000.5, " 3.5M": 3.5e6, "2b": 2e9, "90N": 9000, "-1": -1}
    wrong = ("", "1,5", "e9", "1__0", "0x10", "NaN", "1e999", "9 0N x")
    with _visit(browser, fresh) as page:
        read = page.evaluate(
            "async texts => { const { readSize } = await import('/static/predict.js');"
            " return texts.map(text => readSize(text, 100).value ?? null); }",
            [*written, *wrong],
        )
    assert read == [*written.values(), *(None for _ in wrong)]


@needs_browser
def test_state_and_progress_follow_without_reload(
    browser: BrowserContext, fresh: str, sessions: sessionmaker[Session]
) -> None:
    """B126: nothing has to be reloaded, and a bar never goes back nor beyond its end."""
    with _visit(browser, fresh, expected_errors="ERR_INTERNET_DISCONNECTED") as page:
        expect(page.locator("#no-grids")).to_contain_text("longlaw grid submit FILE")
        expect(page.locator("#no-series")).to_be_visible()
        with sessions.begin() as session:
            seeding.submit_grid(session, seeding.document(short_tokens=[64 * 64]))
            claimed = seeding.next_segment(session)
            assert claimed is not None
        _look_again(page)
        expect(page.locator("#grid-state")).to_have_text("running")
        expect(page.locator("#waiting")).to_contain_text("no free worker")
        row = page.locator(f'#scale-rows tr[data-key="{claimed.scale}"]')
        total = 64 * 64 + 1024
        for step in (16, 32):
            with sessions.begin() as session:
                report = TrainProgress(
                    step=step, stage_tokens=64 * step, loss=3.25, learning_rate=0.1, tokens_per_s=99.0
                )
                assert renew(session, claimed.token, lease_s=60, progress=report)
            expect(row.locator(".done")).to_have_text(f"{64 * step:,}")
        expect(row.locator(".share")).to_have_text(f"{100 * 64 * 32 / total:.1f} %")
        expect(page.locator("#attempts")).to_contain_text("3.250")
        expect(page.locator("#tile-rate")).to_have_text("99")
        expect(page.locator("#training-legend")).to_contain_text("training now")
        (live,) = _traces(page, "live", chart="training-chart")
        assert (live["x"][-1] % 64, live["y"][-1], live["name"]) == (0, 3.25, claimed.scale)

        page.context.set_offline(True)
        expect(page.locator("#outage")).to_contain_text("does not answer")
        page.context.set_offline(False)
        expect(page.locator("#outage")).to_be_hidden()

        with sessions.begin() as session:
            assert lose_attempts(session, scheduler_id=uuid.UUID(int=1), held=()) == 1
        expect(page.locator("#attempts")).to_be_hidden()
        (grid,) = httpx.get(f"{fresh}/v1/grids", trust_env=False).json()["items"]
        assert httpx.get(f"{fresh}/v1/grids/{grid['id']}", trust_env=False).json()["tokens_done"] == 0
        expect(row.locator(".done")).to_have_text(f"{64 * 32:,}")

        with sessions.begin() as session:
            seeding.finish(session)
        expect(page.locator("#grid-state")).to_have_text("succeeded")
        expect(row.locator(".share")).to_have_text("100.0 %")
        expect(page.locator("#tile-cells")).to_have_text("4 of 4")
        expect(page.locator("#law-note")).to_contain_text("No fit yet")
        page.locator("#chart .main-svg").first.wait_for()
        assert len(_points(_traces(page, "measured"))) == 4


@needs_browser
def test_grid_obeys_its_buttons_behind_a_dialog_that_says_what_they_do(
    browser: BrowserContext, fresh: str, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        larger = str(seeding.submit_grid(session).grid_id)
    with sessions.begin() as session:  # later: the list has the newest first
        smaller = str(seeding.submit_grid(session, seeding.document(name="smaller", long_tokens=[512])).grid_id)
        assert seeding.next_segment(session) is not None
    with _visit(browser, f"{fresh}/#grid={larger}", expected_errors="409") as page:
        state, effects = page.locator("#grid-state"), page.locator("#verb-effects")

        def allowed() -> list[str]:
            return page.locator(".verbs button:enabled:visible").all_inner_texts()

        expect(state).to_have_text("running")
        assert allowed() == ["Pause", "Cancel"]
        page.click("#verb-pause")
        expect(effects).to_contain_text(
            "waits0 segments, 2 evaluationsgoes on for other grids6 segments, 2 evaluations"
        )
        expect(page.locator("#verb-no")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#verb-dialog")).to_be_hidden()
        expect(state).to_have_text("running")

        page.click("#verb-pause")
        page.click("#verb-yes")
        expect(state).to_have_text("paused")
        expect(page.locator("#tile-eta-note")).to_have_text("paused")
        assert allowed() == ["Resume", "Cancel"]
        page.click("#verb-resume")
        expect(page.locator("#verb-yes")).to_be_enabled()
        assert httpx.post(f"{fresh}/v1/grids/{larger}:cancel", trust_env=False).status_code == 200  # somebody else
        page.click("#verb-yes")
        expect(page.locator("#verb-error")).to_contain_text("The grid is CANCELLED")
        page.click("#verb-no")
        expect(state).to_have_text("cancelled")
        assert allowed() == []

        page.click("#grid-list li:first-child button")
        expect(page.locator("#grid-name")).to_have_text("smaller")
        page.click("#verb-cancel")
        expect(effects).to_contain_text("stops6 segments, 2 evaluationsruns now1 attempt")
        expect(effects).to_contain_text(f"is saved{2 * (27 * 64 + 512):,} tokens of training")
        page.click("#verb-yes")
        expect(state).to_have_text("cancelled")
        expect(page.locator("#tile-cells-rest")).to_have_text("2 cancelled")
    assert httpx.get(f"{fresh}/v1/grids/{smaller}", trust_env=False).json()["state"] == "CANCELLED"


@needs_browser
def test_hidden_page_asks_for_nothing(browser: BrowserContext, fresh: str) -> None:
    with _visit(browser, fresh) as page:
        expect(page.locator("#connection")).to_contain_text("Live")
        asked: list[str] = []
        page.on("request", lambda sent: asked.append(sent.url))
        page.evaluate("Object.defineProperty(document, 'hidden', { get: () => window.away, configurable: true })")
        page.evaluate("window.away = true; document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.locator("#connection")).to_contain_text("Paused")
        _look_again(page)
        assert asked == []
        page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.locator("#connection")).to_contain_text("Live")
        assert asked != []


@needs_browser
def test_names_are_text_and_counts_are_exact(
    browser: BrowserContext, fresh: str, sessions: sessionmaker[Session]
) -> None:
    """B109: 2^53 + 1 is shown as it is. Names that hold HTML show it."""
    with sessions.begin() as session:
        scales = {HOSTILE: {"layers": 1, "width": 32, "heads": 2, "ffn_width": 64}}
        seeding.submit_grid(session, seeding.document(name=HOSTILE, scales=scales))
        seeding.finish(session, health=seeding_measures.health, probes=seeding_measures.probes)
        session.execute(text("UPDATE grids SET tokens_train = 9007199254740993"))
    with _visit(browser, fresh) as page:
        expect(page.locator("#grid-name")).to_have_text(HOSTILE)
        expect(page.locator("#grid-list .name")).to_have_text(HOSTILE)
        expect(page.locator("#scale-rows th")).to_have_text(HOSTILE)
        expect(page.locator("#grid-facts")).to_contain_text("9,007,199,254,740,993 tokens to train")
        expect(page.locator("#n-chips")).to_contain_text(HOSTILE)
        expect(page.locator("#chart")).to_contain_text(HOSTILE)
        for place in ("training-grid", "training-legend", "probes-grid", "probe-legend"):
            expect(page.locator(f"#{place}")).to_contain_text(HOSTILE)
        expect(page.locator("#probed option").first).to_contain_text(HOSTILE)
        page.click("#rows summary")
        expect(page.locator("#rows-table tbody th").first).to_have_text(HOSTILE)
        assert page.locator("#main img, #main b:text-is('bold')").count() == 0
        assert page.title() == "Longlaw"


@needs_browser
def test_any_number_of_points_can_be_looked_at(
    browser: BrowserContext, fresh: str, sessions: sessionmaker[Session]
) -> None:
    """B122: totals are right, and choosing its N finds the last point. The API hands out 1,000 rows at a time."""
    counts = (1000, 1001, 10_000)
    with sessions.begin() as session:
        session.execute(text("INSERT INTO evaluators (id, spec) VALUES ('e', '{}')"))
        for count in counts:
            session.execute(_MANY_SERIES, {"series": f"of-{count}"})
            session.execute(_MANY_OBSERVATIONS, {"series": f"of-{count}", "last": count - 1})
    with _visit(browser, fresh) as page:
        for count in counts:
            expect(page.locator("#series")).to_contain_text(f"of-{count} ({count:,} points)")
        for count in counts[1:]:
            page.select_option("#series", f"of-{count}")
            chips = page.locator("#n-chips input")
            expect(chips).to_have_count(-(-count // 100))
            for _ in range(chips.and_(page.locator(":checked")).count() - 1):
                chips.and_(page.locator(":checked")).first.uncheck(force=True)
            here = (count - 1) % 100 + 1
            expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile(f", {here} points in 1 panel"))
            *_, (last_x, last_y) = _points(_traces(page, "measured"))
            assert last_x == 99 + here
            assert last_y == pytest.approx(1 + (count - 1) * 1e-5)


@needs_browser
def test_observations_without_short_tokens_are_shown_as_unknown(
    browser: BrowserContext, fresh: str, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        session.execute(text("INSERT INTO evaluators (id, spec) VALUES ('e', '{}')"))
        session.execute(_MANY_SERIES, {"series": "released"})
        session.execute(_MANY_OBSERVATIONS, {"series": "released", "last": 9})
        session.execute(
            text(
                "INSERT INTO observations (series_id, evaluation_key, scale, n_params, long_tokens, short_seed,"
                " long_seed, cluster, y, source)"
                " VALUES ('released', 'r', 'released', 1000, 500, 0, 0, 'model', 1.5, 'run')"
            )
        )
    with _visit(browser, fresh) as page:
        page.select_option("#series", "released")
        expect(page.locator("#short-chips")).to_contain_text("unknown")
        expect(page.locator("#chart")).to_have_attribute("aria-label", re.compile(", 11 points"))
        page.click("#rows summary")
        expect(page.locator("#rows-table tbody")).to_contain_text("released1,000unknown500")


_MANY_SERIES = text(
    "INSERT INTO series (id, label, family, protocol, rule, evaluator_id, metric)"
    " VALUES (:series, :series, 'f', 'constant', 'raw', 'e', 'log_longppl')"
)
#: 100 lengths for each size, and a value of its own for each point.
_MANY_OBSERVATIONS = text(
    "INSERT INTO observations (series_id, evaluation_key, scale, n_params, short_tokens, long_tokens, short_seed,"
    " long_seed, cluster, y, source) SELECT :series, i, 'x' || i / 100, 1000 * (1 + i / 100), 5000, 100 + i % 100, 0,"
    " 0, i, 1 + i * 1e-5, 'imported' FROM generate_series(0, :last) AS i"
)


def _look_again(page: Page) -> None:
    """Asks for news at once instead of at the next turn of an idle page."""
    page.evaluate("window.dispatchEvent(new Event('online'))")
