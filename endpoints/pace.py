"""At which pace an endpoint gets requests: a rate, a cap, one at a time, or single probes while it only fails. Pure.

An endpoint that only fails has an **open circuit**: after FAILURES_TO_OPEN failures in a row what is due for it waits,
and single requests probe it, after 1 s, 2 s, 4 s and so on, until one arrives. Nothing waits for longer than the
contract allows (`Contract.patience`); under one that allows no wait no circuit opens. After the first arrival the
number of requests at one time doubles every half second, so that a receiver that has just come back is not run over.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple, Self

FAILURES_TO_OPEN = 10
RAMP_SECONDS = 4.0  # until an endpoint that has recovered gets as much at one time as others (128)
PROBE_SECONDS = 20.0  # after which a probe of which nothing was heard is made again; longer than any deadline
BURST_SECONDS = 0.05  # of requests that a rate allows at once, so that a pump need not wake for each


@dataclass(frozen=True, slots=True)
class Pace:
    """What an endpoint may get (`Endpoint`'s fields of the same names), and how it does."""

    rate_limit: float | None = None
    max_in_flight: int | None = None
    ordered: bool = False
    patience: float = 0.0
    next_slot_at: datetime | None = None
    failures_in_a_row: int = 0
    failing_since: datetime | None = None
    probe_at: datetime | None = None
    probes: int = 0
    recovered_at: datetime | None = None

    def after_results(self, now: datetime, *, arrived: bool, failed: int) -> Self:
        """After requests of which one has arrived, or none and so many have failed."""
        if arrived:
            was_open = self.probe_at is not None
            return replace(
                self,
                failures_in_a_row=0,
                failing_since=None,
                probe_at=None,
                probes=0,
                recovered_at=now if was_open else self.recovered_at,
            )
        failures, since = self.failures_in_a_row + failed, self.failing_since or now
        found = replace(self, failures_in_a_row=failures, failing_since=since)
        if not self.patience or not (self.recovered_at or self.probe_at or failures >= FAILURES_TO_OPEN):
            return found
        probes = self.probes + 1
        wait = min(2.0 ** min(probes - 1, 30), self.patience)
        return replace(found, probes=min(probes, 1_000), probe_at=now + timedelta(seconds=wait), recovered_at=None)

    def after_claim(self, now: datetime, count: int) -> Self:
        """After so many requests were taken up."""
        found = self
        if self.recovered_at and (now - self.recovered_at).total_seconds() >= RAMP_SECONDS:
            found = replace(found, recovered_at=None)
        if self.probe_at and count and self.probe_at <= now:
            found = replace(found, probe_at=now + timedelta(seconds=PROBE_SECONDS))
        if self.rate_limit and count:
            found = replace(found, next_slot_at=self._slots_from(now) + timedelta(seconds=count / self.rate_limit))
        return found

    def allowance(self, now: datetime, *, free: int, in_flight: int) -> "Allowance":
        """What may be taken up now, of `free` places; `in_flight` are its requests in all workers."""
        count, again = free, 1.0
        if self.ordered:
            count = min(count, 1)
        if self.max_in_flight is not None:
            count = min(count, self.max_in_flight - in_flight)
        if self.rate_limit:
            start = self._slots_from(now)
            again = min(again, max(1 / self.rate_limit, BURST_SECONDS))
            if start > now:
                return Allowance(0, 0.0, (start - now).total_seconds())
            count = min(count, int((now - start).total_seconds() * self.rate_limit) + 1)
        if self.probe_at:
            if self.probe_at <= now:
                return Allowance(min(count, 1), 0.0, again)
            return Allowance(max(count, 0), self.patience, min(again, (self.probe_at - now).total_seconds()))
        if self.recovered_at:
            since = (now - self.recovered_at).total_seconds()
            if since < RAMP_SECONDS:
                count, again = min(count, 2 ** int(2 * max(since, 0.0)) - in_flight), 0.1
        return Allowance(max(count, 0), 0.0, again)

    def _slots_from(self, now: datetime) -> datetime:
        """The first slot of its rate that is still to be had."""
        earliest = now - timedelta(seconds=BURST_SECONDS)
        return max(self.next_slot_at, earliest) if self.next_slot_at else now


class Allowance(NamedTuple):
    """How many requests may be taken up, of those overdue by so many seconds, and when to ask again (seconds)."""

    requests: int
    overdue: float
    again: float
