"""Errors of the command line and the Python client.

::

    LonglawError
    ├── ServiceUnreachableError   no answer from the service's URL
    ├── ApiProblem                the service refused: RFC 9457, with title, detail and places
    └── WaitTimeoutError          the grid did not end in the time given
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemPlace:
    """A single thing to mend: `where` is a JSON Pointer into the body, or the name of a parameter."""

    where: str
    message: str


class LonglawError(Exception):
    """Anything that the client cannot do and that has a name.

    Attributes:
        waited_s: how long it was tried again, in vain; 0 where it was not.
    """

    waited_s: float = 0.0

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\nIt did not pass within {self.waited_s:.1f} s." if self.waited_s else text


class ServiceUnreachableError(LonglawError):
    """Nobody answers at the service's URL.

    Attributes:
        url: where it was asked.
        may_pass: the service is away or the connection was lost: asking again may help.
        retry_after_s: None, as nobody said.
    """

    retry_after_s: float | None = None

    def __init__(self, url: str, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(
            f"No Longlaw service answers at {url} ({reason}). `longlaw up` starts one on this machine; LONGLAW_URL or "
            "--url names another."
        )
        self.url = url
        self.may_pass = may_pass


class WaitTimeoutError(LonglawError):
    """The grid did not end in the time given. Nothing was stopped."""


class ApiProblem(LonglawError):
    """The service's answer where it refuses.

    Attributes:
        type: the problem's URN, stable.
        title: what kind of problem it is, the same each time.
        status: the HTTP status.
        detail: what is wrong this time.
        places: the single places, where the service names them.
        retry_after_s: when to try again, where the service says so.
    """

    def __init__(
        self,
        *,
        type: str,
        title: str,
        status: int,
        detail: str,
        places: tuple[ProblemPlace, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        self.type, self.title, self.status, self.detail = type, title, status, detail
        self.places, self.retry_after_s = places, retry_after_s
        lines = [f"{title}: {detail}"]
        if len(places) > 1:
            lines += [f"  {place.where}: {place.message}" if place.where else f"  {place.message}" for place in places]
        super().__init__("\n".join(lines))

    @property
    def may_pass(self) -> bool:
        """Whether the service says that asking again may help."""
        return self.retry_after_s is not None
