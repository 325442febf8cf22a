"""The service from Python: `Client("http://127.0.0.1:8000").predict(n_params=1e8, short_tokens=9e9, long_tokens=5e9)`.

Results are the classes of `api.models`: frozen, typed, with the fields that the REST reference describes.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from api.models import (
    Cell,
    FitDetail,
    FitSummary,
    GridCreated,
    GridDetail,
    GridSummary,
    Observation,
    Page,
    Predictions,
    Series,
)
from api.models_measures import ProbeMetric, TrainingSeries
from longlaw.errors import ApiProblem, LonglawError, ProblemPlace, ServiceUnreachableError, WaitTimeoutError

DEFAULT_URL = "http://127.0.0.1:8000"
PAGE_SIZE = 500
_SEGMENTS = 50  # of a page of training: each may bring a thousand points
_PAUSES_S = (0.2, 0.5, 1.0, 2.0)
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")

Document = Mapping[str, Any] | str
Sizes = float | Sequence[float]
B = TypeVar("B", bound=BaseModel)
_Document = TypeAdapter(dict[str, Any])


def service_url(url: str | None = None) -> str:
    """The service's address: `url`, else LONGLAW_URL, else the default of `longlaw up`."""
    return (url or os.environ.get("LONGLAW_URL") or DEFAULT_URL).rstrip("/")


class Client:
    """A connection to one service; a context manager.

    Args:
        base_url: see `service_url`.
        timeout_s: how long a single answer may take.

    Every method raises `ServiceUnreachableError` where nobody answers and `ApiProblem` where the service refuses.
    """

    def __init__(self, base_url: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.base_url = service_url(base_url)
        try:
            loopback = httpx.URL(self.base_url).host in ("127.0.0.1", "localhost", "::1")
        except httpx.InvalidURL as error:
            raise ServiceUnreachableError(self.base_url, str(error)) from None
        self._http = httpx.Client(
            base_url=self.base_url, timeout=timeout_s, trust_env=not loopback
        )  # no proxy leads here

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()

    def plan(self, grid: Document) -> dict[str, Any]:
        """What a grid would train and cost beside what exists; nothing is stored.

        Args:
            grid: a mapping, or the text of a grid file in YAML.
        """
        return _read_document(self._ask("POST", "/v1/grids:plan", **_grid_body(grid)))

    def submit(self, grid: Document, *, idempotency_key: str | None = None) -> GridCreated:
        """Launches a grid. A lost answer is asked for again with the same key, so that one grid comes of it.

        Args:
            grid: a mapping, or the text of a grid file in YAML; corpora are named by their hashes.
            idempotency_key: a new one each time by default; give your own to make repeated calls one grid.
        """
        body = _grid_body(grid)
        body["headers"]["Idempotency-Key"] = idempotency_key or str(uuid.uuid4())
        pauses_s = iter(_PAUSES_S)
        while True:
            try:
                return _read(GridCreated, self._ask("POST", "/v1/grids", **body))
            except (ServiceUnreachableError, ApiProblem) as error:
                pause_s = next(pauses_s, None)
                if pause_s is None or not error.may_pass:
                    raise
                time.sleep(pause_s)

    def grids(self) -> Iterator[GridSummary]:
        """All grids, newest first."""
        return self._pages(Page[GridSummary], "/v1/grids", {})

    def grid(self, grid_id: str) -> GridDetail:
        """One grid: state, progress, what runs and what waits."""
        return self._get(GridDetail, f"/v1/grids/{_id(grid_id)}")

    def document(self, grid_id: str) -> dict[str, Any]:
        """The grid file as it was submitted, each number a text as it was written; plan or submit it again as it is."""
        return _read_document(self._ask("GET", f"/v1/grids/{_id(grid_id)}/document"))

    def cells(self, grid_id: str) -> Iterator[Cell]:
        """The cells of a grid with their values, in the order of its plan."""
        return self._pages(Page[Cell], f"/v1/grids/{_id(grid_id)}/cells", {})

    def training(self, grid_id: str, *, scale: str | None = None) -> Iterator[TrainingSeries]:
        """How training of a grid's segments went, those that have begun, parents first."""
        path = f"/v1/grids/{_id(grid_id)}/training"
        return self._pages(Page[TrainingSeries], path, {"scale": scale}, size=_SEGMENTS)

    def metrics(self, grid_id: str, *, metric: str | None = None, scale: str | None = None) -> Iterator[ProbeMetric]:
        """Numbers of a grid's probes, in the order of their ids."""
        return self._pages(Page[ProbeMetric], f"/v1/grids/{_id(grid_id)}/metrics", {"metric": metric, "scale": scale})

    def observations(
        self, *, series: str | None = None, grid: str | None = None, scale: str | None = None
    ) -> Iterator[Observation]:
        """The rows that laws are fitted to, in the order of their ids."""
        return self._pages(Page[Observation], "/v1/observations", {"series": series, "grid": grid, "scale": scale})

    def series(self) -> tuple[Series, ...]:
        """Everything that can be fitted."""
        return self._get(Page[Series], "/v1/series").items

    def fits(self, *, series: str | None = None, state: str | None = None) -> Iterator[FitSummary]:
        """Fits, newest first."""
        return self._pages(Page[FitSummary], "/v1/fits", {"series": series, "state": state})

    def fit(self, fit_id: str) -> FitDetail:
        """One fit with its parameters and the observations it used."""
        return self._get(FitDetail, f"/v1/fits/{_id(fit_id)}")

    def predict(
        self,
        *,
        n_params: Sizes,
        short_tokens: Sizes,
        long_tokens: Sizes,
        fit: str = "latest",
        series: str | None = None,
        holdout: str | None = None,
        level: float = 0.9,
    ) -> Predictions:
        """What a fit says at one point or many.

        Args:
            n_params: N, a number or one for each point.
            short_tokens: D_s, likewise.
            long_tokens: D_l, likewise.
            fit: the id of a fit, or `latest`.
            series: whose latest fit, where there are several series.
            holdout: the latest fit that held this selection out.
            level: nominal coverage of the intervals.
        """
        at = {"n_params": n_params, "short_tokens": short_tokens, "long_tokens": long_tokens}
        for name, sizes in {**at, "level": level}.items():
            if not all(math.isfinite(size) for size in (sizes if isinstance(sizes, Sequence) else (sizes,))):
                raise LonglawError(f"{name} is {sizes}: predictions need finite numbers")
        body: dict[str, Any] = {
            "fit": fit,
            "at": {axis: list(size) if isinstance(size, Sequence) else size for axis, size in at.items()},
            "level": level,
        }
        body |= {name: value for name, value in (("series", series), ("holdout", holdout)) if value is not None}
        return _read(Predictions, self._ask("POST", "/v1/predictions", json=body))

    def watch(self, grid_id: str, *, every_s: float = 1.0) -> Iterator[GridDetail]:
        """Yields the grid now and then until it has ended; the last one yielded is the ended one."""
        while True:
            grid = self.grid(grid_id)
            yield grid
            if grid.state in ENDED:
                return
            time.sleep(every_s)

    def wait(self, grid_id: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> GridDetail:
        """Returns the grid when it has ended.

        Raises:
            WaitTimeoutError: it has not within `timeout_s`.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (grid := self.grid(grid_id)).state not in ENDED:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise WaitTimeoutError(f"Grid {grid_id} is still {grid.state} after {timeout_s:g} s.")
            time.sleep(every_s)
        return grid

    def _get(self, model: type[B], path: str) -> B:
        return _read(model, self._ask("GET", path))

    def _pages(
        self, page: type[Page[B]], path: str, filters: Mapping[str, str | None], *, size: int | None = None
    ) -> Iterator[B]:
        cursor: str | None = None
        while True:
            asked = {**filters, "limit": str(size or PAGE_SIZE), "cursor": cursor}
            parameters = {name: value for name, value in asked.items() if value is not None}
            found = _read(page, self._ask("GET", path, params=parameters))
            yield from found.items
            cursor = found.next_cursor
            if cursor is None:
                return

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **request)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            lost = isinstance(error, (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadTimeout))
            raise ServiceUnreachableError(self.base_url, str(error) or type(error).__name__, lost=lost) from None
        if response.is_success:
            return response
        raise _problem(response)


def _problem(response: httpx.Response) -> ApiProblem:
    try:
        body = response.json()
        places = tuple(
            ProblemPlace(where=item.get("pointer") or item.get("parameter") or "", message=item["message"])
            for item in body.get("errors", ())
        )
        retry_after = response.headers.get("Retry-After")
        return ApiProblem(
            type=body["type"],
            title=body["title"],
            status=body["status"],
            detail=body["detail"],
            places=places,
            retry_after_s=float(retry_after) if retry_after is not None else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return _foreign(response)


def _read(model: type[B], response: httpx.Response) -> B:
    """The answer as a `model`.

    Raises:
        ApiProblem: somebody else answers here.
    """
    try:
        return model.model_validate_json(response.content)
    except ValidationError:
        raise _foreign(response) from None


def _read_document(response: httpx.Response) -> dict[str, Any]:
    try:
        return _Document.validate_json(response.content)
    except ValidationError:
        raise _foreign(response) from None


def _foreign(response: httpx.Response) -> ApiProblem:
    """What to say of a proxy, of another program on this port, or of a Longlaw of another version."""
    return ApiProblem(
        type="about:blank",
        title="Not an answer of Longlaw",
        status=response.status_code,
        detail=f"{response.url} answered {response.status_code} {response.reason_phrase}; is this the service's "
        "address, and its version the client's?",
    )


def _grid_body(grid: Document) -> dict[str, Any]:
    if isinstance(grid, str):
        return {"content": grid.encode(), "headers": {"Content-Type": "application/yaml"}}
    return {"json": dict(grid), "headers": {}}


def _id(text: str) -> str:
    """An id fit for a path: whatever is none names nothing, and must not lead elsewhere."""
    try:
        return str(uuid.UUID(str(text)))
    except ValueError:
        raise ApiProblem(
            type="urn:longlaw:problem:not-found", title="There is nothing here", status=404, detail=f"{text!r} is no id"
        ) from None
