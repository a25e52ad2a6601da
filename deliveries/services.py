"""What is done with events and deliveries. Admin, API, jobs and commands all call these."""

import logging
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
from django.db import DatabaseError, InterfaceError, OperationalError, connection, models, transaction
from django.db.models.functions import Now
from django.utils.timezone import now

from deliveries.models import Delivery, Event, ReplayJob
from deliveries.querysets import Result
from deliveries.wake import announce
from endpoints.contracts import STANDARD, Contract, Verdict, decide
from endpoints.models import Endpoint
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
    """The event is stored. `repeated`: it had been before, under the same caller_key, with the same content."""

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


def publish_events(items: Sequence[NewEvent]) -> list[Published | KeyReused | Refused]:
    """Stores events with a delivery for each endpoint that wants them, all in one statement, and wakes the pumps.

    Inside a caller's transaction, what it stores lives and dies with that transaction, and the wake-up waits for its
    commit. An event that the database refuses is refused alone: the others are stored all the same.
    """
    try:
        # One statement is a transaction of its own; within a caller's it needs a savepoint, to be refused alone.
        with transaction.atomic() if connection.in_atomic_block else nullcontext():
            stored = Event.objects.all().store(_columns(items), contract_keys())
    except (OperationalError, InterfaceError) as error:
        logger.error("%d events refused, the database is away: %s", len(items), error)
        return [Refused(transient=True)] * len(items)
    except DatabaseError as error:
        if len(items) > 1:
            return [publish_events([item])[0] for item in items]
        logger.error("event %s refused by the database: %s", items[0].id, error)
        return [Refused(transient=False)]
    if stored:
        transaction.on_commit(announce, robust=True)
    return [Published(item.id) if item.id in stored else _earlier(item) for item in items]


def _columns(items: Sequence[NewEvent]) -> dict[str, list[object]]:
    return {
        "id": [item.id for item in items],
        "tenant": [item.tenant_id for item in items],
        "type": [item.type for item in items],
        "payload": [item.payload for item in items],
        "content_type": [item.content_type for item in items],
        "key": [uuid.uuid4() for _ in items],
        "caller_key": [item.caller_key for item in items],
        "metadata": [msgspec.json.encode(item.metadata).decode() for item in items],
        "patterns": [_patterns(item.type) for item in items],
    }


def _patterns(event_type: str) -> str:
    """Everything an endpoint may ask for that this type answers to, as a PostgreSQL array: *, a.*, a.b.*, a.b.c."""
    words = event_type.split(".")
    groups = (".".join(words[:count]) + ".*" for count in range(1, len(words)))
    return "{" + ",".join(['"*"', *(f'"{group}"' for group in groups), f'"{event_type}"']) + "}"


def _earlier(item: NewEvent) -> Published | KeyReused | Refused:
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


# --- Results of attempts


# The state of a delivery after each verdict; all ways to end without success are one state to the queue.
_STATES = {"delivered": Delivery.State.DELIVERED, "retry": Delivery.State.PENDING, "requeue": Delivery.State.PENDING}
REQUEUE_SECONDS = 5.0  # until a delivery that we lacked descriptors or memory for is tried again


def judge(contract: Contract, result: Result, *, first_started: datetime, retry_after: str | None) -> Verdict:
    """Sets state and wait of a result by the contract's verdict on it, and returns the verdict.

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
    if verdict.action == "requeue":
        result.attempted, result.wait = False, REQUEUE_SECONDS
    return verdict


def record_results(results: Sequence[Result], *, gone: Collection[uuid.UUID] = ()) -> None:
    """Writes results whose claims still stand. The endpoints in `gone` are disabled and what waits for them is held.

    A result that the database refuses is written without what was seen of the exchange: to leave it unwritten would
    send the delivery again and again.
    """
    try:
        stood = _record(results, gone)
    except (OperationalError, InterfaceError):
        raise
    except DatabaseError:
        if len(results) > 1:
            for result in results:
                record_results([result], gone=gone)
            return
        logger.exception("the result of delivery %s cannot be recorded as it is", results[0].delivery_id)
        try:
            stood = _record([_without_exchange(results[0])], gone)
        except (OperationalError, InterfaceError):
            raise
        except DatabaseError:
            # Its row contradicts itself. It must not stop the others, nor be sent for ever.
            stood = _record([msgspec.structs.replace(results[0], state=Delivery.State.DEAD, attempted=False)], ())
    if stood < len(results):
        logger.warning("%d results dropped: their leases had run out", len(results) - stood)


def _record(results: Sequence[Result], gone: Collection[uuid.UUID]) -> int:
    with transaction.atomic() if gone or connection.in_atomic_block else nullcontext():
        stood = Delivery.objects.all().record(results)
        if gone:
            reason = "gone: the receiver answered 410"
            disable_endpoints(Endpoint.objects.filter(pk__in=gone), actor=SYSTEM, reason=reason)
    return len(stood)


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
        # Those that a pump has in hand are passed over, or the two could wait for each other: it holds what it claims.
        waiting = Delivery.objects.all().waiting_for(endpoint.pk for endpoint in changed)
        free = waiting.select_for_update(skip_locked=True).order_by().values("pk")
        Delivery.objects.filter(pk__in=free).update(state=Delivery.State.HELD)
    return len(changed)


def resume_endpoints(endpoints: models.QuerySet[Endpoint], *, actor: Actor, reason: str = "") -> int:
    """Makes these endpoints active and what is held for them due now. Returns how many were not active."""
    with transaction.atomic():
        changed = set_status(endpoints=endpoints, status=Endpoint.Status.ACTIVE, actor=actor, reason=reason)
        _release(Delivery.objects.filter(endpoint__in=changed))
    return len(changed)


def release_stranded() -> int:
    """Makes due what is held although its endpoint is active, and returns how many.

    A fan-out, a replay or a result that saw the endpoint paused may be committed just after it was resumed.
    """
    return _release(Delivery.objects.filter(endpoint__status=Endpoint.Status.ACTIVE))


def _release(deliveries: models.QuerySet[Delivery]) -> int:
    """Makes due what of these is held, and returns how many."""
    count = deliveries.filter(state=Delivery.State.HELD).update(state=Delivery.State.PENDING, due_at=Now())
    if count:
        transaction.on_commit(announce, robust=True)
    return count


# --- Replays


class NotReplayable(Exception):
    """A delivery that cannot be sent again now; the message says why and what to do."""


def replay_delivery(*, delivery: Delivery, actor: Actor, reason: str = "") -> Delivery:
    """Makes a new delivery of the same event to the same endpoint, due now (held while the endpoint is not active).

    Raises NotReplayable while the delivery is still under way: it would reach the receiver twice.
    """
    with transaction.atomic():
        old = Delivery.objects.select_related("endpoint__tenant").select_for_update(of=("self",)).get(pk=delivery.pk)
        if old.state in (Delivery.State.PENDING, Delivery.State.SENDING):
            raise NotReplayable(f"{old.typeid} is still under way ({old.get_state_display()}); wait until it has ended")
        new = Delivery.objects.create(
            event_id=old.event_id, trigger=Delivery.Trigger.MANUAL, replay_of=old, **_beginning(old.endpoint)
        )
        record_audit(
            actor=actor,
            action="delivery.replay",
            of=old,
            tenant=old.endpoint.tenant,
            reason=reason,
            changes={"new_delivery": new.typeid},
        )
        transaction.on_commit(announce, robust=True)
    return new


def _beginning(endpoint: Endpoint) -> dict[str, Any]:
    """How a delivery to an endpoint begins today, as the fan-out begins one (querysets.STORE_EVENTS)."""
    active = endpoint.status == Endpoint.Status.ACTIVE
    return {
        "endpoint": endpoint,
        "contract": contract_keys().get(endpoint.contract, endpoint.contract),
        "state": Delivery.State.PENDING if active else Delivery.State.HELD,
    }


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

    Safe to stop anywhere and to run from several workers at once: its place is kept with what it queued.
    """
    with transaction.atomic():
        job = ReplayJob.objects.select_related("endpoint").select_for_update(of=("self",)).get(pk=job_id)
        if job.state not in (ReplayJob.State.QUEUED, ReplayJob.State.RUNNING):
            return None
        found = _matching(job).order_by("id")
        if job.position:
            found = found.filter(id__gt=job.position)
        page = list(found.values_list("id", "event_id")[:limit])
        beginning = _beginning(job.endpoint)
        Delivery.objects.bulk_create(
            Delivery(
                event_id=event_id, trigger=Delivery.Trigger.REPLAY, replay_of_id=old_id, replay_job=job, **beginning
            )
            for old_id, event_id in page
        )
        job.queued += len(page)
        job.position = page[-1][0] if page else job.position
        job.state = ReplayJob.State.RUNNING if len(page) == limit else ReplayJob.State.COMPLETED
        job.finished_at = Now() if job.state == ReplayJob.State.COMPLETED else None
        job.save(update_fields=["queued", "position", "state", "finished_at"])
        transaction.on_commit(announce, robust=True)
    return len(page)
