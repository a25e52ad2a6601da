"""The way of an event from the database to the receiver and back, with a real receiver on loopback."""

import base64
import dataclasses
import gc
import hmac
import itertools
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from email.utils import formatdate

import psycopg
import pytest
from django.db import OperationalError, connection
from django.db.models.functions import Now
from standardwebhooks import Webhook

from deliveries import pump as pump_module
from deliveries.models import Attempt, Delivery, Event
from deliveries.publishing import NewEvent, publish_events
from deliveries.pump import Pump
from deliveries.replays import NotReplayable, replay_delivery
from deliveries.results import reclaim_lost
from deliveries.services import pause_endpoints, resume_endpoints
from endpoints import contracts
from endpoints.models import AuditEvent, Endpoint, EndpointSecret
from endpoints.services import SYSTEM, rotate_secret
from tests.receiver import Received, Receiver, answer, in_receiver
from webhookhub import embedded
from webhookhub.ids import typeid

TABLES = ("endpoints_endpoint", "deliveries_delivery", "deliveries_event")

pytestmark = pytest.mark.django_db(transaction=True)


def publish(tenant, count: int = 1, **fields) -> list[uuid.UUID]:
    values = {"type": "invoice.paid", "payload": b'{"n": 1}', **fields}
    return [one.event_id for one in publish_events([NewEvent(tenant.pk, **values) for _ in range(count)])]


def run_until(done: Callable[[], bool], seconds: float = 10.0) -> Pump:
    """Runs a pump until `done()`, which it asks every turn."""
    one, end = Pump(), time.monotonic() + seconds
    one.run(lambda: done() or time.monotonic() > end)
    assert done(), "the pump did not get there in time"
    return one


def make_due() -> None:
    Delivery.objects.filter(state="pending").update(due_at=Now())


def waits(attempt: Attempt) -> float:
    """Seconds from the end of an attempt to the next one."""
    attempt.delivery.refresh_from_db()
    end = attempt.started_at + timedelta(microseconds=attempt.total_us or 0)
    return (attempt.delivery.due_at - end).total_seconds()


@pytest.fixture
def contract(monkeypatch) -> Callable[..., None]:
    """Changes the standard contract for a test."""

    def change(**fields: object) -> None:
        monkeypatch.setitem(contracts.CONTRACTS, "standard", dataclasses.replace(contracts.STANDARD, **fields))

    return change


# --- Delivered


def test_an_event_arrives_signed_byte_for_byte(tenant, endpoint, receiver, pump):
    payload = b'{ "amount": 1.10, "name": "Zo\xc3\xab",  "n": 12345678901234567890123 }'
    [published] = publish_events([NewEvent(tenant.pk, "invoice.paid", payload)])

    pump()

    [request] = receiver.received
    assert request.body == payload
    Webhook(endpoint.secret).verify(request.body, dict(request.headers))
    delivery = Delivery.objects.get(event=published.event_id)
    assert (delivery.state, delivery.attempts_made, delivery.last_status) == ("delivered", 1, 200)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_2xx_is_delivered_once(tenant, endpoint, receiver, pump, status):
    receiver.respond = answer(status)
    publish(tenant)

    pump()
    make_due()
    pump()

    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.last_status, delivery.last_error) == ("delivered", status, "")
    assert (len(receiver.received), Attempt.objects.count()) == (1, 1)
    assert delivery.finished_at is not None
    assert delivery.claim_token is delivery.lease_until is None


def test_a_request_carries_its_headers_and_none_that_libcurl_adds_by_itself(tenant, endpoint, receiver, pump):
    publish(tenant, content_type="text/plain; charset=utf-8")
    Event.objects.update(payload=b"x" * 2_000_000)  # of over 1 MB libcurl asks first

    pump()

    [request] = receiver.received
    names = [name.lower() for name, _ in request.headers]
    by_us = ["webhook-id", "webhook-timestamp", "webhook-signature", "webhook-attempt", "webhook-event-time"]
    expected = ["host", "user-agent", "content-type", "content-length", "webhook-sequence", *by_us]
    assert sorted(names) == sorted(expected)
    assert request.header("content-type") == "text/plain; charset=utf-8"


@pytest.mark.parametrize("payload", [b"", b"\x00\xff\xfe binary", b"x" * 262_144], ids=["empty", "binary", "large"])
def test_a_payload_of_any_bytes_arrives_and_verifies(tenant, endpoint, receiver, pump, payload):
    publish(tenant, payload=payload, content_type="application/octet-stream")

    pump()

    [request] = receiver.received
    assert request.body == payload
    # By the letter of the specification: the reference library wants text.
    key = base64.b64decode(endpoint.secret.removeprefix("whsec_"))
    signed = f"{request.header('webhook-id')}.{request.header('webhook-timestamp')}.".encode() + payload
    digest = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    assert request.header("webhook-signature") == f"v1,{digest}"


def test_a_delivery_with_a_broken_response_body_is_delivered_with_a_note(tenant, endpoint, receiver, pump):
    receiver.respond = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nok\x00"
    receiver.close_after = True
    publish(tenant)

    pump()

    attempt = Attempt.objects.get()
    assert (Delivery.objects.get().state, attempt.status, bytes(attempt.response_body)) == ("delivered", 200, b"ok\0")
    assert attempt.detail.startswith("response body unreadable: ")


# --- Failed, and tried again


def test_a_500_is_tried_again_after_about_five_seconds_and_recorded(tenant, endpoint, receiver, pump):
    receiver.respond = answer(500, "X-Trace: 7", body=b"e" * 5_000)
    publish(tenant)

    pump()

    delivery, attempt = Delivery.objects.get(), Attempt.objects.get()
    assert (delivery.state, delivery.attempts_made, delivery.last_status) == ("pending", 1, 500)
    assert (delivery.claim_token, delivery.lease_until, delivery.finished_at) == (None, None, None)
    assert 4.5 <= waits(attempt) <= 5.5 + 0.3
    assert (attempt.number, attempt.status, attempt.error, attempt.address) == (1, 500, "", "127.0.0.1")
    assert (bytes(attempt.response_body), attempt.response_truncated) == (b"e" * 4_096, True)
    assert "X-Trace: 7" in attempt.response_headers
    assert any(line.startswith("webhook-signature: v1,") for line in attempt.request_headers)
    assert attempt.url == endpoint.url


def test_attempts_are_numbered_from_one_and_timed_by_the_exchange_alone(tenant, endpoint, receiver, pump):
    receiver.respond = lambda one: [0.2, answer(200 if len(receiver.received) == 3 else 500)]
    publish(tenant)

    for _ in range(3):
        pump()
        make_due()

    attempts = list(Attempt.objects.order_by("number"))
    assert [attempt.number for attempt in attempts] == [1, 2, 3]
    assert all(190_000 <= attempt.wait_us <= attempt.total_us < 1_000_000 for attempt in attempts)
    assert attempts[0].started_at < attempts[1].started_at < attempts[2].started_at
    assert Delivery.objects.get().state == "delivered"


def test_a_delivery_that_is_not_due_is_not_sent(tenant, endpoint, receiver, pump):
    publish(tenant, 2)
    late = Delivery.objects.order_by("id").first()
    Delivery.objects.filter(pk=late.pk).update(due_at=Now() + timedelta(hours=1))

    pump()

    late.refresh_from_db()
    assert (len(receiver.received), late.state, late.attempts_made) == (1, "pending", 0)


@pytest.mark.parametrize(
    ("status", "value", "low", "high"),
    [
        (429, "100", 100, 110),
        (503, "100", 100, 110),
        (503, "date", 98, 110),
        (429, "1", 4.5, 5.5),
        (429, "soon", 4.5, 5.5),
        (429, "999999999", 86_400, 95_040),
        (500, "100", 4.5, 5.5),
        (302, "100", 4.5, 5.5),
    ],
)
def test_retry_after_lengthens_the_wait_where_the_contract_says_so(
    tenant, endpoint, receiver, pump, status, value, low, high
):
    value = formatdate(time.time() + 100, usegmt=True) if value == "date" else value
    receiver.respond = answer(status, f"Retry-After: {value}")
    publish(tenant)

    pump()

    assert Delivery.objects.get().state == "pending"
    assert low <= waits(Attempt.objects.get()) <= high + 0.3


def test_the_last_attempt_that_fails_makes_the_delivery_dead(tenant, endpoint, receiver, pump):
    receiver.respond = answer(500)
    publish(tenant)
    Delivery.objects.update(attempts_made=8)

    pump()
    before = Delivery.objects.get().state
    make_due()
    pump()

    delivery = Delivery.objects.get()
    assert (before, delivery.state, delivery.attempts_made) == ("pending", "dead", 10)
    assert delivery.finished_at is not None
    assert len(receiver.received) == 2


def test_a_redirect_is_a_failure_and_its_target_is_left_alone(tenant, endpoint, receiver, pump):
    receiver.respond = answer(302, f"Location: {receiver.url}/end")
    publish(tenant)

    pump()

    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.last_status, len(receiver.received)) == ("pending", 302, 1)


def test_a_timeout_is_recorded_and_tried_again(tenant, endpoint, receiver, pump, contract):
    contract(deadline=0.2)
    receiver.respond = [30.0]
    publish(tenant)

    pump()

    delivery, attempt = Delivery.objects.get(), Attempt.objects.get()
    assert (delivery.state, delivery.last_error, delivery.last_status) == ("pending", "total_timeout", None)
    assert (attempt.error, attempt.status) == ("total_timeout", None)


def test_a_retry_keeps_the_message_id_and_signs_anew(tenant, endpoint, receiver, pump):
    receiver.respond = lambda one: answer(500 if len(receiver.received) == 1 else 200)
    [event] = publish(tenant)

    pump()
    make_due()
    pump()

    first, second = receiver.received
    assert first.header("webhook-id") == second.header("webhook-id") == typeid(Event.prefix, event)
    for request in (first, second):
        Webhook(endpoint.secret).verify(request.body, dict(request.headers))


def test_a_changed_url_and_secret_count_from_the_next_attempt_on(tenant, endpoint, receiver, pump):
    receiver.respond = answer(500)
    publish(tenant)
    pump()
    with Receiver() as other:
        Endpoint.objects.filter(pk=endpoint.pk).update(url=other.url)
        secret = rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=timedelta())
        make_due()
        pump()

        [request] = other.received
    Webhook(secret).verify(request.body, dict(request.headers))
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(endpoint.secret).verify(request.body, dict(request.headers))
    assert len(receiver.received) == 1
    assert Attempt.objects.get(number=2).url == other.url


def test_while_two_secrets_are_valid_both_sign(tenant, endpoint, receiver, pump):
    new = rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=timedelta(hours=1))
    publish(tenant)

    pump()

    [request] = receiver.received
    signatures = request.header("webhook-signature").split(" ")
    assert len(signatures) == 2
    for secret, signature in zip((new, endpoint.secret), signatures, strict=True):  # the newest first
        headers = {**dict(request.headers), "webhook-signature": signature}
        Webhook(secret).verify(request.body, headers)


# --- Endpoints out of use


def test_a_410_disables_the_endpoint_and_holds_what_waits(tenant, endpoint, receiver, pump):
    receiver.respond = answer(410)
    publish(tenant, 2)
    gone, waiting = Delivery.objects.order_by("id")
    Delivery.objects.filter(pk=waiting.pk).update(due_at=Now() + timedelta(hours=1))

    pump()

    for row in (gone, waiting, endpoint):
        row.refresh_from_db()
    assert (gone.state, gone.last_status, waiting.state) == ("dead", 410, "held")
    assert endpoint.status == Endpoint.Status.DISABLED
    assert "410" in endpoint.status_reason
    audit = AuditEvent.objects.get(action="endpoint.disabled")
    assert (audit.object_id, audit.actor_kind, audit.tenant) == (endpoint.typeid, "system", tenant)
    assert "410" in audit.reason


def test_what_fails_beside_a_410_is_held(tenant, endpoint, receiver, pump):
    receiver.respond = lambda one: answer(410) if one.body == b"gone" else [0.2, answer(500)]
    publish(tenant, payload=b"late")
    publish(tenant, payload=b"gone")

    pump()

    states = {bytes(one.event.payload): one.state for one in Delivery.objects.select_related("event")}
    assert states == {b"gone": "dead", b"late": "held"}


def test_an_endpoint_paused_after_the_fan_out_gets_nothing(tenant, endpoint, receiver, pump):
    publish(tenant)
    Endpoint.objects.update(status="paused")

    pump()

    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.attempts_made, Attempt.objects.count()) == ("held", 0, 0)
    assert receiver.received == []


def test_a_request_in_flight_that_fails_is_held_when_its_endpoint_was_paused(tenant, endpoint, receiver, pump):
    receiver.respond = in_receiver(
        lambda: pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="test"), answer(500)
    )
    publish(tenant)

    pump()

    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.attempts_made, delivery.last_status) == ("held", 1, 500)


def test_a_request_in_flight_that_succeeds_is_delivered_though_its_endpoint_was_paused(
    tenant, endpoint, receiver, pump
):
    receiver.respond = in_receiver(
        lambda: pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="test"), answer(200)
    )
    publish(tenant)

    pump()

    assert Delivery.objects.get().state == "delivered"


def test_what_was_held_is_sent_when_the_endpoint_is_resumed(tenant, endpoint, receiver, pump):
    pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="test")
    publish(tenant)
    pump()
    held = Delivery.objects.get().state
    resume_endpoints(Endpoint.objects.all(), actor=SYSTEM)

    pump()

    assert (held, Delivery.objects.get().state, len(receiver.received)) == ("held", "delivered", 1)


# --- What never reaches the network


def test_without_a_readable_secret_nothing_is_sent_and_the_attempt_fails(tenant, endpoint, receiver, pump):
    rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=timedelta(hours=1))
    first = EndpointSecret.objects.order_by("id").first()
    EndpointSecret.objects.filter(pk=first.pk).update(sealed=b"not a token of ours")
    publish(tenant)

    pump()

    delivery, attempt = Delivery.objects.get(), Attempt.objects.get()
    assert (delivery.state, delivery.last_error) == ("pending", "webhook_secret_unavailable")
    assert (attempt.error, attempt.status, attempt.number) == ("webhook_secret_unavailable", None, 1)
    assert 4.5 <= waits(attempt) <= 5.8
    assert receiver.connections == 0


def test_an_endpoint_without_any_valid_secret_gets_nothing_unsigned(tenant, endpoint, receiver, pump):
    EndpointSecret.objects.update(expires_at=Now() - timedelta(seconds=1))
    publish(tenant)

    pump()

    assert Delivery.objects.get().last_error == "webhook_secret_unavailable"
    assert receiver.connections == 0


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1/hook", "http://[::ffff:127.0.0.1]:{port}/", "http://localhost:{port}/", "ftp://127.0.0.1/"]
)
def test_a_url_that_the_rule_blocks_is_not_dialled(tenant, endpoint, receiver, pump, url):
    Endpoint.objects.update(url=url.format(port=receiver.port))
    publish(tenant)

    pump()

    delivery, attempt = Delivery.objects.get(), Attempt.objects.get()
    assert (delivery.state, delivery.last_error) == ("pending", "blocked_address")
    assert attempt.detail.startswith("blocked by the address rule")
    assert (attempt.address, receiver.connections) == (None, 0)


def test_lacking_descriptors_of_our_own_is_no_attempt(tenant, endpoint, receiver, pump, monkeypatch, caplog):
    def no_socket(*_: object) -> None:
        raise OSError(24, "Too many open files")

    publish(tenant)
    with monkeypatch.context() as patch:
        patch.setattr("deliveries.transport.socket.socket", no_socket)
        pump()

    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.attempts_made, delivery.last_error) == ("pending", 0, "")
    assert Attempt.objects.count() == 0
    assert delivery.due_at > delivery.created_at + timedelta(seconds=4)
    assert "Too many open files" in caplog.text


# --- Leases


def test_a_pump_that_lost_its_lease_writes_nothing(tenant, endpoint, receiver, caplog):
    other = uuid.uuid4()
    receiver.respond = in_receiver(lambda: Delivery.objects.update(claim_token=other), answer(200))
    publish(tenant)
    one, end = Pump(), time.monotonic() + 5

    one.run(lambda: one.recorded > 0 or time.monotonic() > end)

    delivery = Delivery.objects.get()
    assert one.recorded == 1
    assert (delivery.state, delivery.claim_token, delivery.attempts_made) == ("sending", other, 0)
    assert Attempt.objects.count() == 0
    assert "leases had run out" in caplog.text


def test_a_lease_that_ran_out_is_an_interrupted_attempt_and_the_message_goes_again(tenant, endpoint, receiver, pump):
    [event] = publish(tenant)
    Delivery.objects.update(
        state="sending",
        claim_token=uuid.uuid4(),
        claimed_at=Now() - timedelta(minutes=2),
        lease_until=Now() - timedelta(seconds=1),
    )

    pump()

    first, second = Attempt.objects.order_by("number")
    assert (first.number, first.error, first.status) == (1, "interrupted", None)
    assert (second.number, second.status) == (2, 200)
    [request] = receiver.received
    assert request.header("webhook-id") == typeid(Event.prefix, event)
    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.attempts_made) == ("delivered", 2)


def test_the_last_attempt_that_was_interrupted_makes_the_delivery_dead(tenant, endpoint, receiver, pump):
    publish(tenant)
    Delivery.objects.update(
        state="sending",
        attempts_made=9,
        claim_token=uuid.uuid4(),
        claimed_at=Now(),
        lease_until=Now() - timedelta(seconds=1),
    )

    pump()

    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.last_error, receiver.received) == ("dead", "interrupted", [])


def test_a_live_lease_is_left_alone(tenant, endpoint):
    publish(tenant)
    token = uuid.uuid4()
    Delivery.objects.update(
        state="sending", claim_token=token, claimed_at=Now(), lease_until=Now() + timedelta(seconds=5)
    )

    taken = reclaim_lost()

    assert (taken, Delivery.objects.get().claim_token, Attempt.objects.count()) == (0, token, 0)


def test_after_the_database_was_away_for_longer_than_a_lease_a_pump_records_what_it_has_in_hand(
    tenant, endpoint, receiver, monkeypatch
):
    record = pump_module.record_results

    def fail(results):
        monkeypatch.setattr(pump_module, "record_results", record)
        Delivery.objects.update(lease_until=Now() - timedelta(seconds=1))
        raise OperationalError("gone")

    monkeypatch.setattr(pump_module, "record_results", fail)
    monkeypatch.setattr(pump_module, "RECLAIM_SECONDS", 0.5)  # so that it is time to look for leases that ran out
    publish(tenant)
    run_until(lambda: not Delivery.objects.exclude(state="delivered").exists())
    assert len(receiver.received) == Attempt.objects.count() == 1


def test_a_pump_at_its_end_records_what_it_has_in_hand_when_the_database_is_back(
    tenant, endpoint, receiver, monkeypatch
):
    record, back_at = pump_module.record_results, time.monotonic() + 2.5

    def fail_at_first(results):
        if time.monotonic() < back_at:
            raise OperationalError("gone")
        record(results)

    monkeypatch.setattr(pump_module, "record_results", fail_at_first)
    receiver.respond = in_receiver(lambda: time.sleep(0.3), answer(200))  # the pump has come to its end meanwhile
    publish(tenant)
    pump = Pump(drain_seconds=1.0)
    pump.run(lambda: bool(receiver.received) and pump.reaches_database)  # as jobs.run_pump does
    assert (Delivery.objects.get().state, len(receiver.received)) == ("delivered", 1)


def test_the_lease_of_a_long_request_is_renewed(tenant, endpoint, receiver, pump, settings):
    settings.LEASE_SECONDS = 0.5
    taken = []

    def look() -> None:
        time.sleep(0.9)  # longer than the lease: what is tested is that something happens meanwhile
        taken.append(reclaim_lost())

    receiver.respond = in_receiver(look, answer(200))
    publish(tenant)

    pump()

    assert (taken, Delivery.objects.get().state, Attempt.objects.count()) == ([0], "delivered", 1)


# --- Replays


@pytest.mark.parametrize(("status", "state"), [(200, "delivered"), (410, "dead")])
def test_a_replay_sends_the_message_again_as_a_new_delivery(tenant, endpoint, receiver, pump, status, state):
    receiver.respond = lambda one: answer(status if len(receiver.received) == 1 else 200)
    publish(tenant)
    pump()
    Endpoint.objects.update(status="active")
    old = Delivery.objects.get()
    before = Delivery.objects.filter(pk=old.pk).values().get()

    new = replay_delivery(delivery=old, actor=SYSTEM, reason="asked for")
    pump()

    new.refresh_from_db()
    first, second = receiver.received
    assert first.header("webhook-id") == second.header("webhook-id")
    assert first.body == second.body
    assert (new.state, new.replay_of_id, new.trigger, new.attempts_made) == ("delivered", old.pk, "manual", 1)
    assert old.state == state
    assert Delivery.objects.filter(pk=old.pk).values().get() == before
    assert AuditEvent.objects.get(action="delivery.replay").object_id == old.typeid


@pytest.mark.parametrize("state", ["pending", "sending"])
def test_a_delivery_under_way_is_not_replayed(tenant, endpoint, state):
    publish(tenant)
    if state == "sending":
        Delivery.objects.update(state=state, claim_token=uuid.uuid4(), lease_until=Now() + timedelta(minutes=1))

    with pytest.raises(NotReplayable, match="still under way"):
        replay_delivery(delivery=Delivery.objects.get(), actor=SYSTEM)

    assert Delivery.objects.count() == 1


# --- Side by side


def test_an_endpoint_that_hangs_delays_no_other_of_the_same_event(
    tenant, endpoint, make_endpoint, receiver, pump, contract
):
    contract(deadline=1.0)
    make_endpoint()
    hanging = make_endpoint(url=f"http://127.0.0.1:{receiver.port}/hang")
    receiver.respond = lambda one: [30.0] if "/hang" in one.line else answer()
    publish(tenant)

    pump()

    hung = Attempt.objects.get(delivery__endpoint=hanging)
    others = Delivery.objects.exclude(endpoint=hanging)
    assert hung.error == "total_timeout"
    assert [one.state for one in others] == ["delivered", "delivered"]
    assert all(one.finished_at < hung.started_at + timedelta(seconds=0.5) for one in others)


def test_a_backlog_at_an_endpoint_that_hangs_delays_no_other_endpoint(
    tenant, make_endpoint, receiver, contract, settings
):
    contract(deadline=1.0)
    settings.PUMP_IN_FLIGHT, settings.PUMP_ENDPOINT_IN_FLIGHT = 12, 4
    hanging = make_endpoint(url=f"http://127.0.0.1:{receiver.port}/hang", event_types=["hang"])
    make_endpoint(event_types=["fine"])
    receiver.respond = lambda one: [30.0] if "/hang" in one.line else answer()
    publish(tenant, 20, type="hang")
    publish(tenant, 50, type="fine")
    begun = time.monotonic()

    run_until(lambda: Delivery.objects.filter(state="delivered").count() == 50 or time.monotonic() > begun + 5)

    hung = Attempt.objects.filter(delivery__endpoint=hanging).order_by("started_at").first()
    fine = Delivery.objects.filter(state="delivered")
    assert fine.count() == 50
    assert max(one.finished_at for one in fine) < hung.started_at + timedelta(seconds=0.7)
    assert sum("/hang" in one.line for one in receiver.received) <= 4


def test_no_more_requests_are_in_flight_at_an_endpoint_than_it_may_have(tenant, endpoint, receiver, pump, settings):
    settings.PUMP_ENDPOINT_IN_FLIGHT = 5
    lock, present, most = threading.Lock(), 0, 0

    def respond(_: Received):
        nonlocal present, most
        with lock:
            present += 1
            most = max(most, present)
        yield 0.02
        with lock:
            present -= 1
        yield answer()

    receiver.respond = respond
    publish(tenant, 60)

    pump()

    assert Delivery.objects.filter(state="delivered").count() == len(receiver.received) == 60
    assert 2 <= most <= 5


def test_during_a_request_no_row_is_locked_and_no_transaction_is_open(tenant, endpoint, receiver, pump):
    params = connection.get_connection_params()
    dsn = {name: params[name] for name in ("dbname", "user", "host", "port", "password") if params.get(name)}
    seen = []

    def respond(_: Received) -> bytes:
        with psycopg.connect(**dsn) as other:
            locks = (f"SELECT id FROM {table} FOR UPDATE NOWAIT" for table in TABLES)
            seen.extend(other.execute(lock).rowcount for lock in locks)
            states = "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            seen.append({state for (state,) in other.execute(states)})
        return answer()

    receiver.respond = respond
    publish(tenant)

    pump()

    assert seen == [1, 1, 1, {"idle"}]


# --- Starting, stopping, and going on without others


def test_a_pump_told_to_stop_finishes_and_records_what_is_in_flight(tenant, endpoint, receiver):
    receiver.respond = lambda _: [0.3, answer()]
    publish(tenant)

    Pump().run(lambda: bool(receiver.received))

    assert (Delivery.objects.get().state, Attempt.objects.count()) == ("delivered", 1)


def test_a_pump_told_to_stop_claims_nothing_more(tenant, endpoint, receiver):
    def respond(_: Received) -> bytes:
        publish(tenant)
        connection.close()
        return [0.2, answer()]

    receiver.respond = respond
    publish(tenant)

    Pump().run(lambda: bool(receiver.received))

    assert sorted(Delivery.objects.values_list("state", flat=True)) == ["delivered", "pending"]
    assert len(receiver.received) == 1


def test_a_pump_that_may_wait_no_longer_leaves_what_is_in_flight_to_its_lease(tenant, endpoint, receiver):
    receiver.respond = [30.0]
    publish(tenant)
    begun = time.monotonic()

    Pump(drain_seconds=0.2).run(lambda: bool(receiver.received))

    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.lease_until is None) == ("sending", False)
    assert time.monotonic() - begun < 2


def test_a_wake_up_starts_a_delivery_that_polling_would_find_late(tenant, endpoint, receiver, monkeypatch):
    monkeypatch.setattr(pump_module, "POLL_SECONDS", 5.0)

    def later() -> None:
        publish(tenant)
        connection.close()

    timer = threading.Timer(0.3, later)
    timer.start()
    begun = time.monotonic()
    Pump().run(lambda: bool(receiver.received) or time.monotonic() > begun + 10)
    timer.join()

    assert time.monotonic() - begun < 2
    assert Delivery.objects.get().state == "delivered"


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "unix:///nowhere/valkey.sock"])
def test_without_redis_deliveries_go_within_half_a_second(tenant, endpoint, receiver, settings, url):
    settings.REDIS_URL = url
    begun, published = time.monotonic(), 0.0

    def should_stop() -> bool:
        nonlocal published
        if not published and time.monotonic() > begun + 0.3:
            publish(tenant)
            published = time.time()
        return bool(receiver.received) or time.monotonic() > begun + 5

    Pump().run(should_stop)

    assert Delivery.objects.get().state == "delivered"
    assert receiver.received[0].at - published < 0.5


def test_a_pump_outlives_the_loss_of_its_database_connection_and_sends_nothing_twice(
    tenant, endpoint, receiver, pump, caplog
):
    connection.ensure_connection()
    pids = []

    def cut() -> None:
        with connection.cursor() as cursor:  # of the receiver's thread
            cursor.execute(
                "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
            pids.extend(cursor.fetchall())

    receiver.respond = in_receiver(cut, answer(200))
    publish(tenant)

    pump()

    assert pids
    assert (Delivery.objects.get().state, len(receiver.received), Attempt.objects.count()) == ("delivered", 1, 1)
    assert "the database is away" in caplog.text


def test_a_pump_leaves_nothing_behind_in_its_process(tenant, endpoint, pump):
    publish(tenant, 20)
    one = Pump()
    left = weakref.ref(one._transport)
    one.run(lambda: not Delivery.objects.in_hand().exists())
    del one

    pump()  # collects what came before it

    gc.collect()
    assert left() is None


def test_when_valkey_goes_the_next_socket_is_heard_although_it_gets_its_number(
    tenant, endpoint, receiver, settings, tmp_path
):
    with embedded._valkey(tmp_path) as url:
        settings.REDIS_URL = url
        pump = Pump()
    turns = itertools.count()
    end = time.monotonic() + 5

    def is_over() -> bool:
        if next(turns) == 3:  # by then the pump has seen that the connection is lost
            publish(tenant)
        return bool(receiver.received and not Delivery.objects.in_hand().exists()) or time.monotonic() > end

    pump.run(is_over)
    assert Delivery.objects.get().last_status == 200
    assert not pump.hears_wake_ups
