"""Sending again what has ended: one delivery, or many by a job, as far as contracts let it."""

import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db import models, transaction
from django.db.models.functions import Coalesce, Now
from django.utils.timezone import now

from deliveries.models import Delivery, Event, ReplayJob
from deliveries.services import announce_on_commit, beginning, discard, is_active, is_kept
from endpoints.contracts import CONTRACTS, STANDARD, Contract
from endpoints.models import ContractVersion, Endpoint
from endpoints.services import Actor, contract_of, record_audit
from webhookhub.ids import uuid7


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
        old = _with_locks(Delivery.objects.filter(pk=delivery.pk)).get()
        check_replayable(old)
        _end_kept([old])
        new = _again(old, trigger=Delivery.Trigger.MANUAL)
        new.save(force_insert=True)
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


def _again(old: Delivery, **fields: Any) -> Delivery:
    """A new delivery of what an old one was to bring. To replay prolongs nothing: receivers keep keys no longer."""
    first = old.first_finished_at or old.finished_at
    start = beginning(old.endpoint, old.event)
    return Delivery(replay_of=old, credits=old.credits, first_finished_at=first, **start, **fields)


def _with_locks(deliveries: models.QuerySet[Delivery]) -> models.QuerySet[Delivery]:
    """These with what `check_replayable` needs, and their events locked: no payload is deleted meanwhile."""
    rows = deliveries.select_related("event", "endpoint__tenant").defer("event__payload", "event__projection")
    return rows.select_for_update(of=("self", "event"), no_key=True)


def _end_kept(replayed: Iterable[Delivery]) -> None:
    """What was kept for a replay has had it."""
    discard(Delivery.objects.filter(pk__in=[one.pk for one in replayed if is_kept(one)]))


def check_replayable(delivery: Delivery) -> None:
    """Raises NotReplayable or ReplayExpired, see `replay_delivery`."""
    if delivery.state == Delivery.State.HELD and not is_kept(delivery):
        raise NotReplayable(f"{delivery.typeid} is on hold, and sent when its endpoint is active; it needs no replay")
    if delivery.state in (Delivery.State.PENDING, Delivery.State.SENDING):
        shown = delivery.get_state_display()
        raise NotReplayable(f"{delivery.typeid} is still under way ({shown}); wait until it has ended")
    if delivery.trigger in (Delivery.Trigger.TEST, Delivery.Trigger.VERIFICATION):
        raise NotReplayable(f"{delivery.typeid} is no tenant's event; make a new {delivery.trigger} instead")
    if delivery.event.payload_deleted_at:
        raise ReplayExpired(f"The payload of {delivery.event.typeid} has been deleted; post the event again")
    if has_expired(delivery):
        expires = replay_expires_at(delivery)
        raise ReplayExpired(f"{delivery.typeid} could be sent again until {expires:%Y-%m-%d %H:%M:%S} UTC, no longer")
    if delivery.endpoint.status == Endpoint.Status.DELETED:
        raise ReplayExpired("The endpoint has been deleted; nothing is sent to it any more")
    if delivery.endpoint.when_inactive == "skip" and not is_active(delivery.endpoint):
        raise NotReplayable(f"The endpoint is {delivery.endpoint.get_status_display().lower()}; make it active first")


def replay_expires_at(delivery: Delivery) -> datetime | None:
    """Until when a delivery can be sent again; None without a limit, or while its end is not known."""
    contract, begins = _window(delivery)
    ends = [delivery.event.payload_deleted_at]
    if contract.replay_window is not None and begins:
        ends.append(begins + timedelta(seconds=contract.replay_window))
    return min((end for end in ends if end), default=None)


def has_expired(delivery: Delivery) -> bool:
    """Whether `replay_expires_at` has passed, by the contract's own rule."""
    contract, begins = _window(delivery)
    is_over = begins is not None and not contract.may_replay((now() - begins).total_seconds())
    return is_over or delivery.event.payload_deleted_at is not None


def _window(delivery: Delivery) -> tuple[Contract, datetime | None]:
    """A delivery's contract, and from when the window for replays counts."""
    contract = contract_of(delivery.contract) or STANDARD
    ended = delivery.first_finished_at or delivery.finished_at
    return contract, delivery.event.accepted_at if contract.replay_from_event else ended


def without_expired(deliveries: models.QuerySet[Delivery]) -> models.QuerySet[Delivery]:
    """Those of these for which `has_expired` is false, as far as time alone says."""
    found = deliveries.annotate(ended_at=Coalesce("first_finished_at", "finished_at"))
    for key in [*CONTRACTS, *ContractVersion.objects.values_list("key", flat=True)]:
        contract = contract_of(key)
        if contract and contract.replay_window is not None:
            begins = "event__accepted_at" if contract.replay_from_event else "ended_at"
            over = {f"{begins}__lt": Now() - timedelta(seconds=contract.replay_window)}
            found = found.exclude(contract=key, **over)
    return found


def is_outcome_unknown(delivery: Delivery) -> bool:
    """Whether a 409 ended a delivery after an attempt to which we saw no answer, which may be being processed still."""
    if delivery.state != Delivery.State.DEAD or delivery.last_status != 409:
        return False
    unseen = ["total_timeout", "connection_reset", "closed_before_response", "write_error", "interrupted"]
    return delivery.attempts.filter(error__in=unseen).exists()


def delete_payload(*, event: Event, actor: Actor, reason: str = "") -> None:
    """Deletes an event's payload for good; what is known about the event stays, and it cannot be sent again.

    What waits to be sent of it is discarded. Raises NotReplayable while a delivery of it is being sent.
    """
    open_states = [Delivery.State.PENDING, Delivery.State.SENDING, Delivery.State.HELD]
    under_way = event.deliveries.filter(state__in=open_states).select_for_update(no_key=True).order_by("pk")
    with transaction.atomic():
        list(under_way.all())  # before the event, as replays do it, or the two could wait for each other
        Event.objects.select_for_update(no_key=True).only("id").get(pk=event.pk)
        waiting = list(under_way.all())
        if any(one.state == Delivery.State.SENDING for one in waiting):
            raise NotReplayable("A delivery of this event is being sent; try again in a moment")
        discard(Delivery.objects.filter(pk__in=[one.pk for one in waiting]))
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
        is_deleted = job.endpoint.status == Endpoint.Status.DELETED
        if job.endpoint.when_inactive == "skip" and not (is_active(job.endpoint) or is_deleted):
            return 0  # it goes on when the endpoint is active
        found = _matching(job)
        if job.position:
            found = found.filter(id__gt=job.position)
        page = list(_with_locks(found).order_by("id")[:limit])
        fit = [old for old in page if _is_replayable(old)]
        _end_kept(fit)
        again = {"trigger": Delivery.Trigger.REPLAY, "replay_job": job, "priority": Delivery.Priority.AGAIN}
        Delivery.objects.bulk_create(_again(old, **again) for old in fit)
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
