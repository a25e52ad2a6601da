"""Where a pump stands in the queue of record, and what it claims next.

Due deliveries are read in the order of (due time, id) from a remembered position, so that a claim never walks over
what was done before: under churn, and with an old snapshot open, that walk grows without end. The position begins a few
seconds ago; what is older, or became visible behind it, a second reader finds, the sweep, which goes over what is due a
page at a time, so that nobody waits for it. An endpoint that has more due than it may have in flight is
passed over and remembered with a position of its own; so is one with a pace of its own.

All that is known here can be found again in the database; it is kept from one pump to the next in a process.
"""

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django.conf import settings
from django.db import DatabaseError, InterfaceError, transaction

from deliveries.models import Delivery
from deliveries.querysets import Claimed, Head, Lagging, Position, Seen
from endpoints.models import Endpoint
from endpoints.pace import Allowance
from webhookhub.ids import uuid7

TENANT_SHARE = 3  # times as many places as are free may be one tenant's,
ENDPOINT_SHARE = 1 / 16  # and an endpoint may have this part of what its tenant may still have
PAGE_ROWS = 250  # most rows of one claim: a few milliseconds of the database's time
SKIMMED_ROWS = 2_000  # how far a claim looks for other endpoints' deliveries among those of lagging ones
PACED_ENDPOINTS = 100  # most endpoints with a pace of their own that one claim asks for
START = Position(datetime(1, 1, 1, tzinfo=UTC), uuid.UUID(int=0))

# Deliveries may become visible behind the position, since commits do not come in the order of due times. Each entry:
# how often (seconds) a claim goes back, and how far. Intake commits in milliseconds.
OVERLAPS = ((0.0, timedelta(milliseconds=100)), (1.0, timedelta(seconds=5)))
# The same for sweeps: for those who publish inside a transaction of minutes, and for whatever else. Seldom from the
# beginning, where all the entries stand that an old snapshot keeps from being cleaned away.
SWEEPS = ((60.0, timedelta(minutes=10)), (3_600.0, timedelta(days=365_000)))
SWEEP_PAUSE = 0.1  # after a page of a sweep on which nothing could be claimed: backlogs of lagging endpoints
TURN_PAUSE = 5.0  # until it is looked again whose turn it is where a retry is waited for: somebody may skip it
LOCKED_PAUSE = 0.01  # until an endpoint is asked for again whose row another worker holds


@dataclass(slots=True)
class Waiting:
    """An endpoint of a tenant with something due that waits: where it stands, and when to ask for it again."""

    tenant_id: uuid.UUID
    position: Position
    ask_at: float = 0.0


class Claimer:
    """Claims due deliveries of one priority for one pump, fairly over tenants and their endpoints.

    `more`: the last claim left some behind that can be claimed at once.
    """

    def __init__(self, *, priority: int, endpoint_limit: int, page_rows: int, lease: timedelta) -> None:
        self.more = False
        self.lagging: dict[uuid.UUID, Waiting] = {}
        self.paced: dict[uuid.UUID, Waiting] = {}
        self._priority = priority
        self._endpoint_limit = endpoint_limit
        self._page_rows = page_rows
        self._lease = lease
        self._turn = 0
        self._skim = 0
        self._head: Position | None = None
        self._overlap_at = [0.0] * len(OVERLAPS)
        self._sweep: Position | None = None  # where a sweep stands that is under way
        self._sweep_at = 0.0  # when it goes on, or the next one begins
        self._sweeps_at = [0.0] * len(SWEEPS)
        self._epoch: datetime | None = None  # the database's time at zero of our monotonic clock
        self._unheard: uuid.UUID | None = None  # the token of a claim whose answer was lost

    @property
    def ask_at(self) -> float:
        """When (monotonic seconds) to claim again at the latest, whatever happens until then."""
        paced = (one.ask_at for one in self.paced.values())
        return min([self._sweep_at, *paced])

    def freed(self, endpoints: set[uuid.UUID]) -> bool:
        """Requests to these endpoints have ended. True when something waits for their places."""
        for endpoint in endpoints & self.paced.keys():
            self.paced[endpoint].ask_at = 0.0
        return not (self.paced.keys() | self.lagging.keys()).isdisjoint(endpoints)

    def claim(self, room: int, busy: "Busy", *, free: int) -> tuple[uuid.UUID, list[Claimed]]:
        """Claims up to `room` deliveries, and returns the claim's token with them.

        `busy` says how many requests each endpoint and each tenant has in flight here, `free` how many places for more
        there are, of which no tenant and no endpoint gets too many (Room).
        """
        if self._unheard:
            Delivery.objects.all().give_back(self._unheard)
            self._unheard = None
        token = uuid7()
        try:
            return token, self._claim(Room(room, free, self._endpoint_limit, busy, token))
        except (DatabaseError, InterfaceError):
            # What was claimed, if anything was, is sent by nobody; and what became visible meanwhile may be far behind.
            self._unheard, self._epoch = token, None
            self._sweep, self._sweep_at, self._sweeps_at = None, 0.0, [0.0] * len(SWEEPS)
            raise

    def _claim(self, room: "Room") -> list[Claimed]:
        # They take turns at being first: whichever always were could take all the room and starve the others.
        now = time.monotonic()
        steps = [self._claim_new]
        steps += [self._claim_lagging] if self.lagging else []
        steps += [self._claim_paced] if any(one.ask_at <= now for one in self.paced.values()) else []
        steps += [self._claim_swept] if self._sweep_at <= now else []
        self._turn += 1
        first = self._turn % len(steps)
        rows: list[Claimed] = []
        self.more = False
        for step in steps[first:] + steps[:first]:
            if room.places > len(rows):
                rows += step(room.after(rows))
        return rows

    # --- New deliveries, and the sweep over all

    def _claim_new(self, room: "Room") -> list[Claimed]:
        now = time.monotonic()
        back = self._back(now, self._overlap_at, OVERLAPS)
        if self._head is None:
            self._head = self._back(now, [], [])
        start = min(self._head, back)
        page = self._claim_page(start, room)
        self.more = self.more or page.more
        # A page that reached the present ends an overlap: the position is where it was, or further on.
        self._head = page.reached if page.more else max(page.reached, self._head)
        return page.rows

    def _back(self, now: float, due: list[float], distances: Sequence[tuple[float, timedelta]]) -> Position:
        """As far back from now as it is time to go."""
        if self._epoch is None:
            self._epoch = Delivery.objects.all().database_now() - timedelta(seconds=time.monotonic())
        back = timedelta()
        for number, (every, distance) in enumerate(distances):
            if now >= due[number]:
                due[number] = now + every
                back = distance
        moment = self._epoch + timedelta(seconds=now)
        return START if back > moment - START.due_at else Position(moment - back, START.id)

    def _claim_swept(self, room: "Room") -> list[Claimed]:
        now = time.monotonic()
        if self._sweep is None:
            self._sweep = self._back(now, self._sweeps_at, SWEEPS)
            self._epoch = None  # the two clocks may have drifted apart
        page = self._claim_page(self._sweep, room)
        if page.more and (self._head is None or page.reached < self._head):
            self._sweep = page.reached
            self._sweep_at = 0.0 if page.was_free else now + SWEEP_PAUSE
            self.more = self.more or page.was_free
        else:
            self._sweep, self._sweep_at = None, min(self._sweeps_at)
        return page.rows

    def _claim_page(self, start: Position, room: "Room") -> "_Page":
        """Claims from a page after a position."""
        room.places = min(room.places, self._page_rows)
        limit = room.places
        if self.lagging or self.paced:  # it looks further the more of their rows it has met
            limit = min(max(2 * limit, self._skim, PAGE_ROWS), SKIMMED_ROWS)
        page = Delivery.objects.all().page(priority=self._priority, after=start, limit=limit)
        reached, chosen, more = start, [], len(page) == limit
        for row in page:
            if row.is_paced:
                self.lagging.pop(row.endpoint_id, None)
                self._remember(self.paced, row, reached)
            elif row.endpoint_id in self.lagging or not room.is_fair(row.endpoint_id, row.tenant_id):
                self._remember(self.lagging, row, reached)
            elif room.places:
                room.take(row.endpoint_id, row.tenant_id, 1)
                chosen.append(row.id)
            else:
                more = True  # it can be claimed when there is room again
                break
            reached = Position(row.due_at, row.id)
        self._skim = 2 * limit if len(page) == limit and room.places else 0
        rows = Delivery.objects.all().claim_these(chosen, token=room.token, lease=self._lease) if chosen else []
        return _Page(rows, reached, more, bool(chosen))

    def _remember(self, waiting: dict[uuid.UUID, Waiting], row: Seen, before: Position) -> None:
        """That an endpoint has this row waiting, which stands after a position."""
        known = waiting.get(row.endpoint_id)
        # One behind the endpoint's position came late, and must not wait for the end of the backlog.
        if known is None or known.position >= Position(row.due_at, row.id):
            waiting[row.endpoint_id] = Waiting(row.tenant_id, before, known.ask_at if known else 0.0)

    # --- Endpoints with more than they may have

    def _claim_lagging(self, room: "Room") -> list[Claimed]:
        chosen = []
        for endpoint, waiting in self.lagging.items():
            if (free := room.take(endpoint, waiting.tenant_id)) > 0:
                chosen.append(Lagging(endpoint, waiting.position, free))
        if not chosen:
            return []
        rows = self._claim_each(chosen, room.token)
        last = _last(rows)
        counts = Counter(row.endpoint_id for row in rows)
        for one in chosen:  # to the end of the line; one that has no more due is lagging no longer
            waiting = self.lagging.pop(one.endpoint_id)
            if counts[one.endpoint_id] == one.free:
                waiting.position = last[one.endpoint_id]
                self.lagging[one.endpoint_id] = waiting
        return rows

    def _claim_each(self, lagging: list[Lagging], token: uuid.UUID) -> list[Claimed]:
        return Delivery.objects.all().claim_lagging(lagging, priority=self._priority, token=token, lease=self._lease)

    # --- Endpoints with a pace of their own

    def _claim_paced(self, room: "Room") -> list[Claimed]:
        now = time.monotonic()
        asked = [endpoint for endpoint, one in self.paced.items() if one.ask_at <= now][:PACED_ENDPOINTS]
        with transaction.atomic():
            endpoints = list(Endpoint.objects.locked_for_pace(asked))
            heads = {one.endpoint_id: one for one in Delivery.objects.all().heads(e.pk for e in endpoints if e.ordered)}
            allowed = self._allowances(endpoints, room)
            rows = self._claim_allowed(endpoints, allowed, heads, room.token)
            counts = Counter(row.endpoint_id for row in rows)
            Endpoint.objects.save_paces(
                (endpoint, endpoint.pace.after_claim(endpoint.moment, counts[endpoint.pk])) for endpoint in endpoints
            )
        for endpoint_id in asked:  # to the end of the line
            self.paced[endpoint_id] = self.paced.pop(endpoint_id)
            self.paced[endpoint_id].ask_at = now + LOCKED_PAUSE
        last = _last(rows)
        for endpoint in endpoints:
            key = endpoint.pk
            self.paced[key].ask_at = now + allowed[key].again
            if endpoint.ordered:
                self._wait_for_turn(key, heads.get(key), now)
            else:
                has_more = counts[key] == allowed[key].requests or bool(allowed[key].overdue)
                self._go_on(endpoint, last.get(key), has_more=has_more)
        return rows

    def _go_on(self, endpoint: Endpoint, reached: Position | None, *, has_more: bool) -> None:
        """Where an endpoint stands after a claim, and whether it has to be asked for again."""
        if reached:
            self.paced[endpoint.pk].position = reached
        if not endpoint.is_paced:
            self.lagging[endpoint.pk] = self.paced.pop(endpoint.pk)
        elif not has_more:
            del self.paced[endpoint.pk]

    def _allowances(self, endpoints: list[Endpoint], room: "Room") -> dict[uuid.UUID, Allowance]:
        in_flight = Delivery.objects.all().in_flight(one.pk for one in endpoints)
        allowed = {}
        for endpoint in endpoints:
            tenant_id = self.paced[endpoint.pk].tenant_id
            free = room.take(endpoint.pk, tenant_id)
            found = endpoint.pace.allowance(endpoint.moment, free=free, in_flight=in_flight.get(endpoint.pk, 0))
            allowed[endpoint.pk] = found
            room.give_back(endpoint.pk, tenant_id, free - found.requests)
        return allowed

    def _claim_allowed(
        self,
        endpoints: list[Endpoint],
        allowed: Mapping[uuid.UUID, Allowance],
        heads: Mapping[uuid.UUID, Head],
        token: uuid.UUID,
    ) -> list[Claimed]:
        some = [endpoint.pk for endpoint in endpoints if allowed[endpoint.pk].requests > 0 and not endpoint.ordered]
        lagging = [Lagging(one, self.paced[one].position, allowed[one].requests, allowed[one].overdue) for one in some]
        rows = self._claim_each(lagging, token) if lagging else []
        if ready := [head.id for head in heads.values() if _may_go(head, allowed[head.endpoint_id])]:
            rows += Delivery.objects.all().claim_these(ready, token=token, lease=self._lease)
        return rows

    def _wait_for_turn(self, endpoint_id: uuid.UUID, head: Head | None, now: float) -> None:
        """The next one's turn comes when the head has ended; if a retry of it is to come, not before that."""
        if head is None:
            # What was posted while its line was being drawn up has no turn yet.
            if not Delivery.objects.all().put_in_order(endpoint_id):
                del self.paced[endpoint_id]
        elif head.overdue < 0:
            self.paced[endpoint_id].ask_at = now + min(-head.overdue, TURN_PAUSE)


def _may_go(head: Head, allowed: Allowance) -> bool:
    return head.is_pending and allowed.requests > 0 and head.overdue >= allowed.overdue


class _Page(NamedTuple):
    """What was claimed of a page, how far that came, and whether there is more; `was_free`: something of it could be
    claimed, even if another pump was quicker.
    """

    rows: list[Claimed]
    reached: Position
    more: bool
    was_free: bool


def make_claimers() -> list[Claimer]:
    """A claimer for each priority, the first to go first."""
    return [
        Claimer(
            priority=priority,
            endpoint_limit=settings.PUMP_ENDPOINT_IN_FLIGHT,
            page_rows=PAGE_ROWS,
            lease=timedelta(seconds=settings.LEASE_SECONDS),
        )
        for priority in Delivery.Priority
    ]


@dataclass(slots=True)
class Room:
    """What a step of a claim may take, and who how much of it.

    The fewer places are free, the fewer more of them one tenant may have, and so each of its endpoints: however many
    hang, some places are left for others. (Switches share their buffers so. A tenant whose endpoints all hang comes to
    have three quarters of the places, and one endpoint of it 15 %.)
    """

    places: int
    free: int
    endpoint_limit: int
    busy: "Busy"
    token: uuid.UUID

    def after(self, rows: Sequence[Claimed]) -> "Room":
        """What is left of it when these are claimed."""
        left = self.places - len(rows), self.free - len(rows)
        return Room(*left, self.endpoint_limit, self.busy.with_these(rows), self.token)

    def is_fair(self, endpoint_id: uuid.UUID, tenant_id: uuid.UUID) -> bool:
        """Whether an endpoint may have one more."""
        of_tenant = TENANT_SHARE * self.free - self.busy.tenants[tenant_id]
        limit = max(1.0, min(self.endpoint_limit, of_tenant * ENDPOINT_SHARE))
        return of_tenant > 0 and self.busy.endpoints[endpoint_id] < limit

    def take(self, endpoint_id: uuid.UUID, tenant_id: uuid.UUID, most: int = 1_000) -> int:
        """As many places as an endpoint may have."""
        count = 0
        while count < min(most, self.places) and self.is_fair(endpoint_id, tenant_id):
            count += 1
            self._count(endpoint_id, tenant_id, 1)
        self.places -= count
        return count

    def give_back(self, endpoint_id: uuid.UUID, tenant_id: uuid.UUID, count: int) -> None:
        """Places that were not needed."""
        self.places += count
        self._count(endpoint_id, tenant_id, -count)

    def _count(self, endpoint_id: uuid.UUID, tenant_id: uuid.UUID, count: int) -> None:
        self.free -= count
        self.busy.endpoints[endpoint_id] += count
        self.busy.tenants[tenant_id] += count


@dataclass(slots=True)
class Busy:
    """How many requests each endpoint and each tenant has in flight."""

    endpoints: Counter[uuid.UUID] = field(default_factory=Counter)
    tenants: Counter[uuid.UUID] = field(default_factory=Counter)

    def with_these(self, rows: Iterable[Claimed]) -> "Busy":
        """With these as well."""
        rows = list(rows)
        return Busy(
            self.endpoints + Counter(row.endpoint_id for row in rows),
            self.tenants + Counter(row.tenant_id for row in rows),
        )

    def end(self, endpoint_id: uuid.UUID, tenant_id: uuid.UUID) -> None:
        """One of them has ended."""
        for counts, key in ((self.endpoints, endpoint_id), (self.tenants, tenant_id)):
            counts[key] -= 1
            if counts[key] <= 0:
                del counts[key]


def _last(rows: Iterable[Claimed]) -> dict[uuid.UUID, Position]:
    """The last position of each endpoint; claimed rows come in no order."""
    last: dict[uuid.UUID, Position] = {}
    for row in rows:
        here = Position(row.due_at, row.id)
        last[row.endpoint_id] = max(here, last.get(row.endpoint_id, here))
    return last
