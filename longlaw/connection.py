"""Asking the service: refusals become errors with names, and what is going to pass is waited for, visibly.

A service that restarts, a database that is away, an answer that got lost: a call that may be repeated is repeated, with
growing pauses and never before the service's own `Retry-After`, until its patience ends. The first failure and the
recovery are said on the logger `longlaw.connection`, which without any set-up writes to standard error.
"""

from __future__ import annotations

import datetime as dt
import email.utils
import logging
import math
import os
import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import httpx

from longlaw.errors import ApiProblem, LonglawError, ProblemPlace, ServiceUnreachableError

DEFAULT_URL = "http://127.0.0.1:8000"
_PATIENCE_S = 30.0
_FIRST_PATIENCE_S = 5.0  # nobody has ever answered there: most likely there is no service
_PAUSES_S = (0.1, 0.2, 0.5, 1.0)
_LONGEST_PAUSE_S = 2.0
_AWAY = (502, 503, 504)  # what a proxy answers while the service behind it restarts
#: What asking again cannot mend: the address, or what we sent.
_LASTING = (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL)

_log = logging.getLogger(__name__)


def service_url(url: str | None = None) -> str:
    """The service's address: `url`, else LONGLAW_URL, else the default of `longlaw up`."""
    return (url or os.environ.get("LONGLAW_URL") or DEFAULT_URL).rstrip("/")


class Connection:
    """A connection to one service.

    Args:
        base_url: see `service_url`.
        timeout_s: how long a single answer may keep silent.
        patience_s: how long a call is repeated after its first failure; None takes LONGLAW_PATIENCE_S, else 30 s, and
            5 s for a service that has never answered.
        meanwhile: called whenever we wait: whoever runs the service in this process looks after it there.
    """

    def __init__(
        self,
        base_url: str | None,
        *,
        timeout_s: float,
        patience_s: float | None,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        self.base_url = service_url(base_url)
        try:
            loopback = httpx.URL(self.base_url).host in ("127.0.0.1", "localhost", "::1")
        except httpx.InvalidURL as error:
            raise ServiceUnreachableError(self.base_url, str(error)) from None
        self._http = httpx.Client(
            base_url=self.base_url, timeout=timeout_s, trust_env=not loopback
        )  # no proxy leads here
        self._patience_s = _patience() if patience_s is None else patience_s
        self._meanwhile = meanwhile
        self._has_answered = False

    def close(self) -> None:
        """Closes it."""
        self._http.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool,
        patience_s: float | None = None,
        within_s: float = math.inf,
        **request: Any,
    ) -> httpx.Response:
        """The service's answer.

        Args:
            method: of HTTP.
            path: below the service's address.
            repeatable: asking twice does what asking once does.
            patience_s: of this call, instead of the connection's.
            within_s: a bound on either.
            request: headers and body, as httpx takes them.

        Raises:
            ServiceUnreachableError: nobody answers, or nobody did for so long.
            ApiProblem: the service refuses, or did for so long what it said would pass.
        """
        failed_s: float | None = None
        for pause_s in chain(_PAUSES_S, repeat(_LONGEST_PAUSE_S)):
            try:
                response = self._ask_once(method, path, **request)
            except (ServiceUnreachableError, ApiProblem) as error:
                now_s = time.monotonic()
                error.waited_s = 0.0 if failed_s is None else now_s - failed_s
                patience_left_s = min(self._patience(patience_s), within_s) - error.waited_s
                if not (repeatable and error.may_pass) or patience_left_s <= (error.retry_after_s or 0.0):
                    raise
                if failed_s is None:
                    failed_s = now_s
                    _log.warning("%s\nTrying again for up to %.0f s.", error, patience_left_s)
                self.wait(min(max(pause_s, error.retry_after_s or 0.0), patience_left_s))
            else:
                if failed_s is not None:
                    _log.warning("The service answers again, after %.1f s.", time.monotonic() - failed_s)
                return response
        raise AssertionError  # pauses never end

    def wait(self, seconds: float) -> None:
        """Waits, and lets whoever looks after the service do so."""
        if self._meanwhile is not None:
            self._meanwhile()
        time.sleep(seconds)

    def _patience(self, given_s: float | None) -> float:
        if given_s is not None:
            return given_s
        if self._patience_s is not None:
            return self._patience_s
        return _PATIENCE_S if self._has_answered else _FIRST_PATIENCE_S

    def _ask_once(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **request)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            may_pass = not isinstance(error, _LASTING)
            raise ServiceUnreachableError(
                self.base_url, str(error) or type(error).__name__, may_pass=may_pass
            ) from None
        self._has_answered = True
        if response.is_success:
            return response
        raise _problem(response)


def foreign(response: httpx.Response) -> ApiProblem:
    """What to say of a proxy, of another program on this port, or of a Longlaw of another version."""
    return ApiProblem(
        type="about:blank",
        title="Not an answer of Longlaw",
        status=response.status_code,
        detail=f"{response.url} answered {response.status_code} {response.reason_phrase}; is this the service's "
        "address, and its version the client's?",
        retry_after_s=(_retry_after(response) or 0.0) if response.status_code in _AWAY else None,
    )


def _problem(response: httpx.Response) -> ApiProblem:
    try:
        body = response.json()
        places = tuple(
            ProblemPlace(where=item.get("pointer") or item.get("parameter") or "", message=item["message"])
            for item in body.get("errors", ())
        )
        return ApiProblem(
            type=body["type"],
            title=body["title"],
            status=body["status"],
            detail=body["detail"],
            places=places,
            retry_after_s=_retry_after(response),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return foreign(response)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds of `Retry-After`, which is a number or a date (RFC 9110, 10.2.3); None where it is neither."""
    text = response.headers.get("Retry-After", "")
    if text.isdecimal():
        return float(text)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (when - dt.datetime.now(dt.UTC)).total_seconds()) if when.tzinfo is not None else None


def _patience() -> float | None:
    text = os.environ.get("LONGLAW_PATIENCE_S")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise LonglawError(f"LONGLAW_PATIENCE_S is {text!r}: a number of seconds is wanted.") from None
