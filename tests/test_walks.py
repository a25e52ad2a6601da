"""The whole life of a delivery under each contract: pump, database and a real receiver, by a clock that is set."""

import json
from datetime import timedelta

import pytest

from deliveries.models import Attempt, Delivery
from deliveries.publishing import NewEvent, publish_events
from endpoints.contracts import BETTERSTOOD, BRIEF, KINGMINOS, STANDARD, draw
from tests.receiver import answer
from webhookhub.receiver import verify

pytestmark = pytest.mark.django_db(transaction=True)

SECOND = timedelta(seconds=1)
LIFECYCLE = "com.elicitra.interaction.ended.v1"
DATA = b'{"interactionId": "int_1", "lifecycleSequence": 1, "price": 1.10}'


def publish(tenant, contract="standard") -> Delivery:
    lifecycle = contract == "betterstood"
    [found] = publish_events([NewEvent(tenant.pk, LIFECYCLE if lifecycle else "invoice.paid", DATA)])
    return Delivery.objects.get(event=found.event_id)


def expected_due(contract, delivery: Delivery, attempt: Attempt):
    """When the attempt after this one is due, by the contract's text and the draw."""
    step = contract.steps[attempt.number - 1]
    wait = timedelta(milliseconds=step.at(draw(delivery.typeid, attempt.number + contract.draw_offset)))
    ended = attempt.started_at + timedelta(microseconds=attempt.total_us)
    return (delivery.first_attempt_at if contract.from_first else ended) + wait


@pytest.mark.parametrize(
    ("contract", "outcome", "word"),
    [
        (STANDARD, "dead", "http_500"),
        (BRIEF, "exhausted", "http_500"),
        (BETTERSTOOD, "dead_letter", "http_500"),
        (KINGMINOS, "dead", "http_500"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_delivery_that_always_fails_is_tried_on_time_to_the_last_and_then_no_more(
    tenant, endpoint_under, receiver, pump, clock, contract, outcome, word
):
    endpoint = endpoint_under(contract.name)
    receiver.respond = answer(500)
    delivery = publish(tenant, contract.name)
    for number in range(1, contract.max_attempts + 1):
        pump()
        delivery.refresh_from_db()
        assert len(receiver.received) == delivery.attempts_made == number
        if number == contract.max_attempts:
            break
        attempt = delivery.attempts.get(number=number)
        due = expected_due(contract, delivery, attempt)
        assert abs(delivery.due_at - due) < SECOND
        assert (delivery.state, delivery.last_error, delivery.outcome) == ("pending", word, "")
        clock.advance_to(delivery.due_at - SECOND)
        pump()
        assert len(receiver.received) == number, "it was sent before its time"
        clock.advance_to(delivery.due_at)

    assert (delivery.state, delivery.outcome, delivery.last_error) == ("dead", outcome, word)
    assert abs(delivery.finished_at - clock.now()) < 5 * SECOND
    clock.advance_to(clock.now() + timedelta(days=400))
    pump()
    assert len(receiver.received) == contract.max_attempts
    for request in receiver.received:
        verify(request.body, dict(request.headers), endpoint.secret, scheme=contract.signature, tolerance=10**9)
    ids = {request.header("webhook-id") or request.header("kingminos-event-id") for request in receiver.received}
    assert len(ids) == len({request.body for request in receiver.received}) == 1
    assert [int(request.header("webhook-attempt")) for request in receiver.received] == [
        *range(1, contract.max_attempts + 1)
    ]


def test_brief_waits_as_429_asks_no_more_and_no_less_and_ignores_it_elsewhere(
    tenant, endpoint_under, receiver, pump, clock
):
    endpoint_under("brief")
    replies = iter([answer(429, "Retry-After: 3"), answer(503, "Retry-After: 86400"), answer(200)])
    receiver.respond = lambda _: next(replies)
    delivery = publish(tenant)
    pump()
    delivery.refresh_from_db()
    assert abs(delivery.due_at - clock.now() - 3 * SECOND) < SECOND
    clock.advance_to(delivery.due_at)
    pump()
    delivery.refresh_from_db()
    assert abs(delivery.due_at - expected_due(BRIEF, delivery, delivery.attempts.get(number=2))) < SECOND
    clock.advance_to(delivery.due_at)
    pump()
    delivery.refresh_from_db()
    assert (delivery.state, delivery.outcome, delivery.last_error) == ("delivered", "succeeded", "")


def test_betterstood_takes_the_later_of_slot_and_retry_after_and_skips_no_slot_that_has_passed(
    tenant, endpoint_under, receiver, pump, clock
):
    endpoint_under("betterstood")
    replies = iter([answer(404, "Retry-After: 4000"), answer(503, "Retry-After: 1"), answer(500), answer(204)])
    receiver.respond = lambda _: next(replies)
    delivery = publish(tenant, "betterstood")

    def go_on(expected):
        pump()
        delivery.refresh_from_db()
        assert abs(delivery.due_at - expected()) < SECOND
        clock.advance_to(delivery.due_at)

    go_on(lambda: clock.now() + 4000 * SECOND)  # later than the slot after one minute
    go_on(lambda: clock.now() + 60 * SECOND)  # the slot of five minutes has passed, and Retry-After is clamped
    go_on(lambda: clock.now() + 60 * SECOND)  # so has that of thirty
    pump()
    delivery.refresh_from_db()
    assert (delivery.state, delivery.attempts_made) == ("delivered", 4)
    assert all(attempt.response_body in (None, b"") for attempt in delivery.attempts.all())


def test_kingminos_ignores_retry_after(tenant, endpoint_under, receiver, pump, clock):
    endpoint_under("kingminos")
    receiver.respond = answer(429, "Retry-After: 86400")
    delivery = publish(tenant)
    pump()
    delivery.refresh_from_db()
    assert abs(delivery.due_at - expected_due(KINGMINOS, delivery, delivery.attempts.get(number=1))) < SECOND


def test_standard_never_comes_before_retry_after(tenant, endpoint_under, receiver, pump, clock):
    endpoint_under("standard")
    receiver.respond = answer(503, "Retry-After: 600")
    delivery = publish(tenant)
    pump()
    delivery.refresh_from_db()
    assert 599 * SECOND < delivery.due_at - clock.now() < 661 * SECOND


def test_betterstood_wraps_the_payload_s_bytes_into_a_cloud_event(tenant, endpoint_under, receiver, pump):
    endpoint = endpoint_under("betterstood")
    delivery = publish(tenant, "betterstood")
    pump()
    [request] = receiver.received
    assert DATA[:-1] + b',"truncation":{"omittedFields":[]}}' in request.body
    event = json.loads(request.body)
    assert event["specversion"] == "1.0"
    assert (event["id"], event["type"]) == (delivery.event.typeid, LIFECYCLE)
    assert event["source"] == f"urn:webhookhub:{endpoint.tenant.typeid}"
    assert event["datacontenttype"] == "application/json"
    assert request.header("content-type") == "application/cloudevents+json"
    verify(request.body, dict(request.headers), endpoint.secret, scheme="elicitra")


def test_brief_sends_the_key_of_the_event_and_kingminos_its_own_ids(tenant, endpoint_under, receiver, pump):
    endpoint_under("brief")
    endpoint_under("kingminos")
    [found] = publish_events([NewEvent(tenant.pk, "invoice.paid", DATA)])
    pump()
    deliveries = Delivery.objects.filter(event=found.event_id)
    event = deliveries[0].event
    assert event.key.version == 4
    by_key = {request.header("idempotency-key"): request for request in receiver.received}
    assert by_key.keys() == {None, str(event.key)}
    kingminos = deliveries.get(contract__startswith="kingminos")
    assert by_key[None].header("kingminos-event-id") == f"km{event.typeid}"
    assert by_key[None].header("kingminos-delivery-id") == kingminos.typeid
    assert all(request.body == DATA for request in receiver.received)
