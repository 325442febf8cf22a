"""The service from Python: `Client("http://127.0.0.1:8000").predict(n_params=1e8, short_tokens=9e9, long_tokens=5e9)`.

Results are the classes of `api.models`: frozen, typed, with the fields that the REST reference describes.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_json

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
    Verb,
)
from api.models_imports import ObservationsImported
from api.models_measures import ProbeMetric, TrainingSeries
from api.models_verbs import GridAnswer
from longlaw.connection import Connection, foreign
from longlaw.errors import ApiProblem, LonglawError, WaitTimeoutError
from longlaw.import_rows import Columns, rows_of

if TYPE_CHECKING:
    import numpy
    import pandas
    from numpy.typing import NDArray

PAGE_SIZE = 500
_SEGMENTS = 50  # of a page of training: each may bring a thousand points
#: How long a service may be away while somebody follows a grid: an upgrade with its migrations fits in.
WATCH_PATIENCE_S = 600.0
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")

Document = Mapping[str, Any] | str
Sizes: TypeAlias = "float | Sequence[float] | NDArray[numpy.number]"
B = TypeVar("B", bound=BaseModel)
_Document = TypeAdapter(dict[str, Any])


class Client:
    """A connection to one service; a context manager.

    Args:
        base_url: see `longlaw.connection.service_url`.
        timeout_s: how long a single answer may keep silent.
        patience_s: how long a call is repeated while the service is away or says that it will be back; None takes
            LONGLAW_PATIENCE_S, else 30 s, and 5 s for a service that has never answered.
        meanwhile: called whenever the client waits.

    Every method raises `ServiceUnreachableError` where nobody answers and `ApiProblem` where the service refuses; both
    say how long was waited before. Every method may be repeated, and is: a grid that is submitted carries a key.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        timeout_s: float = 60.0,
        patience_s: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._connection = Connection(base_url, timeout_s=timeout_s, patience_s=patience_s, meanwhile=meanwhile)
        self.base_url = self._connection.base_url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def plan(self, grid: Document) -> dict[str, Any]:
        """What a grid would train and cost beside what exists; nothing is stored.

        Args:
            grid: a mapping, or the text of a grid file in YAML.
        """
        return _read_document(self._ask("POST", "/v1/grids:plan", repeatable=True, **_grid_body(grid)))

    def submit(self, grid: Document, *, idempotency_key: str | None = None) -> GridCreated:
        """Launches a grid. A lost answer is asked for again with the same key, so that one grid comes of it.

        Args:
            grid: a mapping, or the text of a grid file in YAML; corpora are named by their hashes.
            idempotency_key: a new one each time by default; give your own to make repeated calls one grid.
        """
        body = _grid_body(grid)
        body["headers"]["Idempotency-Key"] = idempotency_key or str(uuid.uuid4())
        return _read(GridCreated, self._ask("POST", "/v1/grids", **body))

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

    def cancel(self, grid_id: str, *, preview: bool = False) -> GridAnswer:
        """Stops a grid for good; what is measured, and what other grids ask for, stays.

        Args:
            grid_id: the grid's.
            preview: only say what it would stop.
        """
        return self._tell(grid_id, "cancel", preview=preview)

    def pause(self, grid_id: str) -> GridAnswer:
        """Lets nothing begin for a grid; training ends at its next checkpoint."""
        return self._tell(grid_id, "pause")

    def resume(self, grid_id: str) -> GridAnswer:
        """Lets a paused grid go on."""
        return self._tell(grid_id, "resume")

    def retry_failed(self, grid_id: str) -> GridAnswer:
        """Opens again what failed of a grid, with new retry budgets."""
        return self._tell(grid_id, "retry-failed")

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

    def import_observations(
        self,
        observations: Columns,
        *,
        series: str,
        protocol: str,
        rule: str = "raw",
        metric: str = "log_longppl",
        evaluator: str | None = None,
        family: str | None = None,
        idempotency_key: str | None = None,
    ) -> ObservationsImported:
        """Brings results of another trainer to the service, all of them or none; it fits the law to them.

        Args:
            observations: lists, arrays or a pandas table with the columns `n_params`, `short_tokens`, `long_tokens`,
                `log_longppl` or `longppl`, and where known `log_longppl_se`, `scale`, `short_seed`, `long_seed`,
                `cluster`; None and NaN are missing values.
            series: what the results are called; with what follows it says which rows one fit may pool.
            protocol: schedule of the long stage: `constant`, `linear_decay`, or another word.
            rule: how checkpoints became the models that were measured.
            metric: what `log_longppl` is: `log_longppl`, `log_shortppl` or `log_ppl`.
            evaluator: a name for how it was measured; the series' by default.
            family: a name for the recipe; the series' by default.
            idempotency_key: a new one each time by default. Rows that are there already are found again in any case.
        """
        names = {"name": series, "protocol": protocol, "rule": rule, "metric": metric}
        names |= {name: value for name, value in (("evaluator", evaluator), ("family", family)) if value is not None}
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        body = _written({"series": names, "observations": rows_of(observations)})
        answer = self._ask("POST", "/v1/observations:import", content=body, headers=headers)
        return _read(ObservationsImported, answer)

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
        body = _points(n_params, short_tokens, long_tokens, fit=fit, series=series, holdout=holdout, level=level)
        return _read(Predictions, self._ask("POST", "/v1/predictions", repeatable=True, **body))

    def predict_frame(
        self,
        *,
        n_params: Sizes,
        short_tokens: Sizes,
        long_tokens: Sizes,
        fit: str = "latest",
        series: str | None = None,
        holdout: str | None = None,
        level: float = 0.9,
    ) -> pandas.DataFrame:
        """What a fit says at many points, up to a million, as a table with a row for each.

        Its columns are those of the CSV that docs/rest.md describes, NaN where a number is withheld; `attrs` has the
        `fit_id`. Arguments are those of `predict`.
        """
        from pyarrow import BufferReader, csv  # heavy, as pandas is

        body = _points(n_params, short_tokens, long_tokens, fit=fit, series=series, holdout=holdout, level=level)
        body["headers"]["Accept"] = "text/csv"
        answer = self._ask("POST", "/v1/predictions", repeatable=True, **body)
        try:
            names = answer.content.partition(b"\r\n")[0].decode().split(",")
            types = dict.fromkeys(names, "float64") | {"determined": "bool", "warnings": "string"}
            numbers = csv.ConvertOptions(column_types=types, strings_can_be_null=False)
            frame: pandas.DataFrame = csv.read_csv(BufferReader(answer.content), convert_options=numbers).to_pandas()
            frame.attrs["fit_id"] = answer.links["describedby"]["url"].rpartition("/")[2]
        except (ValueError, KeyError):
            raise foreign(answer) from None
        return frame

    def watch(
        self, grid_id: str, *, every_s: float = 1.0, patience_s: float = WATCH_PATIENCE_S
    ) -> Iterator[GridDetail]:
        """Yields the grid now and then until it has ended; the last one yielded is the ended one.

        Args:
            grid_id: the grid.
            every_s: pause between looks.
            patience_s: how long the service may be away between two looks.
        """
        grid = self.grid(grid_id)
        while True:
            yield grid
            if grid.state in ENDED:
                return
            self._connection.wait(every_s)
            grid = self._grid(grid_id, patience_s=patience_s)

    def wait(
        self,
        grid_id: str,
        *,
        timeout_s: float | None = None,
        every_s: float = 1.0,
        patience_s: float = WATCH_PATIENCE_S,
    ) -> GridDetail:
        """Returns the grid when it has ended.

        Args:
            grid_id: the grid.
            timeout_s: how long to wait in all; None waits for as long as it takes.
            every_s: pause between looks.
            patience_s: how long the service may be away between two looks.

        Raises:
            WaitTimeoutError: it has not within `timeout_s`.
        """
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        grid = self._grid(grid_id, within_s=deadline_s - time.monotonic())
        while grid.state not in ENDED:
            if (left_s := deadline_s - time.monotonic()) < 0:
                raise WaitTimeoutError(f"Grid {grid_id} is still {grid.state} after {timeout_s:g} s.")
            self._connection.wait(min(every_s, left_s))
            grid = self._grid(grid_id, patience_s=patience_s, within_s=deadline_s - time.monotonic())
        return grid

    def _grid(self, grid_id: str, *, patience_s: float | None = None, within_s: float = math.inf) -> GridDetail:
        path = f"/v1/grids/{_id(grid_id)}"
        return _read(GridDetail, self._ask("GET", path, patience_s=patience_s, within_s=within_s))

    def _tell(self, grid_id: str, verb: Verb, *, preview: bool = False) -> GridAnswer:
        query = {"preview": "true"} if preview else {}
        path = f"/v1/grids/{_id(grid_id)}:{verb}"
        return _read(GridAnswer, self._ask("POST", path, params=query, repeatable=True))

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

    def _ask(self, method: str, path: str, *, repeatable: bool = False, **request: Any) -> httpx.Response:
        """One answer; what reads, what carries a key, and what is said to be `repeatable` is asked again if need be."""
        repeatable = repeatable or method == "GET" or "Idempotency-Key" in request.get("headers", ())
        return self._connection.ask(method, path, repeatable=repeatable, **request)


def _read(model: type[B], response: httpx.Response) -> B:
    """The answer as a `model`.

    Raises:
        ApiProblem: somebody else answers here.
    """
    try:
        return model.model_validate_json(response.content)
    except ValidationError:
        raise foreign(response) from None


def _read_document(response: httpx.Response) -> dict[str, Any]:
    try:
        return _Document.validate_json(response.content)
    except ValidationError:
        raise foreign(response) from None


def _grid_body(grid: Document) -> dict[str, Any]:
    if isinstance(grid, str):
        return {"content": grid.encode(), "headers": {"Content-Type": "application/yaml"}}
    return {"json": dict(grid), "headers": {}}


def _points(n_params: Sizes, short_tokens: Sizes, long_tokens: Sizes, **asked: Any) -> dict[str, Any]:
    """The body of a request for predictions, with its headers.

    Raises:
        LonglawError: a size, or the level, is no finite number, or a list of sizes is no list of numbers.
    """
    import numpy as np  # not needed by the commands that follow grids

    at = {"n_params": n_params, "short_tokens": short_tokens, "long_tokens": long_tokens}
    columns = {name: np.asarray(sizes) for name, sizes in {**at, "level": asked["level"]}.items()}
    for name, column in columns.items():
        if column.dtype.kind not in "iuf" or column.ndim > 1:
            raise LonglawError(f"{name} must be a number or a flat list of numbers")
        wrong = column[~np.isfinite(column)]
        if wrong.size:
            raise LonglawError(f"{name} is {wrong.flat[0]}: predictions need finite numbers")
    body = {name: value for name, value in asked.items() if value is not None}
    body["at"] = {name: columns[name].astype(np.float64).tolist() for name in at}
    return {"content": _written(body), "headers": {"Content-Type": "application/json"}}


def _written(body: dict[str, Any]) -> bytes:
    """The body as JSON.

    Raises:
        LonglawError: a text in it is none, such as an argument of the command line that is not UTF-8.
    """
    try:
        return to_json(body)
    except ValueError as error:
        raise LonglawError(f"this cannot be sent: {error}") from None


def _id(text: str) -> str:
    """An id fit for a path: whatever is none names nothing, and must not lead elsewhere."""
    try:
        return str(uuid.UUID(str(text)))
    except ValueError:
        raise ApiProblem(
            type="urn:longlaw:problem:not-found", title="There is nothing here", status=404, detail=f"{text!r} is no id"
        ) from None
