"""Queries over events, deliveries and attempts. The hot ones are SQL: one statement a batch, prepared by the server."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
from django.db import models
from django.db.models.functions import Now

from webhookhub.database import run

if TYPE_CHECKING:
    from deliveries.models import Delivery, Event
else:
    Delivery = Event = models.Model

# Each event once, with a delivery for every endpoint of its tenant that wants its type. What an endpoint that is not
# active would get is held for it.
STORE_EVENTS = """
WITH input AS (
    SELECT * FROM unnest(
        %(id)s::uuid[], %(tenant)s::uuid[], %(type)s::text[], %(payload)s::bytea[], %(content_type)s::text[],
        %(key)s::uuid[], %(caller_key)s::text[], %(metadata)s::text[], %(patterns)s::text[]
    ) AS input (id, tenant_id, type, payload, content_type, key, caller_key, metadata, patterns)
), stored AS (
    INSERT INTO deliveries_event (id, tenant_id, type, payload, content_type, key, caller_key, metadata)
    SELECT id, tenant_id, type, payload, content_type, key, caller_key, metadata::jsonb FROM input
    ON CONFLICT (tenant_id, caller_key) WHERE caller_key IS NOT NULL DO NOTHING
    RETURNING id
), fan_out AS (
    INSERT INTO deliveries_delivery (id, event_id, endpoint_id, contract, state, trigger, attempts_made, last_error)
    SELECT hub_uuid7(), input.id, endpoint.id, coalesce(contract.key, endpoint.contract),
           CASE endpoint.status WHEN 'active' THEN 'pending' ELSE 'held' END, 'automatic', 0, ''
    FROM stored
    JOIN input USING (id)
    JOIN endpoints_endpoint endpoint
      ON endpoint.tenant_id = input.tenant_id AND endpoint.event_types && input.patterns::varchar[]
    LEFT JOIN unnest(%(contract_names)s::text[], %(contract_keys)s::text[]) AS contract (name, key)
      ON contract.name = endpoint.contract
)
SELECT id FROM stored
"""

_CLAIMED = """
claimed AS (
    UPDATE deliveries_delivery delivery
    SET state = 'sending', claimed_at = now(), claim_token = %(token)s, lease_until = now() + %(lease)s
    FROM picked WHERE delivery.id = picked.id
    RETURNING delivery.due_at, delivery.id, delivery.endpoint_id, delivery.attempts_made, delivery.event_id,
              delivery.first_attempt_at, delivery.contract
)
"""
# With all that a request needs, as it is now: a change to an endpoint counts from the next claim on.
_CLAIMED_ROWS = """
SELECT claimed.due_at, claimed.id, claimed.endpoint_id, claimed.attempts_made, claimed.event_id,
       claimed.first_attempt_at, event.payload, event.content_type,
       endpoint.url, claimed.contract, endpoint.status, secrets.sealed
FROM claimed
JOIN deliveries_event event ON event.id = claimed.event_id
JOIN endpoints_endpoint endpoint ON endpoint.id = claimed.endpoint_id
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(sealed ORDER BY id DESC), '{}') AS sealed FROM endpoints_endpointsecret
    WHERE endpoint_id = claimed.endpoint_id AND (expires_at IS NULL OR expires_at > now())
) secrets
"""

# The next page of due deliveries after a remembered position. Of each endpoint at most its free slots are claimed, and
# `room` in all. The page itself comes back too (rows without an event), so that the caller knows where it stands.
CLAIM = f"""
WITH page AS MATERIALIZED (
    SELECT id, due_at, endpoint_id, row_number() OVER (PARTITION BY endpoint_id ORDER BY due_at, id) AS rank
    FROM (
        SELECT id, due_at, endpoint_id FROM deliveries_delivery
        WHERE state = 'pending' AND due_at <= now() AND (due_at, id) > (%(after)s, %(after_id)s)
        ORDER BY due_at, id LIMIT %(limit)s
    ) due
), picked AS (
    SELECT delivery.id FROM page
    LEFT JOIN unnest(%(busy)s::uuid[], %(free)s::int[]) AS slots (endpoint_id, free)
      ON slots.endpoint_id = page.endpoint_id
    JOIN deliveries_delivery delivery ON delivery.id = page.id
    WHERE page.rank <= coalesce(slots.free, %(endpoint_limit)s) AND delivery.state = 'pending'
    ORDER BY page.due_at, page.id LIMIT %(room)s
    FOR UPDATE OF delivery SKIP LOCKED
), {_CLAIMED}
{_CLAIMED_ROWS}
UNION ALL (
    SELECT due_at, id, endpoint_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM page ORDER BY due_at, id
)
"""

# The next due deliveries of endpoints that have more of them than may be in flight, each from its own position.
CLAIM_LAGGING = f"""
WITH picked AS (
    SELECT due.id
    FROM unnest(%(endpoint)s::uuid[], %(after)s::timestamptz[], %(after_id)s::uuid[], %(free)s::int[])
      AS lagging (endpoint_id, after, after_id, free)
    CROSS JOIN LATERAL (
        SELECT id FROM deliveries_delivery
        WHERE state = 'pending' AND endpoint_id = lagging.endpoint_id AND due_at <= now()
          AND (due_at, id) > (lagging.after, lagging.after_id)
        ORDER BY due_at, id LIMIT lagging.free FOR UPDATE SKIP LOCKED
    ) due
), {_CLAIMED}
{_CLAIMED_ROWS}
"""

# Results of attempts, each only while its claim still stands: a pump that lost its lease writes nothing. A retry for an
# endpoint that was paused meanwhile is held.
RECORD = """
WITH result AS (
    SELECT * FROM json_to_recordset(%(results)s::json) AS result (
        delivery_id uuid, token uuid, state text, wait float8, attempted boolean,
        id uuid, number smallint, started_at timestamptz, url text, address inet, status smallint, error text,
        detail text, lookup_us int, connect_us int, tls_us int, wait_us int, total_us int,
        request_headers jsonb, response_headers jsonb, response_body text, response_truncated boolean
    )
), done AS (
    UPDATE deliveries_delivery delivery
    SET state = CASE WHEN result.state = 'pending' AND endpoint.status <> 'active' THEN 'held' ELSE result.state END,
        due_at = CASE result.state
            WHEN 'pending' THEN now() + result.wait * interval '1 second' ELSE delivery.due_at END,
        finished_at = CASE WHEN result.state IN ('delivered', 'dead') THEN now() END,
        claim_token = NULL, lease_until = NULL,
        first_attempt_at = coalesce(delivery.first_attempt_at, CASE WHEN attempted THEN result.started_at END),
        attempts_made = CASE WHEN attempted THEN result.number ELSE delivery.attempts_made END,
        last_status = CASE WHEN attempted THEN result.status ELSE delivery.last_status END,
        last_error = CASE WHEN attempted THEN result.error ELSE delivery.last_error END
    FROM result, endpoints_endpoint endpoint
    WHERE delivery.id = result.delivery_id AND delivery.claim_token = result.token
      AND endpoint.id = delivery.endpoint_id
    RETURNING result.*
), kept AS (
    INSERT INTO deliveries_attempt (
        id, delivery_id, number, started_at, url, address, status, error, detail,
        lookup_us, connect_us, tls_us, wait_us, total_us,
        request_headers, response_headers, response_body, response_truncated
    )
    SELECT id, delivery_id, number, started_at, url, address, status, error, detail,
        lookup_us, connect_us, tls_us, wait_us, total_us,
        request_headers, response_headers, decode(response_body, 'base64'), response_truncated
    FROM done WHERE attempted
)
SELECT delivery_id FROM done
"""

RENEW = """
UPDATE deliveries_delivery SET lease_until = now() + %(lease)s
WHERE id = ANY(%(ids)s) AND claim_token = ANY(%(tokens)s)
"""


class Position(NamedTuple):
    """A place in the order of due deliveries."""

    due_at: datetime
    id: uuid.UUID


class Claimed(NamedTuple):
    """A claimed delivery with what is needed to send it; `sealed` are the encrypted secrets that sign now."""

    due_at: datetime
    id: uuid.UUID
    endpoint_id: uuid.UUID
    attempts_made: int
    event_id: uuid.UUID
    first_attempt_at: datetime | None
    payload: bytes
    content_type: str
    url: str
    contract: str
    endpoint_status: str
    sealed: list[bytes]


class Seen(NamedTuple):
    """A due delivery that a claim looked at, claimed or not."""

    due_at: datetime
    id: uuid.UUID
    endpoint_id: uuid.UUID


class Result(msgspec.Struct):
    """What one claimed delivery came to, in the columns of Attempt; `attempted` is false when nothing was tried."""

    delivery_id: uuid.UUID
    token: uuid.UUID
    state: str
    wait: float = 0.0
    attempted: bool = True
    id: uuid.UUID | None = None
    number: int = 0
    started_at: datetime | None = None
    url: str = ""
    address: str | None = None
    status: int | None = None
    error: str = ""
    detail: str = ""
    lookup_us: int | None = None
    connect_us: int | None = None
    tls_us: int | None = None
    wait_us: int | None = None
    total_us: int | None = None
    request_headers: Sequence[str] = ()
    response_headers: Sequence[str] = ()
    response_body: bytes | None = None  # base64 in JSON
    response_truncated: bool = False


@dataclass(frozen=True, slots=True)
class Lagging:
    """An endpoint with more due than it may have in flight: where it stands, and how many more it may have now."""

    endpoint_id: uuid.UUID
    after: Position
    free: int


class EventQuerySet(models.QuerySet["Event"]):
    """Events."""

    def store(self, columns: Mapping[str, Sequence[Any]], contracts: Mapping[str, str]) -> set[uuid.UUID]:
        """Stores events, given by column, with their deliveries, in one statement. `contracts` has keys by name.

        Returns the ids that were stored; the others' tenants had used their caller_key before. One event that the
        database refuses fails the whole statement.
        """
        params = {**columns, "contract_names": list(contracts), "contract_keys": list(contracts.values())}
        return {row[0] for row in run(self.db, STORE_EVENTS, params)}


class DeliveryQuerySet(models.QuerySet["Delivery"]):
    """Deliveries."""

    def claim(
        self,
        *,
        after: Position,
        limit: int,
        room: int,
        free: Mapping[uuid.UUID, int],
        endpoint_limit: int,
        token: uuid.UUID,
        lease: timedelta,
    ) -> tuple[list[Claimed], list[Seen]]:
        """Claims of the next `limit` due deliveries after a position up to `room`, and of each endpoint no more than
        `free` says, or `endpoint_limit` where it says nothing.

        Returns what it claimed, and the page it looked at, in order.
        """
        params = {
            "after": after.due_at,
            "after_id": after.id,
            "limit": limit,
            "room": room,
            "busy": list(free),
            "free": list(free.values()),
            "endpoint_limit": endpoint_limit,
            "token": token,
            "lease": lease,
        }
        rows = run(self.db, CLAIM, params)
        claimed = [Claimed(*row) for row in rows if row[4] is not None]
        return claimed, [Seen(*row[:3]) for row in rows if row[4] is None]

    def claim_lagging(self, lagging: Sequence[Lagging], *, token: uuid.UUID, lease: timedelta) -> list[Claimed]:
        """Claims the next due deliveries of each of these endpoints, as many as it has free slots."""
        params = {
            "endpoint": [one.endpoint_id for one in lagging],
            "after": [one.after.due_at for one in lagging],
            "after_id": [one.after.id for one in lagging],
            "free": [one.free for one in lagging],
            "token": token,
            "lease": lease,
        }
        return [Claimed(*row) for row in run(self.db, CLAIM_LAGGING, params)]

    def record(self, results: Sequence[Result]) -> set[uuid.UUID]:
        """Writes results and their attempts, and returns the deliveries whose claim still stood."""
        return {row[0] for row in run(self.db, RECORD, {"results": msgspec.json.encode(results).decode()})}

    def renew(self, claims: Mapping[uuid.UUID, uuid.UUID], lease: timedelta) -> None:
        """Extends the lease of these claims (delivery -> token) that still stand."""
        params = {"ids": list(claims), "tokens": list(set(claims.values())), "lease": lease}
        run(self.db, RENEW, params)

    def database_now(self) -> datetime:
        """The database's clock, by which due times and leases run."""
        moment: datetime = run(self.db, "SELECT clock_timestamp()", {})[0][0]
        return moment

    def lost(self, limit: int) -> Self:
        """Deliveries whose lease ran out, locked, longest first. Their pump is dead or was cut off."""
        return (
            self.filter(state="sending", lease_until__lt=Now())
            .select_related("endpoint")
            .select_for_update(skip_locked=True, of=("self",))
            .order_by("lease_until")[:limit]
        )

    def in_hand(self) -> Self:
        """Deliveries that are due or being sent."""
        return self.filter(models.Q(state="sending") | models.Q(state="pending", due_at__lte=Now()))

    def waiting_for(self, endpoints: Iterable[uuid.UUID]) -> Self:
        """Deliveries that wait for their next attempt at these endpoints."""
        return self.filter(endpoint__in=list(endpoints), state="pending")
