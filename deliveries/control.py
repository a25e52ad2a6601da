"""What the hub itself sends to an endpoint: challenges that verify it, and tests. Each is a delivery of one try."""

import hmac
import json
import secrets
from datetime import timedelta
from typing import Any

import msgspec
from django.db import transaction
from django.db.models.functions import Now
from django.utils.timezone import now

from deliveries.models import Delivery, Event, Verification
from deliveries.routing import within_limits
from deliveries.services import announce_on_commit
from endpoints.catalogues import subscriptions
from endpoints.contracts import CONTRACTS, Contract
from endpoints.models import Endpoint, EventType
from endpoints.services import Actor, keep_contracts, record_audit

CHALLENGE_HOURS = 24
WRONG_ANSWERS = 5  # that void a challenge
TEST_TYPE = "webhookhub.test"  # what a test sends where the contract has no types of its own
CHALLENGE_TYPE = "webhookhub.challenge"


class NotDone(Exception):
    """What was asked for cannot be done now; the message says why and what to do."""


# --- Verification


def start_verification(*, endpoint: Endpoint, actor: Actor) -> Verification:
    """Sends a new challenge to an endpoint; one that is open is void from now on. Raises NotDone."""
    with transaction.atomic():
        endpoint = _locked(endpoint)
        contract = CONTRACTS.get(endpoint.contract)
        if contract is None or not contract.challenge:
            raise NotDone(f"Endpoints under the contract {endpoint.contract} are not verified; it is in use as it is")
        if endpoint.status != Endpoint.Status.UNVERIFIED:
            raise NotDone("The endpoint is verified; another URL is another endpoint")
        _open(endpoint).update(voided_at=Now())
        challenge = secrets.token_hex(16)  # 128 bits
        delivery = _send(
            endpoint=endpoint,
            contract=contract.for_control("challenge", envelope=False, headers=(), keep_bytes=0),
            trigger=Delivery.Trigger.VERIFICATION,
            event_type=CHALLENGE_TYPE,
            payload=json.dumps({"challenge": challenge}).encode(),
        )
        verification = Verification.objects.create(
            endpoint=endpoint,
            delivery=delivery,
            challenge=challenge,
            expires_at=now() + timedelta(hours=CHALLENGE_HOURS),
        )
        record_audit(actor=actor, action="endpoint.challenge", of=endpoint, tenant=endpoint.tenant)
    return verification


def confirm_verification(*, endpoint: Endpoint, answer: str, actor: Actor) -> None:
    """Makes an endpoint active whose receiver answered the challenge with 2xx, and whose owner pastes it back.

    White space and quotes around the answer do not matter. Raises NotDone.
    """
    wrong = ""
    with transaction.atomic():
        endpoint = _locked(endpoint)
        verification = _open(endpoint).select_related("delivery").first()
        if endpoint.status != Endpoint.Status.UNVERIFIED or verification is None:
            raise NotDone("No challenge is open for this endpoint; send one")
        if verification.expires_at <= now():
            raise NotDone(f"The challenge has expired after {CHALLENGE_HOURS} hours; send a new one")
        if not hmac.compare_digest(verification.challenge.encode(), _bare(answer).encode(errors="replace")):
            wrong = _count_wrong(verification)
        elif verification.delivery.state != Delivery.State.DELIVERED:
            raise NotDone(f"The challenge is right, but {_not_delivered(verification.delivery)}")
        else:
            _activate(endpoint, verification, actor)
    if wrong:
        raise NotDone(wrong)


def _locked(endpoint: Endpoint) -> Endpoint:
    return Endpoint.objects.select_related("tenant").select_for_update(of=("self",)).get(pk=endpoint.pk)


def _open(endpoint: Endpoint) -> Any:
    return endpoint.verifications.filter(voided_at=None, confirmed_at=None)


def _bare(answer: str) -> str:
    """The challenge in an answer, which may be the whole body that the receiver saw."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        answer = str(found.get("challenge"))
    elif isinstance(found, str):
        answer = found
    return answer.strip().strip("\"'")


def _count_wrong(verification: Verification) -> str:
    verification.wrong_answers += 1
    left = WRONG_ANSWERS - verification.wrong_answers
    if left <= 0:
        verification.voided_at = now()
    verification.save(update_fields=["wrong_answers", "voided_at"])
    if left <= 0:
        return "Wrong too often; send a new challenge"
    return f"This is not the challenge; {left} {'try is' if left == 1 else 'tries are'} left"


def _not_delivered(delivery: Delivery) -> str:
    if delivery.state in (Delivery.State.PENDING, Delivery.State.SENDING):
        return "the receiver has not answered yet; try again in a moment"
    return f"the receiver did not answer it with 2xx ({delivery.last_error}); mend that and send a new one"


def _activate(endpoint: Endpoint, verification: Verification, actor: Actor) -> None:
    Verification.objects.filter(pk=verification.pk).update(confirmed_at=Now())
    Endpoint.objects.filter(pk=endpoint.pk).update(
        status=Endpoint.Status.ACTIVE, status_reason="", status_at=Now(), verified_at=Now()
    )
    record_audit(actor=actor, action="endpoint.verify", of=endpoint, tenant=endpoint.tenant)


# --- Tests


def test_types(endpoint: Endpoint) -> list[str]:
    """The types of which a test can be sent to an endpoint."""
    contract = CONTRACTS.get(endpoint.contract)
    return list(subscriptions(contract.catalogue)) if contract and contract.catalogue else [TEST_TYPE]


def send_test(*, endpoint: Endpoint, event_type: str, actor: Actor) -> Delivery:
    """Sends synthetic data, signed and wrapped as any event of the endpoint, once. Raises NotDone.

    It is marked in the log of deliveries, costs nothing, and says nothing about the endpoint's health.
    """
    contract = CONTRACTS.get(endpoint.contract)
    if contract is None:
        raise NotDone(f"The contract {endpoint.contract} is not known to this hub; give the endpoint another one")
    if event_type not in test_types(endpoint):
        raise NotDone(f"{event_type!r} cannot be sent as a test; choose {', '.join(test_types(endpoint))}")
    if endpoint.status in (Endpoint.Status.UNVERIFIED, Endpoint.Status.DELETED):
        raise NotDone(f"The endpoint is {endpoint.get_status_display().lower()}; nothing is sent to it")
    kind = subscriptions(contract.catalogue).get(event_type)
    fixture = kind.fixture if kind else {"test": True, "message": "A test of this endpoint by WebhookHub."}
    with transaction.atomic():
        delivery = _send(
            endpoint=endpoint,
            contract=contract.for_control("test"),
            trigger=Delivery.Trigger.TEST,
            event_type=event_type,
            payload=msgspec.json.encode(fixture),
        )
        record_audit(actor=actor, action="endpoint.test", of=endpoint, tenant=endpoint.tenant)
    return delivery


test_types.__test__ = False  # type: ignore[attr-defined]  # a name that pytest would take for a test


def _send(
    *, endpoint: Endpoint, contract: Contract, trigger: Delivery.Trigger, event_type: str, payload: bytes
) -> Delivery:
    event = Event(tenant_id=endpoint.tenant_id, type=event_type, payload=payload, state=Event.State.CONTROL)
    if contract.envelope and (kind := EventType.objects.filter(tenant=endpoint.tenant_id, name=event_type).first()):
        event.projection = within_limits(kind, event.pk, payload)
    event.save(force_insert=True)
    [key] = keep_contracts([contract])
    turn = 0 if endpoint.ordered else None  # before all that waits there
    delivery = Delivery.objects.create(event=event, endpoint=endpoint, contract=key, trigger=trigger, turn=turn)
    announce_on_commit()
    return delivery
