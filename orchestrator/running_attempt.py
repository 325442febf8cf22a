"""An attempt as the executor sees it: the workers that are at it, how each ended, and what that makes of the whole."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from orchestrator.reports import Failed, Lost, Report, Stopped
from workers.probe_spec import ProbeRun
from workers.spec import EvaluationRun, SegmentRun


@dataclass(slots=True, kw_only=True, eq=False)
class RunningAttempt:
    """One attempt on `workers`; the first of them leads.

    It is over when all of them have ended, and so has one end. Where one process fails or dies, the others fail for
    want of it a moment later: the end is what says most about the reason, whoever was heard first.
    """

    token: uuid.UUID
    run: SegmentRun | EvaluationRun | ProbeRun
    workers: tuple[str, ...]
    stopping: bool = False
    at_work: set[str] = field(init=False)
    _told: Report | None = None

    def __post_init__(self) -> None:
        self.at_work = set(self.workers)

    @property
    def leader(self) -> str:
        return self.workers[0]

    @property
    def over(self) -> bool:
        return not self.at_work

    @property
    def ending(self) -> bool:
        """Whether its end is known, so that workers still at it have nothing left to work for."""
        return self._told is not None

    def ended(self, worker: str, report: Report | None) -> None:
        """Notes that a worker is at it no more, with its last word; None where it was made to end."""
        self.at_work.discard(worker)
        counts = worker == self.leader or isinstance(report, Failed | Lost)  # a follower's success is not the whole's
        if report is not None and counts and (self._told is None or _weight(report) > _weight(self._told)):
            self._told = report

    def end(self) -> Report:
        """The end of the whole; what broke while it was to stop has stopped."""
        if self._told is None or (self.stopping and (isinstance(self._told, Lost) or _weight(self._told) == 0)):
            return Stopped(token=self.token)
        return self._told


def _weight(report: Report) -> int:
    """What a last word says about the reason of an end: more, the higher."""
    match report:
        case Failed(error="ProcessLostError"):
            return 0  # another one is gone: that one's end tells why
        case Failed():
            return 1
        case Lost():
            return 2  # above an exception, which the loss may have caused: nobody's recipe is to blame
        case _:
            return 3  # the leader's word that it is done, or has stopped
