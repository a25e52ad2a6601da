"""Queries over events, deliveries and attempts. The hot ones are SQL: one statement a batch, prepared by the server."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
from django.db import models
from django.db.models.functions import Coalesce, Now

from endpoints.pace import FAILURES_TO_OPEN
from webhookhub.database import Array, LoopConnection, run, run_by_index

if TYPE_CHECKING:
    from deliveries.models import Delivery, Event
else:
    Delivery = Event = models.Model

# Each event once, with a delivery for every endpoint of its tenant that wants its type, or for the one that a rule has
# chosen. What becomes of it where the endpoint is not active is for the contract to say. An event of a type about which
# there is more to know (EventType.is_plain) comes back untouched, for publishing to look at first.
STORE_EVENTS = """
WITH input AS (
    SELECT * FROM unnest(
        %(id)s::uuid[], %(tenant)s::uuid[], %(type)s::text[], %(payload)s::bytea[], %(content_type)s::text[],
        %(key)s::uuid[], %(caller_key)s::text[], %(metadata)s::text[], %(patterns)s::text[], %(state)s::text[],
        %(projection)s::bytea[], %(destination)s::uuid[], %(is_known)s::boolean[]
    ) AS input (
        id, tenant_id, type, payload, content_type, key, caller_key, metadata, patterns, state, projection,
        destination, is_known
    )
), unknown AS (
    SELECT input.id FROM input
    JOIN endpoints_eventtype kind ON kind.tenant_id = input.tenant_id AND kind.name = input.type
    WHERE NOT input.is_known AND (kind.mode <> 'subscribed' OR kind.lifecycle_sequence IS NOT NULL)
), stored AS (
    INSERT INTO deliveries_event (
        id, tenant_id, type, payload, content_type, key, caller_key, metadata, state, projection
    )
    SELECT id, tenant_id, type, payload, content_type, key, caller_key, metadata::jsonb, state, projection
    FROM input WHERE NOT EXISTS (SELECT FROM unknown WHERE unknown.id = input.id)
    ON CONFLICT (tenant_id, caller_key) WHERE caller_key IS NOT NULL DO NOTHING
    RETURNING id, sequence
), fan_out AS (
    INSERT INTO deliveries_delivery (
        id, event_id, endpoint_id, contract, trigger, attempts_made, turn, credits, state, last_error, outcome,
        finished_at
    )
    SELECT hub_uuid7(), input.id, endpoint.id, coalesce(contract.key, endpoint.contract), 'automatic', 0,
           CASE WHEN endpoint.ordered THEN stored.sequence END,
           CASE WHEN input.destination IS NULL THEN 0 ELSE coalesce(contract.credits, 0) END,
           CASE WHEN fate.is_active THEN 'pending' WHEN fate.is_dead THEN 'dead' ELSE 'held' END,
           CASE WHEN NOT fate.is_dead THEN ''
                WHEN tenant.webhooks_enabled THEN 'endpoint_inactive' ELSE 'webhooks_not_enabled' END,
           CASE WHEN fate.is_dead THEN contract.unsent ELSE '' END,
           CASE WHEN fate.is_dead THEN now() END
    FROM stored
    JOIN input USING (id)
    JOIN endpoints_tenant tenant ON tenant.id = input.tenant_id
    JOIN endpoints_endpoint endpoint
      ON endpoint.tenant_id = input.tenant_id
     AND CASE WHEN input.destination IS NULL
         THEN endpoint.event_types && input.patterns::varchar[]  -- none with NULL
         ELSE endpoint.id = input.destination END
    LEFT JOIN unnest(
        %(contract_name)s::text[], %(contract_key)s::text[], %(contract_when_inactive)s::text[],
        %(contract_unsent)s::text[], %(contract_credits)s::int[], %(contract_envelope)s::boolean[]
    ) AS contract (name, key, when_inactive, unsent, credits, envelope) ON contract.name = endpoint.contract
    CROSS JOIN LATERAL (
        SELECT is_active, NOT is_active AND coalesce(contract.when_inactive = 'dead', false) AS is_dead
        FROM (SELECT endpoint.status = 'active' AND tenant.webhooks_enabled AS is_active) now
    ) fate
    WHERE (fate.is_active OR contract.when_inactive IS DISTINCT FROM 'skip') AND endpoint.status <> 'deleted'
      AND NOT (input.state = 'projection_gap' AND coalesce(contract.envelope, false))
)
SELECT id, EXISTS (SELECT FROM unknown WHERE unknown.id = input.id) FROM input
WHERE NOT EXISTS (SELECT FROM stored WHERE stored.id = input.id)
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
       claimed.first_attempt_at, event.payload, event.content_type, endpoint.url, claimed.contract,
       CASE WHEN tenant.webhooks_enabled THEN endpoint.status ELSE 'off' END, secrets.sealed,
       event.tenant_id, event.type, event.accepted_at, event.sequence, event.key, event.projection,
       endpoint.failures_in_a_row > 0 OR endpoint.probe_at IS NOT NULL
FROM claimed
JOIN deliveries_event event ON event.id = claimed.event_id
JOIN endpoints_endpoint endpoint ON endpoint.id = claimed.endpoint_id
JOIN endpoints_tenant tenant ON tenant.id = endpoint.tenant_id
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(sealed ORDER BY id DESC), '{}') AS sealed FROM endpoints_endpointsecret
    WHERE endpoint_id = claimed.endpoint_id AND (expires_at IS NULL OR expires_at > now())
) secrets
"""

# Endpoint.is_paced
_IS_PACED = """(
    endpoint.rate_limit IS NOT NULL OR endpoint.max_in_flight IS NOT NULL OR endpoint.ordered
    OR endpoint.probe_at IS NOT NULL OR endpoint.recovered_at IS NOT NULL
)"""

# The next page of due deliveries after a remembered position, with what it takes to choose from them.
PAGE = f"""
SELECT due.due_at, due.id, due.endpoint_id, endpoint.tenant_id, {_IS_PACED}
FROM (
    SELECT id, due_at, endpoint_id FROM deliveries_delivery
    WHERE state = 'pending' AND priority = %(priority)s AND due_at <= now()
      AND (due_at, id) > (%(after)s, %(after_id)s)
    ORDER BY due_at, id LIMIT %(limit)s
) due
JOIN endpoints_endpoint endpoint ON endpoint.id = due.endpoint_id
ORDER BY due.due_at, due.id
"""

# The state is asked for in a way that no partial index covers: whenever the statistics say that little waits, the
# planner would walk over such an index, and so over all that waited and is not cleaned away yet.
CLAIM_THESE = f"""
WITH picked AS (
    SELECT id FROM deliveries_delivery
    WHERE id = ANY(%(ids)s) AND CASE state WHEN 'pending' THEN true ELSE false END FOR UPDATE SKIP LOCKED
), {_CLAIMED}
{_CLAIMED_ROWS}
"""

# The next due deliveries of endpoints that have more of them than may be in flight, each from its own position, and
# only those that have been due for as long as is asked.
CLAIM_LAGGING = f"""
WITH picked AS (
    SELECT due.id
    FROM unnest(%(endpoint)s::uuid[], %(after)s::timestamptz[], %(after_id)s::uuid[], %(free)s::int[],
                %(overdue)s::float8[]) AS lagging (endpoint_id, after, after_id, free, overdue)
    CROSS JOIN LATERAL (
        SELECT id FROM deliveries_delivery
        WHERE state = 'pending' AND endpoint_id = lagging.endpoint_id AND priority = %(priority)s
          AND due_at <= now() - lagging.overdue * interval '1 second'
          AND (due_at, id) > (lagging.after, lagging.after_id)
        ORDER BY due_at, id LIMIT lagging.free FOR UPDATE SKIP LOCKED
    ) due
), {_CLAIMED}
{_CLAIMED_ROWS}
"""

# Whose turn it is at each of these endpoints that get events in order, and for how long (seconds) it has been due.
HEADS = """
SELECT asked.endpoint_id, head.id, head.state = 'pending', extract(epoch FROM now() - head.due_at)::float8
FROM unnest(%(endpoint)s::uuid[]) AS asked (endpoint_id)
CROSS JOIN LATERAL (
    SELECT id, state, due_at FROM deliveries_delivery
    WHERE endpoint_id = asked.endpoint_id AND turn IS NOT NULL AND state IN ('pending', 'sending')
    ORDER BY turn, id LIMIT 1
) head
"""

IN_FLIGHT = """
SELECT asked.endpoint_id, count(delivery.id)::int FROM unnest(%(endpoint)s::uuid[]) AS asked (endpoint_id)
JOIN deliveries_delivery delivery ON delivery.endpoint_id = asked.endpoint_id AND delivery.state = 'sending'
GROUP BY 1
"""

# Results of attempts, each only while its claim still stands: a pump that lost its lease writes nothing. A retry for an
# endpoint that is not active any more is parked. The first arrival of a conditional event charges its credits.
RECORD = """
WITH result AS (
    SELECT * FROM json_to_recordset(%(results)s::json) AS result (
        delivery_id uuid, endpoint_id uuid, token uuid, state text, parked text, outcome text, unsent text,
        last_error text, wait float8, attempted boolean,
        id uuid, number smallint, started_at timestamptz, url text, address inet, status smallint, error text,
        detail text, lookup_us int, connect_us int, tls_us int, wait_us int, total_us int,
        request_headers jsonb, response_headers jsonb, response_body text, response_truncated boolean
    )
), judged AS (
    SELECT result.*, endpoint.tenant_id, is_parked,
           CASE WHEN NOT is_parked THEN result.state
                WHEN endpoint.status = 'deleted' THEN 'dead' ELSE result.parked END AS next,
           CASE WHEN tenant.webhooks_enabled THEN 'endpoint_inactive' ELSE 'webhooks_not_enabled' END AS inactive
    FROM result
    JOIN endpoints_endpoint endpoint ON endpoint.id = result.endpoint_id
    JOIN endpoints_tenant tenant ON tenant.id = endpoint.tenant_id
    CROSS JOIN LATERAL (
        SELECT result.state = 'pending' AND NOT (endpoint.status = 'active' AND tenant.webhooks_enabled) AS is_parked
    ) fate
), done AS (
    UPDATE deliveries_delivery delivery
    SET state = next,
        due_at = CASE next WHEN 'pending' THEN now() + result.wait * interval '1 second' ELSE delivery.due_at END,
        priority = CASE WHEN attempted THEN 1 ELSE delivery.priority END,
        finished_at = CASE WHEN next IN ('delivered', 'dead') THEN now() END,
        claim_token = NULL, lease_until = NULL,
        first_attempt_at = coalesce(delivery.first_attempt_at, CASE WHEN attempted THEN result.started_at END),
        attempts_made = CASE WHEN attempted THEN result.number ELSE delivery.attempts_made END,
        last_status = CASE WHEN attempted THEN result.status ELSE delivery.last_status END,
        outcome = CASE WHEN is_parked AND next = 'dead' THEN result.unsent ELSE result.outcome END,
        last_error = CASE WHEN is_parked AND next = 'dead' THEN result.inactive
                          WHEN attempted OR next = 'dead' THEN result.last_error ELSE delivery.last_error END
    FROM judged result
    WHERE delivery.id = result.delivery_id AND delivery.claim_token = result.token
    RETURNING result.*, delivery.event_id, delivery.credits, delivery.trigger
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
), charged AS (
    INSERT INTO deliveries_credit (id, tenant_id, event_id, endpoint_id, delivery_id, amount)
    SELECT hub_uuid7(), tenant_id, event_id, endpoint_id, delivery_id, credits
    FROM done WHERE credits > 0 AND next = 'delivered'
    ON CONFLICT (event_id, endpoint_id) DO NOTHING
)
SELECT delivery_id, trigger FROM done
"""

# How late (seconds) the delivery is that has been due longest, of those that wait for nobody but us: not for the pace
# of their endpoint, nor in the line of one that only fails. Looks at a bounded number of rows.
LATENESS = f"""
SELECT extract(epoch FROM now() - min(due.due_at))::float8
FROM unnest(ARRAY[0, 1]) AS asked (priority)
CROSS JOIN LATERAL (
    SELECT due_at, endpoint_id FROM deliveries_delivery
    WHERE state = 'pending' AND priority = asked.priority AND due_at <= now()
    ORDER BY due_at, id LIMIT %(limit)s
) due
JOIN endpoints_endpoint endpoint ON endpoint.id = due.endpoint_id
JOIN endpoints_tenant tenant ON tenant.id = endpoint.tenant_id
WHERE endpoint.status = 'active' AND tenant.webhooks_enabled AND endpoint.failures_in_a_row < %(failures)s
  AND NOT {_IS_PACED}
"""
LATENESS_ROWS = 2_000  # of each priority: a few milliseconds

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
    endpoint_status: str  # `off` while its tenant's webhooks are
    sealed: list[bytes]
    tenant_id: uuid.UUID
    type: str
    accepted_at: datetime
    sequence: int
    key: uuid.UUID
    projection: bytes | None
    is_failing: bool  # its endpoint


class Seen(NamedTuple):
    """A due delivery that a claim looks at. `is_paced`: its endpoint has a pace of its own."""

    due_at: datetime
    id: uuid.UUID
    endpoint_id: uuid.UUID
    tenant_id: uuid.UUID
    is_paced: bool


class Head(NamedTuple):
    """The delivery whose turn it is at an endpoint that gets events in order."""

    endpoint_id: uuid.UUID
    id: uuid.UUID
    is_pending: bool
    overdue: float


class Result(msgspec.Struct):
    """What one claimed delivery came to, in the columns of Attempt; `attempted` is false when nothing was tried.

    `parked` is the state instead of `pending` when its endpoint is not active any more, `unsent` its contract's word if
    that is the end. `gone`: the receiver wants nothing more. `disable_after`: its contract's rule.
    """

    delivery_id: uuid.UUID
    endpoint_id: uuid.UUID
    token: uuid.UUID
    state: str
    parked: str = "held"
    outcome: str = ""
    unsent: str = ""
    last_error: str = ""
    gone: bool = False
    disable_after: int | None = None
    is_failing: bool = False  # the endpoint, when it was claimed
    is_failure: bool = False  # of the endpoint
    wait: float = 0.0
    attempted: bool = True
    id: uuid.UUID | None = None
    number: int = 0
    started_at: datetime | None = None
    url: str = ""
    address: str | None = None
    status: int | None = None
    error: str = ""
    reason: str = ""  # the address rule's
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
    """An endpoint with more due than it may have in flight: where it stands, and how many more it may have now, of
    those overdue by so many seconds.
    """

    endpoint_id: uuid.UUID
    after: Position
    free: int
    overdue: float = 0.0


class EventQuerySet(models.QuerySet["Event"]):
    """Events."""

    def store(self, columns: Mapping[str, Array]) -> dict[uuid.UUID, bool]:
        """Stores events, given by column, with their deliveries, in one statement.

        Returns those that were not stored: true when there is more to know of the event first, false when its tenant
        had used its caller_key before. One event that the database refuses fails the whole statement.
        """
        return dict(run(self.db, STORE_EVENTS, columns))

    async def astore(self, columns: Mapping[str, Array], database: LoopConnection) -> dict[uuid.UUID, bool]:
        """As `store`, on a connection of an event loop."""
        return dict(await database.run(STORE_EVENTS, columns))

    def log(self) -> Self:
        """What tenants posted, without what the hub made itself and without payloads; `delivered` says of each whether
        one of its deliveries has arrived.
        """
        deliveries: Any = self.model._meta.get_field("deliveries").related_model
        arrived = deliveries.objects.filter(event=models.OuterRef("pk"), state="delivered")
        posted = self.exclude(state="control").defer("payload", "projection")
        return posted.annotate(delivered=models.Exists(arrived))


class DeliveryQuerySet(models.QuerySet["Delivery"]):
    """Deliveries."""

    def page(self, *, priority: int, after: Position, limit: int) -> list[Seen]:
        """The next due deliveries of a priority after a position, in order."""
        params = {"priority": priority, "after": after.due_at, "after_id": after.id, "limit": limit}
        return [Seen(*row) for row in run(self.db, PAGE, params)]

    def claim_these(self, ids: Sequence[uuid.UUID], *, token: uuid.UUID, lease: timedelta) -> list[Claimed]:
        """Claims these, as far as they wait."""
        return [Claimed(*row) for row in run(self.db, CLAIM_THESE, {"ids": list(ids), "token": token, "lease": lease})]

    def claim_lagging(
        self, lagging: Sequence[Lagging], *, priority: int, token: uuid.UUID, lease: timedelta
    ) -> list[Claimed]:
        """Claims the next due deliveries of each of these endpoints, as many as it has free slots."""
        params = {
            "endpoint": [one.endpoint_id for one in lagging],
            "after": [one.after.due_at for one in lagging],
            "after_id": [one.after.id for one in lagging],
            "free": [one.free for one in lagging],
            "overdue": [one.overdue for one in lagging],
            "priority": priority,
            "token": token,
            "lease": lease,
        }
        return [Claimed(*row) for row in run(self.db, CLAIM_LAGGING, params)]

    def give_back(self, token: uuid.UUID) -> int:
        """Ends a claim of which nothing was sent. Returns how many it had."""
        return self.filter(state="sending", claim_token=token).update(
            state="pending", claim_token=None, lease_until=None
        )

    def heads(self, endpoints: Iterable[uuid.UUID]) -> list[Head]:
        """Whose turn it is at each of these endpoints, as far as anything waits for one."""
        return [Head(*row) for row in run(self.db, HEADS, {"endpoint": list(endpoints)})]

    def put_in_order(self, endpoint_id: uuid.UUID) -> int:
        """Gives what waits for an endpoint its turn, now that it gets events in order. Returns how many had none."""
        event: Any = self.model._meta.get_field("event").related_model
        sequence = event.objects.filter(pk=models.OuterRef("event")).values("sequence")
        waiting = self.filter(endpoint=endpoint_id, turn=None, state__in=["pending", "sending", "held"])
        return waiting.update(turn=models.Subquery(sequence))

    def in_flight(self, endpoints: Iterable[uuid.UUID]) -> dict[uuid.UUID, int]:
        """How many requests each of these endpoints has in all workers."""
        return dict(run(self.db, IN_FLIGHT, {"endpoint": list(endpoints)}))

    def record(self, results: Sequence[Result]) -> dict[uuid.UUID, str]:
        """Writes results and their attempts. Returns the deliveries whose claim still stood, with their triggers."""
        return dict(run(self.db, RECORD, {"results": msgspec.json.encode(results).decode()}))

    def renew(self, claims: Mapping[uuid.UUID, uuid.UUID], lease: timedelta) -> None:
        """Extends the lease of these claims (delivery -> token) that still stand."""
        params = {"ids": list(claims), "tokens": list(set(claims.values())), "lease": lease}
        run(self.db, RENEW, params)

    def lateness(self) -> float:
        """For how long (seconds) the delivery that is due longest has been so, of those that wait for nobody but us."""
        [(seconds,)] = run_by_index(self.db, LATENESS, {"limit": LATENESS_ROWS, "failures": FAILURES_TO_OPEN})
        return float(seconds or 0)

    def database_now(self) -> datetime:
        """The database's clock, by which due times and leases run."""
        moment: datetime = run(self.db, "SELECT clock_timestamp()", {})[0][0]
        return moment

    def lost(self, limit: int) -> Self:
        """Deliveries whose lease ran out, locked, longest first. Their pump is dead or was cut off.

        `interruptions` says how many attempts of each have ended so before.
        """
        attempts: Any = self.model._meta.get_field("attempts").related_model
        interrupted = attempts.objects.filter(delivery=models.OuterRef("pk"), error="interrupted")
        before = interrupted.order_by().values("delivery").annotate(count=models.Count("pk")).values("count")
        return (
            self.filter(state="sending", lease_until__lt=Now())
            .annotate(interruptions=Coalesce(models.Subquery(before), 0))
            .select_related("endpoint")
            .select_for_update(skip_locked=True, of=("self",))
            .order_by("lease_until")[:limit]
        )

    def in_hand(self) -> Self:
        """Deliveries that are due or being sent."""
        return self.filter(models.Q(state="sending") | models.Q(state="pending", due_at__lte=Now()))

    def waiting_for(self, endpoints: Iterable[uuid.UUID], *, held: bool = False) -> Self:
        """Deliveries that wait for their next attempt at these endpoints, and with `held` what is held for them."""
        return self.filter(endpoint__in=list(endpoints), state__in=["pending", "held"] if held else ["pending"])
