"""What it means for deliveries that an endpoint or a tenant is on or off. Admin, API and jobs call these."""

import uuid
from collections.abc import Iterable
from typing import Any

from django.db import models, transaction
from django.db.models.functions import Now

from deliveries.models import Delivery, Event, Verification
from deliveries.wake import announce
from endpoints.contracts import CONTRACTS, STANDARD, Contract, last_error
from endpoints.models import Endpoint, Tenant
from endpoints.services import Actor, contract_keys, contract_of, record_audit, set_status


def announce_on_commit() -> None:
    """Wakes the pumps when what is being stored can be seen. Should that fail, they find it by themselves."""
    transaction.on_commit(announce, robust=True)


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
            values = {"state": Delivery.State.DEAD, "finished_at": Now(), **unsent(contract or STANDARD, error)}
        else:
            values = {"state": Delivery.State.HELD}
        Delivery.objects.filter(pk__in=ids).update(**values)


def unsent(contract: Contract, error: str) -> dict[str, str]:
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
        Verification.objects.filter(endpoint=endpoint, confirmed_at=None, voided_at=None).update(voided_at=Now())
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
        if enabled:
            _release(Delivery.objects.filter(endpoint__tenant=tenant))
        else:
            _park_waiting(tenant.endpoints.values_list("pk", flat=True), "webhooks_not_enabled")
    return True


def resume_endpoints(endpoints: models.QuerySet[Endpoint], *, actor: Actor, reason: str = "") -> int:
    """Makes these endpoints active, and due what their contracts have kept for that. Returns how many were not active.

    Those that are not verified stay as they are.
    """
    with transaction.atomic():
        changed = set_status(endpoints=endpoints, status=Endpoint.Status.ACTIVE, actor=actor, reason=reason)
        _release(Delivery.objects.filter(endpoint__in=changed))
    return len(changed)


def cancel_delivery(*, delivery: Delivery, actor: Actor, reason: str = "") -> bool:
    """Gives up a delivery that waits: it is discarded, and where events go in order the next one has its turn. False
    when it waits no longer.
    """
    with transaction.atomic():
        waiting = [Delivery.State.PENDING, Delivery.State.HELD]
        done = discard(Delivery.objects.filter(pk=delivery.pk, state__in=waiting))
        if done:
            tenant = delivery.endpoint.tenant
            record_audit(actor=actor, action="delivery.cancel", of=delivery, tenant=tenant, reason=reason)
            announce_on_commit()
    return bool(done)


def discard(deliveries: models.QuerySet[Delivery]) -> int:
    """Ends these without another attempt, and returns how many."""
    return deliveries.update(state=Delivery.State.DISCARDED, finished_at=Now())


def is_kept(delivery: Delivery) -> bool:
    """Whether it is on hold for good: its contract keeps it for a replay, and never sends it by itself."""
    return delivery.state == Delivery.State.HELD and delivery.endpoint.when_inactive == "skip"


def release_stranded() -> int:
    """Makes due what is held although its endpoint is active, and returns how many; ends what waits for deleted ones.

    A fan-out, a replay or a result that saw the endpoint paused may be committed just after it was resumed, or deleted.
    """
    deleted = Endpoint.objects.filter(status=Endpoint.Status.DELETED).values_list("pk", flat=True)
    with transaction.atomic():
        _park_waiting(deleted, "endpoint_deleted", for_good=True)
    return _release(Delivery.objects.all())


def _release(deliveries: models.QuerySet[Delivery]) -> int:
    """Makes due what of these is held for endpoints that are active, and returns how many.

    What a contract keeps for a replay stays.
    """
    kept = [name for name, contract in CONTRACTS.items() if contract.when_inactive == "skip"]
    free = deliveries.filter(endpoint__status=Endpoint.Status.ACTIVE, endpoint__tenant__webhooks_enabled=True)
    held = free.filter(state=Delivery.State.HELD).exclude(endpoint__contract__in=kept)
    # What came under a contract that nobody knew follows the one that its endpoint has now.
    unknown = held.exclude(contract__contains="@").exclude(contract__in=CONTRACTS)
    for name, key in contract_keys().items():
        unknown.filter(endpoint__contract=name).update(contract=key)
    held = held.filter(models.Q(contract__contains="@") | models.Q(contract__in=CONTRACTS))
    count = held.update(state=Delivery.State.PENDING, due_at=Now())
    if count:
        announce_on_commit()
    return count


def is_active(endpoint: Endpoint) -> bool:
    """Whether anything is sent to it: the endpoint and its tenant are on."""
    return endpoint.status == Endpoint.Status.ACTIVE and endpoint.tenant.webhooks_enabled


def beginning(endpoint: Endpoint, event: Event) -> dict[str, Any]:
    """How a delivery of an event to an endpoint begins today, as the fan-out begins one (querysets.STORE_EVENTS)."""
    start = {
        "event": event,
        "endpoint": endpoint,
        "contract": contract_keys().get(endpoint.contract, endpoint.contract),
        "turn": event.sequence if endpoint.ordered else None,
    }
    if is_active(endpoint):
        return start | {"state": Delivery.State.PENDING}
    if endpoint.when_inactive != "dead":
        return start | {"state": Delivery.State.HELD}
    error = "endpoint_inactive" if endpoint.tenant.webhooks_enabled else "webhooks_not_enabled"
    return start | {
        "state": Delivery.State.DEAD,
        "finished_at": Now(),
        **unsent(CONTRACTS[endpoint.contract], error),
    }
