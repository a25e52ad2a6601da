"""What is done with events and deliveries. Admin, API, jobs and commands all call these."""

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import DatabaseError, InterfaceError, OperationalError, connection, models, transaction
from django.db.models.functions import Now
from django.utils.timezone import now

from deliveries.models import Delivery, Event, ProjectionGap, ReplayJob, Reservation
from deliveries.querysets import Result
from deliveries.routing import Known, Rejected, choose, look_at, view, within_limits
from deliveries.wake import announce
from endpoints.conditions import read_data
from endpoints.contracts import CONTRACTS, STANDARD, Action, Contract, Verdict, dead_in_a_row, decide, last_error
from endpoints.models import Endpoint, EventType, Tenant
from endpoints.projection import ProjectionGap as Unprojectable
from endpoints.services import SYSTEM, Actor, contract_keys, contract_of, record_audit, set_status
from webhookhub.ids import typeid, uuid7

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to publish, validated: the payload's own bytes, and what the caller said about it."""

    tenant_id: uuid.UUID
    type: str
    payload: bytes
    content_type: str = "application/json"
    caller_key: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    id: uuid.UUID = field(default_factory=uuid7)


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
    """Refused by the database: nothing of this event is stored. `transient`: the same may work in a moment."""

    transient: bool


Publishing = Published | KeyReused | Rejected | Refused


def publish_events(items: Sequence[NewEvent]) -> list[Publishing]:
    """Stores events with a delivery for each endpoint that wants them, all in one statement, and wakes the pumps.

    Inside a caller's transaction, what it stores lives and dies with that transaction, and the wake-up waits for its
    commit. An event that the database refuses is refused alone: the others are stored all the same. Events of types
    with rules of their own (deliveries.routing) are stored one by one after the others.
    """
    try:
        stored = _store(items, [_PLAIN] * len(items))
    except (OperationalError, InterfaceError) as error:
        logger.error("%d events refused, the database is away: %s", len(items), error)
        return [Refused(transient=True)] * len(items)
    except DatabaseError as error:
        if len(items) > 1:
            return [publish_events([item])[0] for item in items]
        logger.error("event %s refused by the database: %s", items[0].id, error)
        return [Refused(transient=False)]
    return [_outcome(item, stored.get(item.id)) for item in items]


_PLAIN = Known(is_known=False)


def _outcome(item: NewEvent, is_stored: bool | None) -> Publishing:
    if is_stored:
        return Published(item.id)
    return _earlier(item) if is_stored is None else _publish_known(item)


def _store(items: Sequence[NewEvent], known: Sequence[Known]) -> dict[uuid.UUID, bool]:
    # One statement is a transaction of its own; within a caller's it needs a savepoint, to be refused alone.
    with transaction.atomic() if connection.in_atomic_block else nullcontext():
        stored = Event.objects.all().store({**_columns(items, known), **contract_columns()})
    if any(stored.values()):
        announce_on_commit()
    return stored


def _publish_known(item: NewEvent) -> Publishing:
    """Publishes an event of a type about which there is more to know: where it goes, and within which limits."""
    try:
        with transaction.atomic():
            known = look_at(tenant_id=item.tenant_id, event_id=item.id, event_type=item.type, payload=item.payload)
            if isinstance(known, Rejected):
                return known
            if _store([item], [known]) != {item.id: True}:
                return _earlier(item)
            if known.gap:
                ProjectionGap.objects.create(event_id=item.id, detail=known.gap)
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


def announce_on_commit() -> None:
    """Wakes the pumps when what is being stored can be seen. Should that fail, they find it by themselves."""
    transaction.on_commit(announce, robust=True)


def contract_columns() -> dict[str, list[Any]]:
    """What the fan-out needs of the contracts that endpoints may follow."""
    keys = contract_keys()
    known = [CONTRACTS[name] for name in keys]
    return {
        "contract_name": list(keys),
        "contract_key": list(keys.values()),
        "contract_when_inactive": [one.when_inactive for one in known],
        "contract_unsent": [one.state_after("terminal") for one in known],
        "contract_credits": [one.credits for one in known],
        "contract_envelope": [one.envelope for one in known],
    }


def _columns(items: Sequence[NewEvent], known: Sequence[Known]) -> dict[str, list[object]]:
    pairs = list(zip(items, known, strict=True))
    return {
        "id": [item.id for item in items],
        "tenant": [item.tenant_id for item in items],
        "type": [item.type for item in items],
        "payload": [item.payload for item in items],
        "content_type": [item.content_type for item in items],
        "key": [uuid.uuid4() for _ in items],
        "caller_key": [item.caller_key for item in items],
        "metadata": [msgspec.json.encode(item.metadata).decode() for item in items],
        "patterns": [_patterns(item.type) if one.fan_out else None for item, one in pairs],
        "state": [one.state for one in known],
        "projection": [one.projection for one in known],
        "destination": [one.destination for one in known],
        "is_known": [one.is_known for one in known],
    }


def pattern_list(event_type: str) -> list[str]:
    """Everything an endpoint may ask for that this type answers to: *, a.*, a.b.*, a.b.c."""
    words = event_type.split(".")
    return ["*", *(".".join(words[:count]) + ".*" for count in range(1, len(words))), event_type]


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
    same = (event.type, bytes(event.payload), event.content_type, event.metadata) == (
        item.type,
        item.payload,
        item.content_type,
        item.metadata,
    )
    return Published(event.id, repeated=True) if same else KeyReused(event.id)


def repair_projection_gaps(limit: int = 200) -> int:
    """Projects events again whose type's schema has changed since it was found not to fit, and returns how many fit.

    Each is then sent to the endpoints that would have got it, as far as they were active then and are now.
    """
    changed = Event.objects.filter(
        models.Exists(
            EventType.objects.filter(
                tenant=models.OuterRef("tenant"),
                name=models.OuterRef("type"),
                schema_at__gt=models.OuterRef("gap__tried_at"),
            )
        ),
        state=Event.State.PROJECTION_GAP,
    )
    repaired = 0
    for pk in list(changed.order_by("id").values_list("pk", flat=True)[:limit]):
        with transaction.atomic():
            event = Event.objects.select_for_update(skip_locked=True, no_key=True).filter(pk=pk).first()
            repaired += bool(event and event.state == Event.State.PROJECTION_GAP and _repair(event))
    return repaired


def _repair(event: Event) -> bool:
    gap, kind = event.gap, EventType.objects.get(tenant=event.tenant_id, name=event.type)
    gap.tried_at = now()
    try:
        event.projection = within_limits(kind, event.pk, bytes(event.payload))
    except Unprojectable as error:
        gap.detail = str(error)[:500]
        gap.save(update_fields=["tried_at", "detail"])
        return False
    gap.repaired_at = gap.tried_at
    gap.save(update_fields=["tried_at", "repaired_at"])
    event.state = Event.State.ACCEPTED
    event.save(update_fields=["projection", "state"])
    _fan_out_late(event, kind)
    return True


def _fan_out_late(event: Event, kind: EventType) -> None:
    """Makes the deliveries that a gap has kept back. An endpoint that came or came back later gets none."""
    enveloped = [name for name, contract in CONTRACTS.items() if contract.envelope]
    endpoints = Endpoint.objects.filter(
        tenant=event.tenant_id,
        tenant__webhooks_enabled=True,
        contract__in=enveloped,
        status=Endpoint.Status.ACTIVE,
        status_at__lte=event.accepted_at,
    ).select_related("tenant")
    costs = 0
    if kind.mode == EventType.Mode.CONDITIONAL:
        rule = choose(event.tenant_id, event.type, view(event.pk, event.type, read_data(bytes(event.payload))))
        endpoints, costs = endpoints.filter(pk__in=[rule.endpoint_id] if rule else []), 1
    else:
        endpoints = endpoints.filter(event_types__overlap=pattern_list(event.type))
    Delivery.objects.bulk_create(
        Delivery(event=event, credits=costs * CONTRACTS[endpoint.contract].credits, **_beginning(endpoint))
        for endpoint in endpoints
    )
    announce_on_commit()


# --- Results of attempts


# The state of a delivery after each verdict; all ways to end without success are one state to the queue.
_STATES = {"delivered": Delivery.State.DELIVERED, "retry": Delivery.State.PENDING, "requeue": Delivery.State.PENDING}
REQUEUE_SECONDS = 5.0  # until a delivery that we lacked descriptors or memory for is tried again


def judge(contract: Contract, result: Result, *, first_started: datetime, retry_after: str | None) -> Verdict:
    """Sets what becomes of a delivery by the contract's verdict on a result, and returns the verdict.

    The attempt has ended now; `first_started` is the start of the delivery's first attempt.
    """
    verdict = decide(
        contract,
        delivery=typeid(Delivery.prefix, result.delivery_id),
        attempt=result.number,
        first_started=int(first_started.timestamp() * 1000),
        ended=int(time.time() * 1000),
        status=result.status,
        error=result.error,
        retry_after=retry_after,
    )
    result.state = _STATES.get(verdict.action, Delivery.State.DEAD)
    result.wait = verdict.wait / 1000
    park(result, contract)
    if verdict.action == "requeue":
        result.attempted, result.wait = False, REQUEUE_SECONDS
        return verdict
    if verdict.action != "delivered":
        result.last_error = last_error(contract, status=result.status, error=result.error, reason=result.reason)
    if verdict.action != "retry":
        result.outcome = contract.state_after(verdict.action)
        result.disable_after = contract.disable_after
    result.gone = verdict.action == "disable"
    return verdict


def park(result: Result, contract: Contract | None) -> None:
    """Sets what a delivery comes to in place of a retry, should its endpoint not be active any more."""
    if contract is None:
        return
    if contract.control:
        result.parked = Delivery.State.PENDING
    elif contract.when_inactive == "dead":
        result.parked = Delivery.State.DEAD
    result.unsent = contract.state_after("terminal")


def record_results(results: Sequence[Result]) -> None:
    """Writes results whose claims still stand, and disables the endpoints whose contracts ask for it after them.

    A result that the database refuses is written without what was seen of the exchange: to leave it unwritten would
    send the delivery again and again.
    """
    try:
        stood = _record(results)
    except (OperationalError, InterfaceError):
        raise
    except DatabaseError:
        if len(results) > 1:
            for result in results:
                record_results([result])
            return
        logger.exception("the result of delivery %s cannot be recorded as it is", results[0].delivery_id)
        try:
            stood = _record([_without_exchange(results[0])])
        except (OperationalError, InterfaceError):
            raise
        except DatabaseError:
            # Its row contradicts itself. It must not stop the others, nor be sent for ever.
            dead = {"state": Delivery.State.DEAD, "attempted": False, "gone": False, "disable_after": None}
            stood = _record([msgspec.structs.replace(results[0], **dead)])
    if stood < len(results):
        logger.warning("%d results dropped: their leases had run out", len(results) - stood)


def _record(results: Sequence[Result]) -> int:
    gone = [result.endpoint_id for result in results if result.gone]
    counted = [result for result in results if result.disable_after]
    with transaction.atomic() if gone or counted or connection.in_atomic_block else nullcontext():
        stood = Delivery.objects.all().record(results)
        if gone:
            reason = "gone: the receiver answered 410"
            disable_endpoints(Endpoint.objects.filter(pk__in=gone), actor=SYSTEM, reason=reason)
        if counted:
            _count_dead([one for one in counted if stood.get(one.delivery_id) == Delivery.Trigger.AUTOMATIC])
    return len(stood)


def _count_dead(results: Sequence[Result]) -> None:
    """Counts each endpoint's dead deliveries in a row, and disables those that have as many as their contract allows.

    Neither replays nor tests come here, nor what was never sent because an endpoint or its tenant was off.
    """
    dead = {one.endpoint_id for one in results if one.state == Delivery.State.DEAD and one.attempted}
    concerned = models.Q(pk__in=dead) | models.Q(pk__in={one.endpoint_id for one in results}, dead_in_a_row__gt=0)
    for endpoint in Endpoint.objects.filter(concerned).select_for_update(no_key=True).order_by("pk"):
        count, disabled, answered = endpoint.dead_in_a_row, False, False
        for one in results:
            if one.endpoint_id == endpoint.pk:
                assert one.disable_after
                outcome: Action = "exhausted" if one.state == Delivery.State.DEAD else "delivered"
                count, is_last = dead_in_a_row(one.disable_after, count, outcome if one.attempted else "unsent")
                disabled, answered = disabled or is_last, answered or one.status is not None
        Endpoint.objects.filter(pk=endpoint.pk).update(dead_in_a_row=count)
        if disabled and endpoint.status == Endpoint.Status.ACTIVE and (answered or not _is_outage()):
            reason = f"auto-disabled: {count} deliveries in a row are dead"
            disable_endpoints(Endpoint.objects.filter(pk=endpoint.pk), actor=SYSTEM, reason=reason)


OUTAGE_ENDPOINTS = 10  # fewer than that say nothing about us


def _is_outage() -> bool:
    """Whether most endpoints fail at once, which is then more likely a fault of ours than of each of them."""
    counted = [name for name, contract in CONTRACTS.items() if contract.disable_after]
    active = Endpoint.objects.filter(status=Endpoint.Status.ACTIVE, contract__in=counted)
    failing = active.filter(dead_in_a_row__gt=0).count()
    if failing < OUTAGE_ENDPOINTS or failing * 2 <= active.count():
        return False
    logger.error("%d endpoints fail at once without an answer: none is disabled for it. Check our network", failing)
    return True


def _without_exchange(result: Result) -> Result:
    return msgspec.structs.replace(
        result,
        address=None,
        detail="The database refused what was seen of this exchange.",
        request_headers=(),
        response_headers=(),
        response_body=None,
    )


def reclaim_lost(limit: int = 500) -> int:
    """Takes back deliveries whose lease ran out: the attempt is recorded as `interrupted`, the next one is due now.

    Returns how many. Nobody knows whether the receiver got the interrupted attempt; it counts as one.
    """
    with transaction.atomic():
        results = []
        for delivery in Delivery.objects.all().lost(limit):
            assert delivery.claim_token is not None
            result = Result(
                delivery_id=delivery.pk,
                endpoint_id=delivery.endpoint_id,
                token=delivery.claim_token,
                state=Delivery.State.PENDING,
                id=uuid7(),
                number=delivery.attempts_made + 1,
                started_at=delivery.claimed_at,
                url=delivery.endpoint.url,
                error="interrupted",
                detail="The worker stopped during this attempt; the receiver may or may not have got it.",
            )
            contract = contract_of(delivery.contract) or STANDARD
            first_started = delivery.first_attempt_at or delivery.claimed_at or now()
            judge(contract, result, first_started=first_started, retry_after=None)
            result.wait = 0.0
            results.append(result)
        if results:
            record_results(results)
            logger.warning("%d deliveries taken back from workers that stopped", len(results))
    return len(results)


# --- Endpoints: pausing, resuming, disabling


def pause_endpoints(endpoints: models.QuerySet[Endpoint], *, actor: Actor, reason: str) -> int:
    """Stops deliveries to these endpoints: what waits is held, and so is what comes. Returns how many it paused."""
    return _stop(endpoints, Endpoint.Status.PAUSED, actor, reason)


def disable_endpoints(endpoints: models.QuerySet[Endpoint], *, actor: Actor, reason: str) -> int:
    """As `pause_endpoints`, for endpoints that their receiver or their failures have put out of use."""
    return _stop(endpoints, Endpoint.Status.DISABLED, actor, reason)


def _stop(endpoints: models.QuerySet[Endpoint], status: Endpoint.Status, actor: Actor, reason: str) -> int:
    with transaction.atomic():
        changed = set_status(endpoints=endpoints, status=status, actor=actor, reason=reason)
        _park_waiting([endpoint.pk for endpoint in changed], "endpoint_inactive")
    return len(changed)


def _park_waiting(endpoints: Iterable[uuid.UUID], error: str, *, for_good: bool = False) -> None:
    """What waits for endpoints that nothing is sent to any more is held, or dead with this error, as contracts say;
    `for_good`, it is dead, and so is what was held.
    """
    # Those that a pump has in hand are passed over, or the two could wait for each other: it holds what it claims.
    waiting = Delivery.objects.all().waiting_for(endpoints, held=for_good)
    waiting = waiting.select_for_update(skip_locked=True).order_by()
    by_contract: dict[str, list[uuid.UUID]] = {}
    for pk, key in waiting.values_list("pk", "contract"):
        by_contract.setdefault(key, []).append(pk)
    for key, ids in by_contract.items():
        contract = contract_of(key)
        if contract and contract.control and not for_good:
            continue
        if for_good or (contract and contract.when_inactive == "dead"):
            values = {"state": Delivery.State.DEAD, "finished_at": Now(), **_unsent(contract or STANDARD, error)}
        else:
            values = {"state": Delivery.State.HELD}
        Delivery.objects.filter(pk__in=ids).update(**values)


def _unsent(contract: Contract, error: str) -> dict[str, str]:
    """How a delivery ends that was never sent."""
    return {"outcome": contract.state_after("terminal"), "last_error": last_error(contract, status=None, error=error)}


def delete_endpoint(*, endpoint: Endpoint, actor: Actor, reason: str = "") -> bool:
    """Takes an endpoint out of use for good, with its secrets and keys; what waits for it is dead. False if it was.

    What is known of its deliveries stays.
    """
    with transaction.atomic():
        this = Endpoint.objects.filter(pk=endpoint.pk)
        changed = set_status(endpoints=this, status=Endpoint.Status.DELETED, actor=actor, reason=reason)
        _park_waiting([one.pk for one in changed], "endpoint_deleted", for_good=True)
        endpoint.secrets.all().delete()
        endpoint.api_keys.all().delete()
        endpoint.rules.update(enabled=False)
    return bool(changed)


def switch_webhooks(*, tenant: Tenant, enabled: bool, actor: Actor, reason: str = "") -> bool:
    """Switches a tenant's webhooks on or off; off, what waits for its endpoints stops as contracts say.

    Events are taken in all the same. False when it was so before.
    """
    with transaction.atomic():
        if not Tenant.objects.filter(pk=tenant.pk, webhooks_enabled=not enabled).update(webhooks_enabled=enabled):
            return False
        record_audit(
            actor=actor,
            action="tenant.webhooks_on" if enabled else "tenant.webhooks_off",
            of=tenant,
            tenant=tenant,
            reason=reason,
        )
        endpoints = Endpoint.objects.filter(tenant=tenant)
        if enabled:
            _release(Delivery.objects.filter(endpoint__tenant=tenant))
        else:
            _park_waiting(endpoints.values_list("pk", flat=True), "webhooks_not_enabled")
    return True


def resume_endpoints(endpoints: models.QuerySet[Endpoint], *, actor: Actor, reason: str = "") -> int:
    """Makes these endpoints active, and due what their contracts have kept for that. Returns how many were not active.

    Those that are not verified stay as they are.
    """
    with transaction.atomic():
        changed = set_status(endpoints=endpoints, status=Endpoint.Status.ACTIVE, actor=actor, reason=reason)
        _release(Delivery.objects.filter(endpoint__in=changed))
    return len(changed)


def release_stranded() -> int:
    """Makes due what is held although its endpoint is active, and returns how many.

    A fan-out, a replay or a result that saw the endpoint paused may be committed just after it was resumed.
    """
    return _release(Delivery.objects.all())


def _release(deliveries: models.QuerySet[Delivery]) -> int:
    """Makes due what of these is held for endpoints that are active, and returns how many.

    What a contract keeps for a replay stays.
    """
    kept = [name for name, contract in CONTRACTS.items() if contract.when_inactive == "skip"]
    free = deliveries.filter(endpoint__status=Endpoint.Status.ACTIVE, endpoint__tenant__webhooks_enabled=True)
    held = free.filter(state=Delivery.State.HELD).exclude(endpoint__contract__in=kept)
    count = held.update(state=Delivery.State.PENDING, due_at=Now())
    if count:
        announce_on_commit()
    return count


# --- Replays


class NotReplayable(Exception):
    """A delivery that cannot be sent again now; the message says why and what to do."""


class ReplayExpired(NotReplayable):
    """A delivery that cannot be sent again any more."""


def replay_delivery(*, delivery: Delivery, actor: Actor, reason: str = "") -> Delivery:
    """Makes a new delivery of the same event to the same endpoint, due now; while the endpoint is not active, what its
    contract says of such.

    Raises NotReplayable while the delivery is still under way (it would reach the receiver twice), ReplayExpired after
    its contract's window or when the payload has been deleted.
    """
    with transaction.atomic():
        found = Delivery.objects.select_related("event", "endpoint__tenant").select_for_update(of=("self",))
        old = found.defer("event__payload", "event__projection").get(pk=delivery.pk)
        check_replayable(old)
        new = Delivery.objects.create(
            event_id=old.event_id,
            trigger=Delivery.Trigger.MANUAL,
            replay_of=old,
            credits=old.credits,
            **_beginning(old.endpoint),
        )
        record_audit(
            actor=actor,
            action="delivery.replay",
            of=old,
            tenant=old.endpoint.tenant,
            reason=reason,
            changes={"new_delivery": new.typeid},
        )
        announce_on_commit()
    return new


def check_replayable(delivery: Delivery) -> None:
    """Raises NotReplayable or ReplayExpired, see `replay_delivery`."""
    if delivery.state in (Delivery.State.PENDING, Delivery.State.SENDING):
        shown = delivery.get_state_display()
        raise NotReplayable(f"{delivery.typeid} is still under way ({shown}); wait until it has ended")
    if delivery.trigger in (Delivery.Trigger.TEST, Delivery.Trigger.VERIFICATION):
        raise NotReplayable(f"{delivery.typeid} is no tenant's event; make a new {delivery.trigger} instead")
    if delivery.event.payload_deleted_at:
        raise ReplayExpired(f"The payload of {delivery.event.typeid} has been deleted; post the event again")
    expires = replay_expires_at(delivery)
    if expires and expires < now():
        raise ReplayExpired(f"{delivery.typeid} could be sent again until {expires:%Y-%m-%d %H:%M:%S} UTC, no longer")
    if delivery.endpoint.status == Endpoint.Status.DELETED:
        raise ReplayExpired("The endpoint has been deleted; nothing is sent to it any more")
    contract = CONTRACTS.get(delivery.endpoint.contract)
    if contract and contract.when_inactive == "skip" and not _is_active(delivery.endpoint):
        raise NotReplayable(f"The endpoint is {delivery.endpoint.get_status_display().lower()}; make it active first")


def replay_expires_at(delivery: Delivery) -> datetime | None:
    """Until when a delivery can be sent again; None without a limit, or while its end is not known."""
    contract = contract_of(delivery.contract) or STANDARD
    ends = [delivery.event.payload_deleted_at]
    begins = delivery.event.accepted_at if contract.replay_from_event else delivery.finished_at
    if contract.replay_window is not None and begins:
        ends.append(begins + timedelta(seconds=contract.replay_window))
    return min((end for end in ends if end), default=None)


def is_outcome_unknown(delivery: Delivery) -> bool:
    """Whether a 409 ended a delivery after an attempt to which we saw no answer, which may be being processed still."""
    if delivery.state != Delivery.State.DEAD or delivery.last_status != 409:
        return False
    unseen = ["total_timeout", "connection_reset", "closed_before_response", "write_error", "interrupted"]
    return delivery.attempts.filter(error__in=unseen).exists()


def _is_active(endpoint: Endpoint) -> bool:
    return endpoint.status == Endpoint.Status.ACTIVE and endpoint.tenant.webhooks_enabled


def _beginning(endpoint: Endpoint) -> dict[str, Any]:
    """How a delivery to an endpoint begins today, as the fan-out begins one (querysets.STORE_EVENTS)."""
    contract = CONTRACTS.get(endpoint.contract)
    beginning = {"endpoint": endpoint, "contract": contract_keys().get(endpoint.contract, endpoint.contract)}
    if _is_active(endpoint):
        return beginning | {"state": Delivery.State.PENDING}
    if contract is None or contract.when_inactive != "dead":
        return beginning | {"state": Delivery.State.HELD}
    error = "endpoint_inactive" if endpoint.tenant.webhooks_enabled else "webhooks_not_enabled"
    return beginning | {"state": Delivery.State.DEAD, "finished_at": Now(), **_unsent(contract, error)}


def delete_payload(*, event: Event, actor: Actor, reason: str = "") -> None:
    """Deletes an event's payload for good; what is known about the event stays, and it cannot be sent again.

    Raises NotReplayable while a delivery of it has not ended.
    """
    with transaction.atomic():
        Event.objects.select_for_update(no_key=True).only("id").get(pk=event.pk)
        open_states = [Delivery.State.PENDING, Delivery.State.SENDING, Delivery.State.HELD]
        if event.deliveries.filter(state__in=open_states).exists():
            raise NotReplayable("A delivery of this event has not ended; wait, or discard it first")
        Event.objects.filter(pk=event.pk, payload_deleted_at__isnull=True).update(
            payload=b"", projection=None, payload_deleted_at=Now()
        )
        record_audit(actor=actor, action="event.delete_payload", of=event, tenant=event.tenant, reason=reason)


def create_replay_job(*, job: ReplayJob, actor: Actor) -> ReplayJob:
    """Freezes the job's filter and queues it; the periodic `run_replay_jobs` takes it from there."""
    with transaction.atomic():
        job.until_id = uuid7()
        job.requested_by = actor.name
        job.matched = _matching(job).count()
        job.save(force_insert=True)
        record_audit(
            actor=actor,
            action="replay_job.create",
            of=job,
            tenant=job.endpoint.tenant,
            reason=job.reason,
            changes={"endpoint": job.endpoint.typeid, "states": job.states, "matched": job.matched},
        )
    return job


def cancel_replay_job(*, job: ReplayJob, actor: Actor) -> bool:
    """Leaves what the job has not queued yet as it is. False when the job had ended."""
    with transaction.atomic():
        open_states = [ReplayJob.State.QUEUED, ReplayJob.State.RUNNING]
        done = ReplayJob.objects.filter(pk=job.pk, state__in=open_states).update(
            state=ReplayJob.State.CANCELLED, finished_at=Now()
        )
        if done:
            record_audit(actor=actor, action="replay_job.cancel", of=job, tenant=job.endpoint.tenant)
    return bool(done)


def _matching(job: ReplayJob) -> models.QuerySet[Delivery]:
    found = Delivery.objects.filter(endpoint=job.endpoint, state__in=job.states, id__lte=job.until_id)
    if job.created_after:
        found = found.filter(created_at__gte=job.created_after)
    if job.created_before:
        found = found.filter(created_at__lt=job.created_before)
    return found


def step_replay_job(job_id: uuid.UUID, limit: int) -> int | None:
    """Queues the next deliveries of a job, `limit` at most, and returns how many; None when the job has ended.

    Those that cannot be sent again are passed over. Safe to stop anywhere and to run from several workers at once: its
    place is kept with what it queued.
    """
    with transaction.atomic():
        job = ReplayJob.objects.select_related("endpoint__tenant").select_for_update(of=("self",)).get(pk=job_id)
        if job.state not in (ReplayJob.State.QUEUED, ReplayJob.State.RUNNING):
            return None
        contract = CONTRACTS.get(job.endpoint.contract)
        if contract and contract.when_inactive == "skip" and not _is_active(job.endpoint):
            return 0  # it goes on when the endpoint is active
        found = _matching(job).select_related("event", "endpoint__tenant").defer("event__payload", "event__projection")
        if job.position:
            found = found.filter(id__gt=job.position)
        page = list(found.order_by("id")[:limit])
        fit = [old for old in page if _is_replayable(old)]
        beginning = _beginning(job.endpoint)
        Delivery.objects.bulk_create(
            Delivery(
                event_id=old.event_id,
                trigger=Delivery.Trigger.REPLAY,
                replay_of=old,
                replay_job=job,
                credits=old.credits,
                **beginning,
            )
            for old in fit
        )
        job.queued += len(fit)
        job.position = page[-1].pk if page else job.position
        job.state = ReplayJob.State.RUNNING if len(page) == limit else ReplayJob.State.COMPLETED
        job.finished_at = Now() if job.state == ReplayJob.State.COMPLETED else None
        job.save(update_fields=["queued", "position", "state", "finished_at"])
        announce_on_commit()
    return len(fit)


def _is_replayable(delivery: Delivery) -> bool:
    try:
        check_replayable(delivery)
    except NotReplayable:
        return False
    return True
