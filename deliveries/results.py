"""What comes of attempts: the contract judges, and states, attempts and counts are written. The pump calls these."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime

import msgspec
from django.db import DatabaseError, InterfaceError, OperationalError, connection, models, transaction
from django.utils.timezone import now

from deliveries.models import Delivery
from deliveries.querysets import Result
from deliveries.services import disable_endpoints
from endpoints.contracts import CONTRACTS, STANDARD, Action, Contract, Verdict, dead_in_a_row, decide, last_error
from endpoints.models import Endpoint
from endpoints.services import SYSTEM, contract_of
from webhookhub.ids import typeid, uuid7

logger = logging.getLogger(__name__)


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
    # A receiver that turns one event down may well take the next; one whose answer never came over the network is ours.
    result.is_failure = verdict.action in ("retry", "exhausted") and result.total_us is not None
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
    _note_health(results)


def _note_health(results: Sequence[Result]) -> None:
    """What these say of the health of their endpoints, and so of the pace at which they get more.

    An arrival is of interest after failures alone.
    """
    arrived = {one.endpoint_id for one in results if one.is_failing and one.state == Delivery.State.DELIVERED}
    failed = Counter(one.endpoint_id for one in results if one.is_failure)
    if not (arrived or failed):
        return
    with transaction.atomic():
        Endpoint.objects.save_paces(
            (one, one.pace.after_results(one.moment, arrived=one.pk in arrived, failed=failed[one.pk]))
            for one in Endpoint.objects.locked_for_pace({*arrived, *failed}, wait=True)
        )


def _record(results: Sequence[Result]) -> int:
    gone = [result.endpoint_id for result in results if result.gone]
    counted = [result for result in results if result.disable_after]
    with transaction.atomic() if gone or counted or connection.in_atomic_block else nullcontext():
        stood = Delivery.objects.all().record(results)
        if gone and counted:  # in one order, or two pumps could wait for each other
            both = {*gone, *(result.endpoint_id for result in counted)}
            list(Endpoint.objects.filter(pk__in=both).select_for_update(no_key=True).order_by("pk").values("pk"))
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


MAX_INTERRUPTIONS = 3  # attempts that workers did not survive: what kills them must not do so for ever


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
            if delivery.interruptions + 1 >= MAX_INTERRUPTIONS and result.state == Delivery.State.PENDING:
                result.state, result.outcome = Delivery.State.DEAD, contract.state_after("exhausted")
                result.detail = f"Set aside: the worker stopped during {MAX_INTERRUPTIONS} attempts of this delivery."
                logger.error("%s is set aside: workers stopped during its attempts", delivery.typeid)
            results.append(result)
        if results:
            record_results(results)
            logger.warning("%d deliveries taken back from workers that stopped", len(results))
    return len(results)
