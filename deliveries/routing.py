"""Where an event of a type with rules of its own goes, and within which limits: lifecycle, conditions, projection."""

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from deliveries import payloads
from deliveries.messages import envelope_bytes, rfc3339
from deliveries.models import Event
from endpoints.catalogues import INTERACTION, SEQUENCE
from endpoints.conditions import ConditionError, compile_condition, read_data
from endpoints.contracts import CONTRACTS
from endpoints.models import MAX_RULES, Endpoint, EventType, Rule
from endpoints.projection import ProjectionGap, project
from webhookhub.ids import typeid

logger = logging.getLogger(__name__)

RULES_SECONDS = 0.25  # for all rules of one event: other tenants' events wait meanwhile
NOT_TRIED = "It was not tried: the rules before it took too long."
MAX_DEPTH = 500  # of data that is looked into: half of what Python's reader takes on any stack
MAX_BYTES = 2 * payloads.MAX_PAYLOAD_BYTES  # of data that is cut before it is sent
MAX_INTERACTION_CHARS = 256  # Reservation.interaction
_VERSION = re.compile(r"\.(v[0-9]+)\Z")


class Place(NamedTuple):
    """A place in the life of an interaction, which one event takes."""

    interaction: str
    sequence: int
    version: str


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an event before it is stored.

    It is sent to `destination`, or with `fan_out` to all who ask for its type; `projection` is its data within the
    type's limits, `gap` says why there is none by the schema of `schema_at`.
    """

    is_known: bool = True
    state: str = Event.State.ACCEPTED
    fan_out: bool = True
    destination: uuid.UUID | None = None
    projection: bytes | None = None
    gap: str = ""
    schema_at: datetime | None = None
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """An event that its type forbids; nothing of it is stored. `pointer` leads to the member at fault."""

    status: int
    code: str
    detail: str
    pointer: str


def look_at(*, tenant_id: uuid.UUID, event_id: uuid.UUID, event_type: str, payload: bytes) -> Known | Rejected:
    """What a tenant's catalogue and rules say of an event whose type is in the catalogue."""
    kind = EventType.objects.filter(tenant=tenant_id, name=event_type).first()
    try:
        if kind is None or kind.is_plain:
            payloads.check_size(payload)
            return Known()
        payloads.check(payload, max_bytes=MAX_BYTES, max_depth=MAX_DEPTH)
        data = read_data(payload)
    except payloads.PayloadError as error:
        return Rejected(error.status, error.code, error.detail, f"/data{error.pointer}")
    if not isinstance(data, dict):
        return Rejected(400, "data_not_object", f"The data of {event_type} must be an object", "/data")
    if rejected := _check_sequence(kind, data):
        return rejected
    if data.get("isTest") is True or data.get("mode") == "MOCK":
        return Known(state=Event.State.TEST, fan_out=False)
    projected = _projected(kind, event_id, payload)
    if kind.mode == EventType.Mode.CONDITIONAL:
        rule = choose(tenant_id, event_type, view(event_id, event_type, data))
        return Known(fan_out=False, destination=rule.endpoint_id if rule else None, **projected)
    place = _place(kind, data)
    return place if isinstance(place, Rejected) else Known(place=place, **projected)


def _check_sequence(kind: EventType, data: dict[str, Any]) -> Rejected | None:
    expected, pointer = kind.lifecycle_sequence, f"/data/{SEQUENCE}"
    if expected is None:
        detail = f"{kind.name} has no place in a lifecycle; leave data.{SEQUENCE} out"
        return Rejected(400, "lifecycle_sequence_unexpected", detail, pointer) if SEQUENCE in data else None
    found = data.get(SEQUENCE)
    if found == expected and not isinstance(found, bool):
        return None
    return Rejected(400, "lifecycle_sequence_wrong", f"data.{SEQUENCE} of {kind.name} must be {expected}", pointer)


def _place(kind: EventType, data: dict[str, Any]) -> Place | Rejected:
    interaction, version = data.get(INTERACTION), _VERSION.search(kind.name)
    if not isinstance(interaction, str) or not interaction:
        detail = f"data.{INTERACTION} must be a text that is not empty: the interaction's id"
        return Rejected(400, "interaction_missing", detail, f"/data/{INTERACTION}")
    if len(interaction) > MAX_INTERACTION_CHARS or "\0" in interaction:  # too long to be sent, still one interaction
        interaction = f"sha256:{hashlib.sha256(interaction.encode()).hexdigest()}"
    assert kind.lifecycle_sequence is not None
    return Place(interaction, kind.lifecycle_sequence, version[1] if version else "")


# --- Limits


def _projected(kind: EventType, event_id: uuid.UUID, payload: bytes) -> dict[str, Any]:
    """Projection, state and gap of an event."""
    try:
        return {"projection": within_limits(kind, event_id, payload)}
    except ProjectionGap as gap:
        return {"state": Event.State.PROJECTION_GAP, "gap": str(gap)[:500], "schema_at": kind.schema_at}


def within_limits(kind: EventType, event_id: uuid.UUID, payload: bytes) -> bytes:
    """An event's data, an object, within the limits of its type. Raises ProjectionGap."""
    most = min(contract.max_body_bytes for contract in CONTRACTS.values() if contract.max_body_bytes)
    room = most - envelope_bytes(event_id, kind.tenant_id, kind.name)
    return project(payload, kind.schema, max_bytes=room).data


# --- Conditions


def view(event_id: uuid.UUID, event_type: str, data: Any) -> dict[str, Any]:
    """An event as conditions see it."""
    return {
        "id": typeid(Event.prefix, event_id),
        "type": event_type,
        "time": rfc3339(datetime.now(UTC)),
        "data": data,
    }


def _rules_for(tenant_id: uuid.UUID, event_type: str) -> list[Rule]:
    """The rules that events of a type are tried against, in order."""
    rules = Rule.objects.filter(tenant=tenant_id, event_type=event_type, enabled=True)
    rules = rules.exclude(endpoint__status=Endpoint.Status.DELETED).select_related("endpoint")
    return list(rules.order_by("position", "id")[:MAX_RULES])


class Trial(NamedTuple):
    """What a rule makes of an event; `reason` says why it does not match."""

    rule: Rule
    matches: bool
    reason: str


def try_rules(tenant_id: uuid.UUID, event_type: str, event: dict[str, Any]) -> Iterator[Trial]:
    """What a tenant's rules make of an event, in order: the first that matches counts.

    Those that are not reached within RULES_SECONDS do not match.
    """
    end = time.monotonic() + RULES_SECONDS
    for rule in _rules_for(tenant_id, event_type):
        if time.monotonic() > end:
            yield Trial(rule, False, NOT_TRIED)
            continue
        try:
            condition = compile_condition(rule.condition)
        except ConditionError as error:  # an earlier release took it, or it came past our checks
            logger.error("rule %s cannot be read and matches nothing: %s", rule.typeid, error)
            yield Trial(rule, False, str(error))
        else:
            yield Trial(rule, *condition.explain(event))


def choose(tenant_id: uuid.UUID, event_type: str, event: dict[str, Any]) -> Rule | None:
    """The first rule that matches."""
    last = None
    for last in try_rules(tenant_id, event_type, event):
        if last.matches:
            return last.rule
    if last and last.reason == NOT_TRIED:
        logger.error("rule %s was not tried: the ones before it took too long", last.rule.typeid)
    return None
