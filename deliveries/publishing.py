"""Taking events in: stored with their deliveries, in one statement. API, fast lane and programs call these."""

import functools
import logging
import uuid
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import msgspec
import psycopg
from django.db import DatabaseError, InterfaceError, OperationalError, connection, models, transaction
from django.utils.timezone import now

from deliveries.models import Delivery, Event, ProjectionGap, Reservation
from deliveries.payloads import MAX_PAYLOAD_BYTES
from deliveries.routing import Known, Rejected, choose, look_at, view, within_limits
from deliveries.services import announce_on_commit, beginning, is_active
from endpoints.conditions import read_data
from endpoints.contracts import CONTRACTS
from endpoints.models import Endpoint, EventType
from endpoints.projection import ProjectionGap as Unprojectable
from endpoints.services import contract_keys
from webhookhub.database import Array, LoopConnection, array
from webhookhub.ids import uuid4_bytes, uuid7

logger = logging.getLogger(__name__)


class NewEvent(msgspec.Struct, frozen=True):
    """An event to publish, validated: the payload's own bytes, and what the caller said about it."""

    tenant_id: uuid.UUID
    type: str
    payload: bytes
    content_type: str = "application/json"
    caller_key: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    id: uuid.UUID = msgspec.field(default_factory=uuid7)


@dataclass(frozen=True, slots=True)
class Published:
    """The event is stored. `repeated`: it had been before, under the same caller_key, with the same content, or at the
    same place of an interaction's life.
    """

    event_id: uuid.UUID
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class KeyReused:
    """Refused: the tenant has used this caller_key for an event with other content, `event_id`."""

    event_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class Refused:
    """Refused by the database: nothing of this event is stored. `transient`: the same may work in a moment; if the
    connection was lost, it may be stored after all.
    """

    transient: bool


Publishing = Published | KeyReused | Rejected | Refused


def publish_events(items: Sequence[NewEvent]) -> list[Publishing]:
    """Stores events with a delivery for each endpoint that wants them, and wakes the pumps.

    Inside a caller's transaction, what it stores lives and dies with that transaction, and the wake-up waits for its
    commit. An event that is refused is refused alone: the others are stored all the same.
    """
    fit = [item for item in items if _is_fit(item)]
    results = iter(_publish_plain(fit) if fit else ())
    first = [next(results) if _is_fit(item) else None for item in items]
    if any(isinstance(result, Published) for result in first):
        announce_on_commit()
    return [result or _publish_known(item) for item, result in zip(items, first, strict=True)]


def _is_fit(item: NewEvent) -> bool:
    """Whether it may be stored as it is, unless its type has rules of its own; larger ones only if it has them cut."""
    return len(item.payload) <= MAX_PAYLOAD_BYTES


def _publish_plain(items: Sequence[NewEvent]) -> list[Publishing | None]:
    """Stores events in one statement. None for those of types with rules of their own, left to `_publish_known`."""
    try:
        left = _store(items, [_PLAIN] * len(items))
    except (DatabaseError, InterfaceError) as error:
        if _is_away(error):
            logger.error("%d events refused, the database is away: %s", len(items), error)
            return [Refused(transient=True)] * len(items)
        if len(items) > 1:
            return [_publish_plain([item])[0] for item in items]
        logger.error("event %s refused by the database: %s", items[0].id, error)
        return [Refused(transient=False)]
    return [_first_result(item, left.get(item.id)) for item in items]


async def apublish_plain(items: Sequence[NewEvent], database: LoopConnection) -> list[Published | Refused | None]:
    """Stores events in one statement on a connection of an event loop, and wakes nobody, which is left to the caller.

    None for those that are left to `publish_events`, one by one: those that are too large or of types with rules of
    their own, those whose caller_key was used before, and all of them when the database refuses the statement.
    """
    fit = [item for item in items if _is_fit(item)]
    try:
        left = await Event.objects.all().astore(_statement(fit, [_PLAIN] * len(fit)), database) if fit else {}
    except (DatabaseError, InterfaceError) as error:
        if not _is_away(error):
            return [None] * len(items)
        logger.error("%d events refused, the database is away: %s", len(items), error)
        return [Refused(transient=True)] * len(items)
    if left or len(fit) < len(items):
        done = {item.id for item in fit} - left.keys()
        return [Published(item.id) if item.id in done else None for item in items]
    return [Published(item.id) for item in items]


def _is_away(error: Exception) -> bool:
    """Whether nobody knows what became of a statement. A deadlock is of two that had the same keys in other orders: one
    by one neither waits for the other.
    """
    is_deadlock = isinstance(error.__cause__, psycopg.errors.DeadlockDetected)
    return isinstance(error, OperationalError | InterfaceError) and not is_deadlock


_PLAIN = Known(is_known=False)


def _first_result(item: NewEvent, is_unknown: bool | None) -> Publishing | None:
    if is_unknown is None:
        return Published(item.id)
    return None if is_unknown else _earlier(item)


def _store(items: Sequence[NewEvent], known: Sequence[Known]) -> dict[uuid.UUID, bool]:
    # One statement is a transaction of its own; within a caller's it needs a savepoint, to be refused alone.
    with transaction.atomic() if connection.in_atomic_block else nullcontext():
        return Event.objects.all().store(_statement(items, known))


def _statement(items: Sequence[NewEvent], known: Sequence[Known]) -> dict[str, Array]:
    return {**_columns(items, known), **contract_columns()}


def _publish_known(item: NewEvent) -> Publishing:
    """Publishes an event of a type about which there is more to know: where it goes, and within which limits."""
    try:
        with transaction.atomic():
            known = look_at(tenant_id=item.tenant_id, event_id=item.id, event_type=item.type, payload=item.payload)
            if isinstance(known, Rejected):
                return known
            if _store([item], [known]):
                return _earlier(item)
            announce_on_commit()
            if known.gap and known.schema_at:
                ProjectionGap.objects.create(event_id=item.id, detail=known.gap, schema_at=known.schema_at)
            if known.place and (first := _reserve(item, known)):
                transaction.set_rollback(True)
                return first
    except (OperationalError, InterfaceError) as error:
        logger.error("an event is refused, the database is away: %s", error)
        return Refused(transient=True)
    except DatabaseError as error:
        logger.error("event %s refused by the database: %s", item.id, error)
        return Refused(transient=False)
    except Exception:  # a fault of ours is this event's alone: those published with it are stored and to be told so
        logger.exception("event %s refused by a fault of ours", item.id)
        return Refused(transient=False)
    return Published(item.id)


def _reserve(item: NewEvent, known: Known) -> Published | Rejected | None:
    """Takes an event's place in the life of its interaction; what is to be answered when another has it."""
    assert known.place
    place = {"tenant_id": item.tenant_id, **known.place._asdict()}
    Reservation.objects.bulk_create([Reservation(**place, event_id=item.id)], ignore_conflicts=True)
    holder = Reservation.objects.select_related("event").get(**place).event
    if holder.pk == item.id:
        return None
    if holder.type == item.type:
        return Published(holder.pk, repeated=True)
    detail = (
        f"Interaction {known.place.interaction!r} has ended with {holder.type} ({holder.typeid}); "
        f"{item.type} excludes it"
    )
    return Rejected(409, "lifecycle_conflict", detail, "/type")


def contract_columns() -> dict[str, Array]:
    """What the fan-out needs of the contracts that endpoints may follow."""
    return _contract_columns(tuple(contract_keys().items()))


@functools.lru_cache(maxsize=1)  # a key stands for the whole contract
def _contract_columns(keys: tuple[tuple[str, str], ...]) -> dict[str, Array]:
    known = [CONTRACTS[name] for name, _ in keys]
    return {
        "contract_name": _texts(name for name, _ in keys),
        "contract_key": _texts(key for _, key in keys),
        "contract_when_inactive": _texts(one.when_inactive for one in known),
        "contract_unsent": _texts(one.state_after("terminal") for one in known),
        "contract_credits": array("int4", (one.credits.to_bytes(4, "big") for one in known)),
        "contract_envelope": _booleans(bool(one.envelope) for one in known),
    }


def _columns(items: Sequence[NewEvent], known: Sequence[Known]) -> dict[str, Array]:
    pairs = list(zip(items, known, strict=True))
    return {
        "id": array("uuid", [item.id.bytes for item in items]),
        "tenant": array("uuid", [item.tenant_id.bytes for item in items]),
        "type": _texts(item.type for item in items),
        "payload": array("bytea", [item.payload for item in items]),
        "content_type": _texts(item.content_type for item in items),
        "key": array("uuid", [uuid4_bytes() for _ in items]),
        "caller_key": _texts(item.caller_key for item in items),
        "metadata": array("text", [msgspec.json.encode(item.metadata) for item in items]),
        "patterns": _texts(_patterns(item.type) if one.fan_out else None for item, one in pairs),
        **(_plain_columns(len(known)) if all(one is _PLAIN for one in known) else _known_columns(known)),
    }


@functools.lru_cache(maxsize=300)
def _plain_columns(count: int) -> dict[str, Array]:
    return _known_columns([_PLAIN] * count)


def _known_columns(known: Sequence[Known]) -> dict[str, Array]:
    return {
        "state": _texts(one.state for one in known),
        "projection": array("bytea", [one.projection for one in known]),
        "destination": array("uuid", [one.destination.bytes if one.destination else None for one in known]),
        "is_known": _booleans(one.is_known for one in known),
    }


def _texts(texts: Iterable[str | None]) -> Array:
    return array("text", [None if text is None else text.encode() for text in texts])


def _booleans(values: Iterable[bool]) -> Array:
    return array("bool", [b"\1" if value else b"\0" for value in values])


def pattern_list(event_type: str) -> list[str]:
    """Everything an endpoint may ask for that this type answers to: *, a.*, a.b.*, a.b.c."""
    words = event_type.split(".")
    return ["*", *(".".join(words[:count]) + ".*" for count in range(1, len(words))), event_type]


@functools.lru_cache(maxsize=1_000)
def _patterns(event_type: str) -> str:
    """As a PostgreSQL array; no pattern holds a quote."""
    return "{" + ",".join(f'"{pattern}"' for pattern in pattern_list(event_type)) + "}"


def _earlier(item: NewEvent) -> Publishing:
    """The answer for an event whose caller_key was there before it."""
    try:
        event = Event.objects.filter(tenant=item.tenant_id, caller_key=item.caller_key).first()
    except (DatabaseError, InterfaceError) as error:
        logger.error("an event cannot be compared with the one before it: %s", error)
        return Refused(transient=True)
    if event is None:
        return Refused(transient=True)  # its transaction was rolled back, or it was removed, since we clashed with it
    payload = item.payload if event.payload_deleted_at else bytes(event.payload)  # nobody knows any more what it was
    same = (event.type, payload, event.content_type, event.metadata) == (
        item.type,
        item.payload,
        item.content_type,
        item.metadata,
    )
    return Published(event.id, repeated=True) if same else KeyReused(event.id)


def repair_projection_gaps(limit: int = 200) -> int:
    """Projects events again whose type's schema is another than the one they did not fit, and returns how many fit.

    Each is then sent to the endpoints that would have got it, as far as they were active then and are now.
    """
    schema_at = EventType.objects.filter(tenant=models.OuterRef("event__tenant"), name=models.OuterRef("event__type"))
    gaps = ProjectionGap.objects.annotate(now_at=models.Subquery(schema_at.values("schema_at")[:1]))
    changed = gaps.filter(
        event__state=Event.State.PROJECTION_GAP, event__payload_deleted_at=None, now_at__isnull=False
    ).exclude(schema_at=models.F("now_at"))
    repaired = 0
    for pk in list(changed.order_by("id").values_list("event", flat=True)[:limit]):
        try:
            with transaction.atomic():
                event = Event.objects.select_for_update(skip_locked=True, no_key=True).filter(pk=pk).first()
                repaired += bool(event and _repair(event))
        except (OperationalError, InterfaceError):
            raise
        except Exception:  # the others must not wait for this one
            logger.exception("projection gap of event %s cannot be repaired", pk)
    return repaired


def _repair(event: Event) -> bool:
    kind = EventType.objects.filter(tenant=event.tenant_id, name=event.type).first()
    if event.state != Event.State.PROJECTION_GAP or event.payload_deleted_at or kind is None:
        return False
    gap = event.gap
    gap.tried_at, gap.schema_at = now(), kind.schema_at
    try:
        event.projection = within_limits(kind, event.pk, bytes(event.payload))
    except Unprojectable as error:
        gap.detail = str(error)[:500]
        gap.save(update_fields=["tried_at", "schema_at", "detail"])
        return False
    gap.repaired_at = gap.tried_at
    gap.save(update_fields=["tried_at", "schema_at", "repaired_at"])
    event.state = Event.State.ACCEPTED
    event.save(update_fields=["projection", "state"])
    _fan_out_late(event, kind)
    return True


def _fan_out_late(event: Event, kind: EventType) -> None:
    """Makes the deliveries that a gap has kept back. An endpoint that came or came back later gets none."""
    enveloped = [name for name, contract in CONTRACTS.items() if contract.envelope]
    out_of_use = [Endpoint.Status.DELETED, Endpoint.Status.UNVERIFIED]
    endpoints = Endpoint.objects.filter(
        tenant=event.tenant_id, contract__in=enveloped, status_at__lte=event.accepted_at
    ).exclude(status__in=out_of_use)
    costs = 0
    if kind.mode == EventType.Mode.CONDITIONAL:
        rule = choose(event.tenant_id, event.type, view(event.pk, event.type, read_data(bytes(event.payload))))
        endpoints, costs = endpoints.filter(pk__in=[rule.endpoint_id] if rule else []), 1
    else:
        endpoints = endpoints.filter(event_types__overlap=pattern_list(event.type))
    Delivery.objects.bulk_create(
        Delivery(credits=costs * CONTRACTS[endpoint.contract].credits, **beginning(endpoint, event))
        for endpoint in endpoints.select_related("tenant")
        if is_active(endpoint) or endpoint.when_inactive != "skip"
    )
    announce_on_commit()
