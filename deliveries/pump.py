"""The pump: claim what is due, send it, record what came of it. No HTTP and no SQL of its own, and one thread.

It sleeps on one epoll that holds its transfers' sockets and the wake-up's. Work is found in the database alone: by a
wake-up at once, without one by polling.
"""

import functools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection

from deliveries.claiming import Busy, Claimer, make_claimers
from deliveries.messages import Message, compose
from deliveries.models import Delivery
from deliveries.querysets import Claimed, Result
from deliveries.results import judge, park, reclaim_lost, record_results
from deliveries.transport import Outcome, Request, Transport
from deliveries.wake import Listener
from endpoints.addresses import Blocked, Target
from endpoints.contracts import STANDARD, Contract
from endpoints.models import Endpoint
from endpoints.services import contract_of, signing_keys
from endpoints.signing import Key
from webhookhub.database import PUMP_NAME, name_session, settle_planner
from webhookhub.ids import uuid7
from webhookhub.limits import relieve_collector

logger = logging.getLogger(__name__)

NOT_SENT = ("accept:", "expect:")  # what libcurl would add by itself

POLL_SECONDS = 0.25  # how late work without a wake-up may be found
BATCH_ROWS = 250  # most results of one record: a few milliseconds of the database's time
# How long due rows and results gather into batches while requests are in flight: the longer, the more the last batch
# had, since each batch costs a millisecond of Python's and the database's time beside what its rows cost.
GATHER_SECONDS, GATHER_SECONDS_A_ROW, MOST_GATHER_SECONDS = 0.005, 0.0005, 0.020
RECLAIM_SECONDS = 5.0  # between looks for leases that ran out
RENEW_SECONDS = 2.0  # that other pumps have to renew theirs when the database is back: they ask for it once a second
COMPARE_SECONDS = 60.0  # between comparisons of this machine's clock with the database's,
CLOCK_SECONDS = 5.0  # and by how much they may differ: receivers allow minutes, and nobody notices until then


class Pump:
    """Drains the queue of record until told to stop, with at most `PUMP_IN_FLIGHT` requests in flight.

    `claimers` are those of the pump before in this process. `transport` takes the place of the real one where only the
    rest is of interest.
    """

    def __init__(
        self,
        *,
        drain_seconds: float = 20.0,
        claimers: Sequence[Claimer] | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.recorded = 0
        self.reaches_database = True  # as far as it knows by the last time that it asked for something
        self._drain_seconds = drain_seconds
        self._lease = timedelta(seconds=settings.LEASE_SECONDS)
        self._listener = Listener(settings.REDIS_URL)
        first, again = claimers or make_claimers()
        self._lines = [_Line(first, 0.9), _Line(again, 0.5)]
        self._transport = transport or Transport(
            rule=settings.ADDRESS_RULE, ca_bundle=settings.CA_BUNDLE, max_connections=2 * settings.PUMP_IN_FLIGHT
        )
        self._transport.watch(self._listener.fd)
        self._claims: dict[uuid.UUID, tuple[uuid.UUID, _Line]] = {}  # delivery -> claim token, of what is not recorded
        self._busy = Busy()
        self._results: list[Result] = []
        self._results_since = 0.0
        self._gather = GATHER_SECONDS
        self._renew_at = self._reclaim_at = self._compare_at = self._away_until = 0.0

    @property
    def hears_wake_ups(self) -> bool:
        """Whether Redis is there."""
        return self._listener.fd is not None

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Works until `should_stop()`, then waits for what is in flight, `drain_seconds` at most, and works on when it
        need not stop after all. What is still in flight in the end is left to its lease.
        """
        relieve_collector()
        deadline: float | None = None
        settled = False
        try:
            while True:
                if not should_stop():
                    deadline = None  # the database went away meanwhile: what is in hand could not be recorded
                elif deadline is None:
                    deadline = time.monotonic() + self._drain_seconds
                if deadline is not None and not (self._claims and time.monotonic() < deadline):
                    break
                try:
                    if not settled and time.monotonic() >= self._away_until:
                        settle_planner(look_ups=True)
                        name_session(PUMP_NAME)
                        settled = True
                    self._turn(stopping=deadline is not None)
                except (OperationalError, InterfaceError) as error:
                    logger.error("the database is away, trying again in a second: %s", error)
                    connection.close()
                    settled = False
                    self.reaches_database, self._away_until = False, time.monotonic() + 1.0
                    # It may have been away for longer than a lease: all pumps renew theirs before one takes any back.
                    self._renew_at, self._reclaim_at = 0.0, self._away_until + RENEW_SECONDS
        finally:
            self._transport.close()
            self._listener.close()

    def _turn(self, *, stopping: bool) -> None:
        now = time.monotonic()
        is_there = now >= self._away_until
        if is_there and not stopping:
            if now >= self._reclaim_at:
                self._reclaim_at = now + RECLAIM_SECONDS
                reclaim_lost()
            if now >= self._compare_at:
                self._compare_at = now + COMPARE_SECONDS
                _compare_clocks()
            for line in self._lines:
                if now >= line.claim_at:
                    self._claim(line, now)
        if is_there and now >= self._renew_at:
            self._renew_at = now + settings.LEASE_SECONDS / 3
            if self._claims:
                Delivery.objects.all().renew({key: token for key, (token, _) in self._claims.items()}, self._lease)
        self._wait(now, POLL_SECONDS if stopping or not is_there else min(line.claim_at for line in self._lines) - now)
        if is_there:
            self._record()
            self.reaches_database = True

    def _wait(self, now: float, patience: float) -> None:
        """Moves what is in flight on, until something has to be done here."""
        patience = max(0.0, patience)
        for outcome in self._transport.wait(min(patience, self._gather) if self._results else patience):
            self._finish(outcome)
        if self._transport.woken:
            self._listener.drain()
            self._claim_soon(self._lines[0])
        if self._listener.fd is None:
            self._transport.watch(None)  # at once: the next socket may get the number of the one that is lost
            if self._listener.reconnect():
                self._transport.watch(self._listener.fd)

    # --- Claim

    def _claim_soon(self, line: "_Line") -> None:
        gap = self._gather if self._transport.in_flight else 0.0
        line.claim_at = min(line.claim_at, line.claimed_at + gap)

    def _claim(self, line: "_Line", now: float) -> None:
        free = settings.PUMP_IN_FLIGHT - len(self._claims)
        room = min(free, max(1, int(settings.PUMP_IN_FLIGHT * line.most)) - line.in_flight)
        line.claimed_at, line.claim_at, line.is_full = now, now + POLL_SECONDS, room <= 0
        if line.is_full:
            return
        token, rows = line.claimer.claim(room, self._busy, free=room)
        line.in_flight += len(rows)
        self._gather = min(GATHER_SECONDS + len(rows) * GATHER_SECONDS_A_ROW, MOST_GATHER_SECONDS)
        self._busy = self._busy.with_these(rows)
        for row in rows:
            self._claims[row.id] = (token, line)
            self._send(row, token)
        line.claim_at = max(now + GATHER_SECONDS, min(line.claim_at, line.claimer.ask_at))
        if line.claimer.more:
            self._claim_soon(line)

    # --- Send

    def _send(self, row: Claimed, token: uuid.UUID) -> None:
        result = Result(
            delivery_id=row.id,
            endpoint_id=row.endpoint_id,
            token=token,
            state=Delivery.State.HELD,
            id=uuid7(),
            number=row.attempts_made + 1,
            url=row.url,
            is_failing=row.is_failing,
        )
        contract = contract_of(row.contract)
        trial = _Trial(result, contract or STANDARD, row.first_attempt_at, row.tenant_id)
        if contract and (contract.control or row.endpoint_status == Endpoint.Status.ACTIVE):
            self._start(trial, row, signing_keys(row.sealed, contract.signature))
        else:
            # It was stopped between the fan-out and the claim, or follows a contract that this release does not know:
            # parked then, as a retry would be.
            result.attempted = False
            if contract:
                result.state = Delivery.State.PENDING
                park(result, contract)
            self._keep(trial)

    def _start(self, trial: "_Trial", row: Claimed, keys: Sequence[Key]) -> None:
        contract, result = trial.contract, trial.result
        if not keys:
            self._refuse(trial, "webhook_secret_unavailable", "The endpoint has no signing secret that can be read.")
            return
        try:
            target = _target(result.url)
        except Blocked as blocked:
            result.reason = blocked.reason
            self._refuse(trial, "blocked_address", str(blocked))
            return
        message = Message.of(row, event_id=row.event_id, delivery_id=row.id, attempt=result.number)
        headers, body = compose(contract, message, keys, int(time.time()))
        result.request_headers = headers
        self._transport.send(
            Request(
                tag=trial,
                url=target.url,
                host=target.host,
                headers=[*headers, *NOT_SENT],
                body=body,
                deadline=contract.deadline,
                read_bytes=contract.read_bytes,
                keep_bytes=contract.keep_bytes,
            )
        )

    def _refuse(self, trial: "_Trial", error: str, detail: str) -> None:
        """A failed attempt that never reached the network."""
        trial.result.error, trial.result.detail = error, detail
        trial.result.started_at = datetime.now(UTC)
        self._judge(trial, None)

    # --- Record

    def _finish(self, outcome: Outcome) -> None:
        """Turns the end of a request into a result."""
        trial: _Trial = outcome.request.tag
        result, timings = trial.result, outcome.timings
        result.started_at = outcome.started_at
        result.address = outcome.address
        result.status, result.error, result.detail = outcome.status, outcome.error, outcome.detail
        result.reason = outcome.reason
        result.lookup_us, result.connect_us, result.tls_us, result.wait_us, result.total_us = timings
        result.response_headers = outcome.headers
        result.response_body = outcome.body
        result.response_truncated = outcome.truncated
        self._judge(trial, outcome.header("retry-after"))

    def _judge(self, trial: "_Trial", retry_after: str | None) -> None:
        first_started = trial.first_attempt_at or trial.result.started_at or datetime.now(UTC)
        verdict = judge(trial.contract, trial.result, first_started=first_started, retry_after=retry_after)
        if verdict.action == "requeue":
            logger.error("a delivery is put back: %s", trial.result.detail)
        self._keep(trial)

    def _keep(self, trial: "_Trial") -> None:
        if not self._results:
            self._results_since = time.monotonic()
        self._results.append(trial.result)
        endpoint_id = trial.result.endpoint_id
        self._busy.end(endpoint_id, trial.tenant_id)
        for line in self._lines:
            if endpoint_id in line.claimer.lagging:
                self._claim_soon(line)

    def _record(self) -> None:
        """Writes the results that have gathered, once they are a batch, or have waited, or nothing else is to come."""
        if not self._results or (
            self._transport.in_flight
            and len(self._results) < BATCH_ROWS
            and time.monotonic() < self._results_since + self._gather
        ):
            return
        record_results(self._results)
        for result in self._results:
            if claim := self._claims.pop(result.delivery_id, None):
                claim[1].in_flight -= 1
        endpoints = {result.endpoint_id for result in self._results}
        for line in self._lines:
            if line.claimer.freed(endpoints) or line.is_full:
                self._claim_soon(line)
        self.recorded += len(self._results)
        self._results = []


@dataclass(slots=True, eq=False)
class _Line:
    """Deliveries of one priority. They may have a share `most` of the places: retries leave some for first tries
    however long they take, and first tries a few for retries.
    """

    claimer: Claimer
    most: float
    in_flight: int = 0
    claim_at: float = 0.0
    claimed_at: float = 0.0
    is_full: bool = False


@dataclass(slots=True)
class _Trial:
    """An attempt under way: its result so far, and what judges it."""

    result: Result
    contract: Contract
    first_attempt_at: datetime | None
    tenant_id: uuid.UUID


def _compare_clocks() -> None:
    """Signatures carry this machine's time, all else goes by the database's."""
    ahead = time.time() - Delivery.objects.all().database_now().timestamp()
    if abs(ahead) > CLOCK_SECONDS:
        logger.error(
            "this machine's clock is %.0f s %s the database's: receivers may refuse what it signs. Set both by NTP",
            abs(ahead),
            "ahead of" if ahead > 0 else "behind",
        )


@functools.lru_cache(maxsize=10_000)
def _target(url: str) -> Target:
    """Where a URL leads that the address rule lets pass. Raises Blocked."""
    target: Target = settings.ADDRESS_RULE.check_url(url)
    return target
