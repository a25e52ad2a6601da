"""Where a pump stands in the queue of record, and what it claims next.

Due deliveries are read in the order of (due time, id) from a remembered position, so that a claim never walks over
what was done before: under churn, and with an old snapshot open, that walk grows without end. An endpoint that has
more due than it may have in flight is passed over and remembered with a position of its own.
"""

import time
import uuid
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from deliveries.models import Delivery
from deliveries.querysets import Claimed, Lagging, Position
from webhookhub.ids import uuid7

SKIMMED_ROWS = 2_000  # how far a claim looks for other endpoints' deliveries among those of lagging ones
START = Position(datetime(1, 1, 1, tzinfo=UTC), uuid.UUID(int=0))
LAST = Position(datetime.max.replace(tzinfo=UTC), uuid.UUID(int=2**128 - 1))
EVER = timedelta(days=365_000)

# Deliveries may become visible behind the position, since commits do not come in the order of due times. Each entry:
# how often (seconds) a claim goes back, and how far. Intake commits in milliseconds; the last entry is for those who
# publish inside a transaction of minutes.
SWEEPS = ((0.0, timedelta(milliseconds=100)), (1.0, timedelta(seconds=5)), (60.0, EVER))


class Claimer:
    """Claims due deliveries for one pump, fairly over endpoints. `more`: the last claim left some behind."""

    def __init__(self, *, endpoint_limit: int, page_rows: int, lease: timedelta) -> None:
        self.more = False
        self.lagging: dict[uuid.UUID, Position] = {}
        self._endpoint_limit = endpoint_limit
        self._page_rows = page_rows
        self._lease = lease
        self._lagging_first = False
        self._position = START
        self._sweep_at = [0.0] * len(SWEEPS)
        self._epoch: datetime | None = None  # the database's time at zero of our monotonic clock

    def claim(self, room: int, busy: Mapping[uuid.UUID, int]) -> tuple[uuid.UUID, list[Claimed]]:
        """Claims up to `room` deliveries, and returns the claim's token with them.

        `busy` says how many each endpoint has in flight here.
        """
        token = uuid7()
        # They take turns at being first: whichever always were could take all the room and starve the other.
        self._lagging_first = not self._lagging_first
        steps = [self._claim_page, self._claim_lagging]
        rows: list[Claimed] = []
        busy = Counter(busy)
        for step in reversed(steps) if self._lagging_first else steps:
            if room > len(rows):
                found = step(room - len(rows), busy, token)
                busy.update(row.endpoint_id for row in found)
                rows += found
        return token, rows

    def _claim_lagging(self, room: int, busy: Mapping[uuid.UUID, int], token: uuid.UUID) -> list[Claimed]:
        waiting = self._lagging_with_room(room, busy)
        if not waiting:
            return []
        rows = Delivery.objects.all().claim_lagging(waiting, token=token, lease=self._lease)
        self._advance(waiting, rows)
        return rows

    def _lagging_with_room(self, room: int, busy: Mapping[uuid.UUID, int]) -> list[Lagging]:
        chosen = []
        for endpoint, position in self.lagging.items():
            free = min(self._endpoint_limit - busy.get(endpoint, 0), room)
            if free > 0:
                chosen.append(Lagging(endpoint, position, free))
                room -= free
        return chosen

    def _advance(self, waiting: list[Lagging], rows: list[Claimed]) -> None:
        """Moves each endpoint's position, to the end of the line; one that has no more due is lagging no longer."""
        counts = Counter(row.endpoint_id for row in rows)
        last = {row.endpoint_id: Position(row.due_at, row.id) for row in rows}
        for one in waiting:
            del self.lagging[one.endpoint_id]
            if counts[one.endpoint_id] == one.free:
                self.lagging[one.endpoint_id] = last[one.endpoint_id]

    def _claim_page(self, room: int, busy: Mapping[uuid.UUID, int], token: uuid.UUID) -> list[Claimed]:
        room = min(room, self._page_rows)
        free = {endpoint: self._endpoint_limit - count for endpoint, count in busy.items()}
        free.update(dict.fromkeys(self.lagging, 0))
        start = self._start()
        limit = SKIMMED_ROWS if self.lagging else room
        claimed, page = Delivery.objects.all().claim(
            after=start,
            limit=limit,
            room=room,
            free=free,
            endpoint_limit=self._endpoint_limit,
            token=token,
            lease=self._lease,
        )
        before, counts, full = start, Counter[uuid.UUID](), 0
        self.more = len(page) == limit
        for row in page:
            counts[row.endpoint_id] += 1
            if counts[row.endpoint_id] > free.get(row.endpoint_id, self._endpoint_limit):
                # One behind the endpoint's position came late, and must not wait for the end of the backlog.
                if self.lagging.get(row.endpoint_id, LAST) >= (row.due_at, row.id):
                    self.lagging[row.endpoint_id] = before
            elif full == room:
                self.more = True  # it could be claimed when there is room again
                break
            else:
                full += 1
            before = Position(row.due_at, row.id)
        # A page that reached the present ends a sweep: the position is where it was, or further on.
        self._position = before if self.more else max(before, self._position)
        return claimed

    def _start(self) -> Position:
        """The remembered position, or as far back as the sweeps that are due go."""
        now = time.monotonic()
        back = timedelta()
        for number, (every, distance) in enumerate(SWEEPS):
            # The overlap of every claim is only for the present: with more left behind, it would read the same again.
            if now >= self._sweep_at[number] and not (self.more and every == 0.0):
                self._sweep_at[number] = now + every
                back = distance
        if back == EVER or self._epoch is None:
            moment = Delivery.objects.all().database_now()
            self._epoch = moment - timedelta(seconds=time.monotonic())
            return START
        return min(self._position, Position(self._epoch + timedelta(seconds=now) - back, START.id))
