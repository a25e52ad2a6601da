"""Cases that have gone wrong in other senders of webhooks, each by its id, on the real engine."""

import contextlib
import dataclasses
import itertools
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import connection, models
from django.db.models.functions import Now

from deliveries import control, services
from deliveries.control import NotDone, confirm_verification, send_test, start_verification
from deliveries.messages import rfc3339
from deliveries.models import Attempt, Delivery, Event, Verification
from deliveries.publishing import NewEvent, publish_events
from deliveries.pump import Pump
from deliveries.replays import NotReplayable, replay_delivery
from deliveries.services import delete_endpoint, disable_endpoints, pause_endpoints, resume_endpoints, switch_webhooks
from endpoints.admin import RotateForm
from endpoints.contract_file import read_contracts
from endpoints.contracts import BETTERSTOOD, BRIEF, CONTRACTS, DAY, KINGMINOS, STANDARD, decide, draw
from endpoints.models import AuditEvent, Endpoint, EndpointSecret, Tenant
from endpoints.services import SYSTEM, create_endpoint, rotate_secret, update_endpoint
from endpoints.signing import SCHEMES, parse_secret
from tests.receiver import Received, Receiver, answer, in_receiver
from webhookhub import signatures
from webhookhub.receiver import VerificationError, verify

pytestmark = pytest.mark.django_db(transaction=True)

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
LIFECYCLE = "com.elicitra.interaction.ended.v1"
FOUR = [STANDARD, BRIEF, BETTERSTOOD, KINGMINOS]


# --- What the cases share


@pytest.fixture
def unverified(make_endpoint, contract) -> Endpoint:
    """An endpoint that has to be verified first."""
    contract("betterstood", https_443=False)
    return make_endpoint(contract="betterstood")


def publish(tenant, count: int = 1, **fields) -> list[Event]:
    values = {"type": "invoice.paid", "payload": b'{"n": 1}', **fields}
    found = publish_events([NewEvent(tenant.pk, **values) for _ in range(count)])
    return [Event.objects.get(pk=one.event_id) for one in found]


def publish_lifecycle(tenant, interaction: str = "int_1") -> Event:
    payload = json.dumps({"interactionId": interaction, "lifecycleSequence": 1}).encode()
    [event] = publish(tenant, type=LIFECYCLE, payload=payload)
    return event


def only(event: Event) -> Delivery:
    return Delivery.objects.get(event=event)


def make_due() -> None:
    Delivery.objects.filter(state="pending").update(due_at=Now())


def every() -> models.QuerySet[Endpoint]:
    return Endpoint.objects.all()


def states() -> Counter:
    return Counter(Delivery.objects.values_list("state", flat=True))


def ended_at(attempt: Attempt) -> datetime:
    return attempt.started_at + timedelta(microseconds=attempt.total_us or 0)


def wait_after(attempt: Attempt) -> float:
    """Seconds from the end of an attempt until the next one is due."""
    return (Delivery.objects.get(pk=attempt.delivery_id).due_at - ended_at(attempt)).total_seconds()


def first_wait(delivery: Delivery) -> float:
    """Seconds until the second attempt by the schedule of `standard`."""
    return STANDARD.steps[0].at(draw(delivery.typeid, 1)) / 1000


def in_threads(*actions: Callable[[], object]) -> None:
    """Runs all of them at once, and raises what one of them raised."""
    failed: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if failed:
        raise failed[0]


class Counting:
    """Answers after a few milliseconds, and knows how many requests were there at once."""

    def __init__(self) -> None:
        self._lock, self._present, self.most = threading.Lock(), 0, 0

    def __call__(self, _: Received):
        with self._lock:
            self._present += 1
            self.most = max(self.most, self._present)
        yield 0.005
        with self._lock:
            self._present -= 1
        yield answer()


def signatures_of(request: Received) -> list[str]:
    return request.header("webhook-signature").split(" ")


def is_verified(request: Received, secret: str, **options) -> bool:
    try:
        verify(request.body, dict(request.headers), secret, **{"tolerance": 10**9, **options})
    except VerificationError:
        return False
    return True


# --- B37


@pytest.mark.parametrize("name", ["standard", "brief", "betterstood", "kingminos"])
def test_b37_the_id_is_the_same_on_retry_replay_and_every_endpoint(tenant, endpoint_under, receiver, pump, name):
    failing = endpoint_under(name, url=f"{receiver.url}/a")
    endpoint_under(name, url=f"{receiver.url}/b")
    receiver.respond = lambda one: answer(500 if len(paths("/a")) == 1 and "/a" in one.line else 200)

    def paths(path):
        return [one for one in receiver.received if path in one.line]

    event = publish_lifecycle(tenant)
    pump()
    make_due()
    pump()
    replay_delivery(delivery=Delivery.objects.get(endpoint=failing), actor=SYSTEM)
    pump()

    assert (len(paths("/a")), len(paths("/b"))) == (3, 1)
    if name == "betterstood":
        ids = {json.loads(one.body)["id"] for one in receiver.received}
        assert {json.loads(one.body)["time"] for one in receiver.received} == {rfc3339(event.accepted_at)}
    else:
        header = "kingminos-event-id" if name == "kingminos" else "webhook-id"
        ids = {one.header(header) for one in receiver.received}
    assert ids == {f"km{event.typeid}" if name == "kingminos" else event.typeid}
    keys = {one.header("idempotency-key") for one in receiver.received}
    assert keys == {str(event.key) if name == "brief" else None}
    assert len({one.body for one in receiver.received}) == 1
    assert {one.header("webhook-event-time") for one in receiver.received} == {rfc3339(event.accepted_at)}


# --- B38


def test_b38_a_second_rotation_has_a_grace_time_of_its_own(tenant, endpoint, receiver, pump, clock):
    def deliver() -> Received:
        publish(tenant)
        pump()
        return receiver.received[-1]

    second = rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=HOUR)
    clock.advance_to(clock.now() + 2 * HOUR)
    default = timedelta(seconds=RotateForm.base_fields["overlap"].initial)
    third = rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=default)
    rotated = clock.now()

    request = deliver()
    assert len(signatures_of(request)) == 2
    assert [is_verified(request, secret) for secret in (endpoint.secret, second, third)] == [False, True, True]

    clock.advance_to(rotated + 23 * HOUR)
    assert is_verified(deliver(), second)

    clock.advance_to(rotated + 25 * HOUR)
    request = deliver()
    assert len(signatures_of(request)) == 1
    assert [is_verified(request, secret) for secret in (endpoint.secret, second, third)] == [False, False, True]


def test_b38_no_grace_time_leaves_one_signature_at_once_also_inside_an_earlier_one(tenant, endpoint, receiver, pump):
    rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=24 * HOUR)
    new = rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=timedelta())

    publish(tenant)
    pump()

    [request] = receiver.received
    assert len(signatures_of(request)) == 1
    assert is_verified(request, new)


def test_b38_two_rotations_inside_a_grace_time_leave_three_signatures_until_the_last_one_s_end(
    tenant, endpoint, receiver, pump, clock
):
    second = rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=24 * HOUR)
    third = rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=HOUR)

    publish(tenant)
    pump()
    clock.advance_to(clock.now() + 2 * HOUR)
    publish(tenant)
    pump()

    during, after = receiver.received
    secrets = (third, second, endpoint.secret)
    assert len(signatures_of(during)) == 3
    for secret, signature in zip(secrets, signatures_of(during), strict=True):  # the newest first
        verify(during.body, {**dict(during.headers), "webhook-signature": signature}, secret, tolerance=10**9)
    assert [is_verified(after, secret) for secret in secrets] == [True, False, False]


def test_b38_a_pending_retry_is_signed_with_what_is_valid_when_it_is_sent(tenant, endpoint, receiver, pump, clock):
    receiver.respond = answer(500)
    publish(tenant)
    pump()
    new = rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=HOUR)
    make_due()
    pump()
    clock.advance_to(clock.now() + 2 * HOUR)
    pump()

    one, two, three = receiver.received
    assert [is_verified(request, endpoint.secret) for request in (one, two, three)] == [True, True, False]
    assert [is_verified(request, new) for request in (one, two, three)] == [False, True, True]
    assert [len(signatures_of(request)) for request in (one, two, three)] == [1, 2, 1]


def test_b38_old_and_new_secret_sign_as_the_vectors_say():
    body = '{"name":"Zoë ₹ 😊","n":1.10}'.encode()
    new = parse_secret("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
    old = parse_secret("whsec_ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8=")

    lines = SCHEMES["standard-webhooks"]("msg_test_01", 1_700_000_000, body, [new, old])

    expected = (
        "webhook-signature: v1,PBJZ0NZZtRMpyer1+euE8aV5d91Ly6/j+eS7s3Iarv8= "
        "v1,E4fBCzAoCnUQAs5e6z9pH8iQ1BpCTCOE0/6qqgoNShQ="
    )
    assert expected in lines


# --- B40


@pytest.fixture
def delivered(tenant, endpoint, receiver, pump) -> Received:
    """A request as it arrived."""
    publish(tenant)
    pump()
    [request] = receiver.received
    return request


def with_line(request: Received, line: str) -> dict[str, str]:
    return {**dict(request.headers), "webhook-signature": line}


def test_b40_an_empty_or_cut_off_signature_is_refused(endpoint, delivered):
    right = delivered.header("webhook-signature")
    for line in ("v1,", "v1", right[:11], right[:-4], f"{right} v1,"):
        with pytest.raises(VerificationError):
            verify(delivered.body, with_line(delivered, line), endpoint.secret)


def test_b40_the_right_signature_counts_wherever_it_stands(endpoint, delivered):
    right, wrong = delivered.header("webhook-signature"), f"v1,{'A' * 43}="
    for line in (f"v2,x {right}", f"{wrong}  {right}", f"{wrong} {wrong} {right}", f"{right} {wrong}"):
        verify(delivered.body, with_line(delivered, line), endpoint.secret)


def test_b40_signatures_are_compared_in_constant_time(endpoint, delivered, monkeypatch):
    right = delivered.header("webhook-signature").removeprefix("v1,").encode()
    compared, really = [], signatures.hmac.compare_digest
    monkeypatch.setattr(signatures.hmac, "compare_digest", lambda *pair: compared.append(pair) or really(*pair))

    verify(delivered.body, dict(delivered.headers), endpoint.secret)

    assert (right, right) in compared


# --- B42


def test_b42_a_retry_sends_the_captured_bytes_to_today_s_url_with_today_s_secret(tenant, endpoint, receiver, pump):
    payload = '{ "b": 1.10,  "a": "Zoë",\n "a": 12345678901234567890123 }'.encode()
    receiver.respond = answer(500)
    [event] = publish(tenant, payload=payload)
    pump()
    with Receiver() as other:
        Tenant.objects.update(name="Renamed")
        endpoint.url, endpoint.name = f"{other.url}/new?x=1", "renamed"
        update_endpoint(endpoint=endpoint, fields=["url", "name"], actor=SYSTEM)
        secret = rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=timedelta())
        make_due()
        pump()
        [request] = other.received

    [first] = receiver.received
    assert first.body == request.body == payload
    assert request.line.startswith("POST /hook/new?x=1 ")
    assert is_verified(request, secret)
    assert not is_verified(request, endpoint.secret)
    for name in ("content-type", "webhook-id", "webhook-event-time", "webhook-sequence"):
        assert first.header(name) == request.header(name)
    attempts = only(event).attempts.order_by("number")
    assert [one.url for one in attempts] == [receiver.url, endpoint.url]


# --- B54


def test_b54_a_thousand_failures_in_one_second_come_back_spread_and_few_at_a_time(
    tenant, endpoint, receiver, pump, clock, settings, monkeypatch
):
    settings.PUMP_ENDPOINT_IN_FLIGHT = 25
    monkeypatch.setitem(CONTRACTS, "standard", dataclasses.replace(STANDARD, patience=0))  # or most would wait, unsent
    receiver.respond = answer(503, "Retry-After: 600")
    publish(tenant, 1_000)
    pump()

    attempts = Attempt.objects.select_related("delivery")
    waits = [(one.delivery.due_at - ended_at(one)).total_seconds() for one in attempts]
    assert len(waits) == len(receiver.received) == 1_000
    assert min(waits) >= 600
    assert max(waits) - min(waits) > 57
    assert max(waits) < 661
    seconds = Counter(int(one.due_at.timestamp()) for one in Delivery.objects.all())
    assert max(seconds.values()) < 60  # a thousand over a minute: 17 in a second

    clock.advance_to(max(Delivery.objects.values_list("due_at", flat=True)))
    receiver.respond = counting = Counting()
    pump()
    assert states() == {"delivered": 1_000}
    assert len(receiver.received) == 2_000
    assert 2 <= counting.most <= 25


# --- B55


def test_b55_a_receiver_that_always_refuses_gets_three_posts_by_the_schedule_and_no_more(
    tenant, make_endpoint, receiver, pump, clock, monkeypatch
):
    text = '[short]\nbase = "standard"\nwaits = [1, 1]\njitter = 0\n'
    for name, one in read_contracts(text, CONTRACTS).items():
        monkeypatch.setitem(CONTRACTS, name, one)
    make_endpoint(contract="short")
    receiver.respond = answer(403)
    [event] = publish(tenant)
    for number in (1, 2, 3):
        pump()
        delivery = only(event)
        assert len(receiver.received) == delivery.attempts_made == number
        if number < 3:
            assert 1.0 <= wait_after(delivery.attempts.get(number=number)) < 1.3
            clock.advance_to(delivery.due_at - SECOND / 2)
            pump()
            assert len(receiver.received) == number, "it was sent before its time"
            clock.advance_to(delivery.due_at)

    assert (delivery.state, delivery.last_error, delivery.outcome) == ("dead", "http_403", "dead")
    clock.advance_to(clock.now() + timedelta(days=30))
    pump()
    assert len(receiver.received) == 3


@contextlib.contextmanager
def refused_attempts(code: str, times: int):
    """The database refuses to take attempts in, so many times."""
    with connection.cursor() as cursor:
        cursor.execute(f"""
            CREATE SEQUENCE refusals;
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF nextval('refusals') <= {times} THEN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END IF;
                RETURN NEW;
            END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON deliveries_attempt FOR EACH ROW EXECUTE FUNCTION refuse();
        """)
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER refuse ON deliveries_attempt; DROP FUNCTION refuse; DROP SEQUENCE refusals")


@pytest.mark.parametrize("code", ["data_exception", "disk_full", "deadlock_detected"])
def test_b55_an_attempt_that_cannot_be_saved_once_is_counted_and_not_sent_again_before_its_time(
    tenant, endpoint, receiver, pump, monkeypatch, code
):
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the pump waits a second for a database that is away
    receiver.respond = answer(403)
    [event] = publish(tenant)
    with refused_attempts(code, 1):
        pump()

    delivery, attempt = only(event), Attempt.objects.get()
    assert len(receiver.received) == 1
    assert (delivery.state, delivery.attempts_made, attempt.number, attempt.status) == ("pending", 1, 1, 403)
    assert wait_after(attempt) >= first_wait(delivery)
    pump()
    assert len(receiver.received) == 1


def test_b55_an_attempt_that_can_never_be_saved_ends_its_delivery_after_one_post(tenant, endpoint, receiver, pump):
    receiver.respond = answer(403)
    [event] = publish(tenant)
    with refused_attempts("data_exception", 1_000_000):
        pump()
        make_due()
        pump()

    assert len(receiver.received) == 1
    assert only(event).state == "dead"


# --- B56


def test_b56_attempts_are_numbered_and_timed_and_a_replay_disturbs_no_schedule(tenant, endpoint, receiver, pump):
    replies = iter([500, 500, 200, 500, 200])
    receiver.respond = lambda _: [0.3, answer(next(replies))]
    [event] = publish(tenant)
    pump()
    make_due()
    pump()

    old = only(event)
    due = old.due_at
    with pytest.raises(NotReplayable):  # by hand, while it is on its way: it would reach the receiver twice
        replay_delivery(delivery=old, actor=SYSTEM)
    pump()
    old.refresh_from_db()
    assert (old.due_at, old.attempts_made, len(receiver.received)) == (due, 2, 2)
    make_due()
    pump()
    old.refresh_from_db()
    assert (old.state, old.attempts_made) == ("delivered", 3)

    ended = Delivery.objects.filter(pk=old.pk).values().get()
    manual = replay_delivery(delivery=old, actor=SYSTEM)
    pump()
    assert first_wait(manual) <= wait_after(manual.attempts.get()) <= first_wait(manual) + 0.3
    assert Delivery.objects.filter(state="pending").count() == 1
    make_due()
    pump()

    assert Delivery.objects.filter(pk=old.pk).values().get() == ended
    attempts = list(Attempt.objects.order_by("started_at"))
    assert [(one.delivery_id, one.number) for one in attempts] == [
        *((old.pk, number) for number in (1, 2, 3)),
        *((manual.pk, number) for number in (1, 2)),
    ]
    assert [int(one.header("webhook-attempt")) for one in receiver.received] == [1, 2, 3, 1, 2]
    assert all(300_000 <= one.total_us < 400_000 for one in attempts)
    for one, following in itertools.pairwise(attempts):
        assert one.started_at < ended_at(one) <= following.started_at


# --- B63

# What a value of Retry-After does to a wait of d = 5 s: the seconds it comes to. C is a day.
D, C = 5, DAY
FORMS = {
    "120": 120,
    "0": D,
    "-5": D,
    "": D,
    "abc": D,
    "0x10": D,
    "1e9": D,
    "inf": D,
    "nan": D,
    "120, 60": D,
    "²": D,
    "٣": D,
    "1.5": D,
    "30.5": D,
    " 30 ": 30,
    "9999999999": C,
    "Wed, 21 Oct 2015 07:28:00 GMT": D,
    "Thu, 15 Jan 2026 12:05:00 GMT": 300,
    "Thursday, 15-Jan-26 12:05:00 GMT": 300,
    "Thu Jan 15 12:05:00 2026": 300,
    "Wed, 21 Oct 2099 07:28:00 GMT": C,
    "Wednesday, 21-Oct-48 07:28:00 GMT": C,
    "Wed Oct 21 07:28:00 2099": C,
    "2099-10-21T07:28:00Z": D,
    "Wed, 32 Oct 2099 07:28:00 GMT": D,
    "Wed, 21 Oct 12099 07:28:00 GMT": D,
}
NOW = 1_768_478_400  # Thu, 15 Jan 2026 12:00:00 GMT
EXACT = dataclasses.replace(STANDARD.without_spread(), retry_after=dataclasses.replace(STANDARD.retry_after, late=0))


def verdict_on(contract, status, value=None, attempt=1):
    return decide(
        contract,
        delivery="d",
        attempt=attempt,
        first_started=NOW * 1000,
        ended=NOW * 1000,
        status=status,
        retry_after=value,
    )


def waits_for(contract, value: str) -> set[float]:
    found = {verdict_on(contract, status, value) for status in (429, 503)}
    assert {one.action for one in found} == {"retry"}
    return {one.wait / 1000 for one in found}


def test_b63_a_form_of_retry_after_counts_or_is_ignored():
    assert {value: waits_for(EXACT, value) for value in FORMS} == {value: {FORMS[value]} for value in FORMS}


def test_b63_a_number_of_5000_digits_is_ignored():
    assert waits_for(EXACT, "9" * 5_000) == {D}


def test_b63_a_date_with_the_zone_0000_is_in_utc():
    assert waits_for(EXACT, "Wed, 21 Oct 2099 07:28:00 -0000") == {C}


def test_b63_no_retry_comes_sooner_than_scheduled_or_asked_and_none_is_one_more():
    for value, seconds in FORMS.items():
        [wait] = waits_for(STANDARD, value)
        assert (seconds if seconds > D else 4.5) <= wait <= seconds * 1.1, value
        assert verdict_on(STANDARD, 429, value, attempt=STANDARD.max_attempts).action == "exhausted"
        assert verdict_on(STANDARD, 200, value).action == "delivered"


def test_b63_retry_after_counts_through_the_whole_engine(tenant, endpoint, receiver, pump):
    def date(form: str, seconds: int) -> str:
        return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime(form)

    cases = [  # lines of the answer's head, and the seconds that they ask for (None: nothing that counts)
        (b"Retry-After: 120", 120),
        (b"retry-after:120", 120),
        (b"Retry-After: \t 30 \t", 30),
        (b"Retry-After: 0", None),
        (b"Retry-After: -5", None),
        (b"Retry-After:", None),
        (b"Retry-After: \xc2\xb2", None),
        (b"Retry-After: \xb2", None),
        (b"Retry-After: \xd9\xa3", None),
        (b"Retry-After: 120, 60", None),
        (b"Retry-After: nan", None),
        (b"Retry-After: 9999999999", DAY),
        (b"Retry-After: 120\r\nRetry-After: 60", 120),  # the first counts
        (b"Retry-After: soon\r\nRetry-After: 60", None),
        (b"X-Retry-After: 120", None),
        (b"Retry-After: " + date("%a, %d %b %Y %H:%M:%S GMT", 302).encode(), 300),
        (b"Retry-After: " + date("%A, %d-%b-%y %H:%M:%S GMT", 302).encode(), 300),
        (b"Retry-After: " + date("%a %b %e %H:%M:%S %Y", 302).encode(), 300),
        (b"Retry-After: Wed, 21 Oct 2099 07:28:00 GMT", DAY),
        (b"Retry-After: Wed, 21 Oct 2015 07:28:00 GMT", None),
    ]

    def respond(one: Received) -> bytes:
        number = int(one.body)
        head = cases[number // 2][0]
        return b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n%b\r\n\r\n" % ((429, 503)[number % 2], head)

    receiver.respond = respond
    events = [publish(tenant, payload=b"%d" % number)[0] for number in range(2 * len(cases))]
    pump()

    assert len(receiver.received) == len(events)
    for number, event in enumerate(events):
        (line, seconds), delivery = cases[number // 2], only(event)
        wait, least = wait_after(delivery.attempts.get()), first_wait(delivery)
        most = least
        if seconds is not None:
            least, most = seconds, seconds * 1.1 + 2
        assert delivery.state == "pending", line
        assert least <= wait <= most + 0.5, line


def test_b63_on_a_success_retry_after_is_ignored(tenant, endpoint, receiver, pump):
    receiver.respond = answer(200, "Retry-After: 120")
    [event] = publish(tenant)
    pump()
    make_due()
    pump()
    assert (only(event).state, len(receiver.received)) == ("delivered", 1)


# --- B64

SUCCESSES = {200, 201, 202, 204, 299}
STATUSES = sorted(
    {*SUCCESSES, *range(300, 309), 400, 401, 403, 404, 408, 409, 410, 413, 422, 425, 429}
    | {500, 501, 502, 503, 504, 599, 999, 0}
)
ENDS = {  # what ends a delivery at once, by each contract's text
    "standard": {410: "disable"},
    "brief": dict.fromkeys({*range(300, 309), 400, 401, 403, 404, 409, 410, 413, 422, 501}, "terminal"),
    "betterstood": {410: "disable"},
    "kingminos": {404: "terminal", 413: "terminal"},
}


@pytest.mark.parametrize("under", FOUR, ids=lambda one: one.name)
def test_b64_a_status_delivers_ends_or_is_tried_again_as_the_contract_says(under):
    found = {status: verdict_on(under, status).action for status in STATUSES}
    assert found == dict.fromkeys(STATUSES, "retry") | ENDS[under.name] | dict.fromkeys(SUCCESSES, "delivered")


def test_b64_statuses_have_their_effect_through_the_whole_engine(tenant, endpoint_under, receiver, pump):
    names = {endpoint_under(one.name).pk: one.name for one in FOUR}
    sent = [status for status in STATUSES if status != 410]

    def respond(one: Received) -> bytes:
        status = re.search(rb'"interactionId": ?"([0-9]+)"', one.body)[1]
        body = b"" if status in (b"304",) else b"hello"
        return b"HTTP/1.1 %b X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)

    receiver.respond = respond
    receiver.close_after = True  # 204 has no body: what follows it is not the next answer
    for status in sent:
        publish_lifecycle(tenant, f"{status:03}")
    pump()

    found = {
        (names[one.endpoint_id], int(json.loads(bytes(one.event.payload))["interactionId"])): one.state
        for one in Delivery.objects.select_related("event")
    }
    words = {"delivered": "delivered", "terminal": "dead", "retry": "pending"}
    assert found == {
        (name, status): words["delivered" if status in SUCCESSES else ENDS[name].get(status, "retry")]
        for name in names.values()
        for status in sent
    }
    assert {one.status for one in every()} == {"active"}
    odd = Attempt.objects.filter(error="malformed_response", status=None, delivery__state="pending")
    assert odd.count() == 2 * len(FOUR)  # 000 and 999 are no statuses


@pytest.mark.parametrize("under", FOUR, ids=lambda one: one.name)
def test_b64_a_410_stops_and_disables_and_is_told_where_the_contract_says_so(
    tenant, endpoint_under, receiver, pump, under
):
    endpoint_under(under.name)
    receiver.respond = answer(410)
    event = publish_lifecycle(tenant)
    pump()
    state = "pending" if under is KINGMINOS else "dead"
    disables = under in (STANDARD, BETTERSTOOD)
    assert only(event).state == state
    assert every().get().status == ("disabled" if disables else "active")
    assert AuditEvent.objects.filter(action="endpoint.disabled").count() == disables


# --- B65


def test_b65a_twenty_failures_at_once_in_two_pumps_disable_the_endpoint_once(
    tenant, endpoint_under, receiver, contract, settings
):
    settings.PUMP_ENDPOINT_IN_FLIGHT = 10
    contract(disable_after=5, steps=())
    endpoint = endpoint_under("standard")
    together = threading.Barrier(20)

    def respond(_: Received) -> bytes:
        together.wait(10)
        return answer(500)

    receiver.respond = respond
    publish(tenant, 20)
    end = time.monotonic() + 15

    def work() -> None:
        Pump().run(lambda: time.monotonic() > end or not Delivery.objects.in_hand().exists())

    in_threads(work, work)

    endpoint.refresh_from_db()
    assert (states(), len(receiver.received)) == ({"dead": 20}, 20)
    assert (endpoint.status, endpoint.dead_in_a_row) == ("disabled", 20)
    assert AuditEvent.objects.filter(action="endpoint.disabled").count() == 1


def test_b65b_a_success_begins_the_count_anew(tenant, endpoint_under, receiver, pump, contract):
    contract(disable_after=5, steps=())
    endpoint = endpoint_under("standard")
    for status in (500, 500, 500, 500, 200, 500):
        receiver.respond = answer(status)
        publish(tenant)
        pump()
    endpoint.refresh_from_db()
    assert (endpoint.status, endpoint.dead_in_a_row) == ("active", 1)


def test_b65c_what_waits_hides_no_failures(tenant, endpoint_under, receiver, pump, contract):
    contract(disable_after=5, steps=())
    endpoint = endpoint_under("standard")
    receiver.respond = answer(500)
    publish(tenant, 50)
    Delivery.objects.update(due_at=Now() + HOUR)
    found = []
    for _ in range(10):
        publish(tenant)
        pump()
        endpoint.refresh_from_db()
        found.append(endpoint.status)
    assert found == ["active"] * 4 + ["disabled"] * 6
    assert len(receiver.received) == 5
    assert states() == {"dead": 5, "held": 55}


@pytest.mark.parametrize("status", [500, 410])
def test_b65d_tests_that_fail_change_nothing(tenant, endpoint_under, receiver, pump, contract, status):
    contract(disable_after=5)
    endpoint = endpoint_under("standard")
    receiver.respond = answer(status)
    for _ in range(10):
        send_test(endpoint=endpoint, event_type=control.TEST_TYPE, actor=SYSTEM)
    pump()
    endpoint.refresh_from_db()
    assert (len(receiver.received), states()) == (10, {"dead": 10})
    assert (endpoint.status, endpoint.dead_in_a_row) == ("active", 0)


def test_b65d_replays_that_fail_change_nothing(tenant, endpoint_under, receiver, pump, contract):
    contract(disable_after=5, steps=())
    endpoint = endpoint_under("standard")
    receiver.respond = answer(500)
    [event] = publish(tenant)
    pump()
    for old in [only(event)] * 10:
        replay_delivery(delivery=old, actor=SYSTEM)
    pump()
    endpoint.refresh_from_db()
    assert (len(receiver.received), states()) == (11, {"dead": 11})
    assert (endpoint.status, endpoint.dead_in_a_row) == ("active", 1)


def test_b65e_the_attempts_of_one_event_count_once(tenant, endpoint_under, receiver, pump, contract):
    contract(disable_after=5)
    endpoint = endpoint_under("standard")
    receiver.respond = answer(500)
    [event] = publish(tenant)
    counts = []
    for _ in range(STANDARD.max_attempts):
        pump()
        make_due()
        endpoint.refresh_from_db()
        counts.append(endpoint.dead_in_a_row)
    assert (only(event).state, len(receiver.received)) == ("dead", 10)
    assert (endpoint.status, counts) == ("active", [0] * 9 + [1])


@pytest.fixture
def nobody():
    """A URL on loopback where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"


@pytest.mark.parametrize(
    ("cause", "failing", "of", "disabled"),
    [("nobody", 10, 12, 0), ("blocked", 10, 12, 0), ("nobody", 10, 20, 10), ("nobody", 4, 4, 4), ("http", 10, 12, 10)],
    ids=["no-answer-from-most", "most-blocked-by-us", "no-answer-from-half", "too-few-to-tell", "a-status-from-most"],
)
def test_b65f_when_most_endpoints_fail_at_once_without_an_answer_none_is_disabled(
    tenant, endpoint_under, receiver, pump, contract, nobody, cause, failing, of, disabled
):
    contract(disable_after=5, steps=())
    url = {"nobody": nobody, "blocked": "http://169.254.169.254/", "http": f"{receiver.url}/bad"}[cause]
    receiver.respond = lambda one: answer(500 if "/bad" in one.line else 200)
    made = [endpoint_under("standard") for _ in range(of)]
    Endpoint.objects.filter(pk__in=[one.pk for one in made[:failing]]).update(url=url)
    for _ in range(5):
        publish(tenant)
        pump()
    assert every().filter(dead_in_a_row=5).count() == failing
    assert every().filter(status="disabled").count() == disabled


# --- B67


@pytest.mark.parametrize("stop", [pause_endpoints, disable_endpoints])
def test_b67_standard_keeps_what_comes_meanwhile_and_sends_it_a_few_at_a_time(
    tenant, endpoint, receiver, pump, settings, stop
):
    settings.PUMP_ENDPOINT_IN_FLIGHT = 3
    stop(every(), actor=SYSTEM, reason="test")
    publish(tenant, 40)
    pump()
    assert (states(), receiver.received) == ({"held": 40}, [])

    receiver.respond = counting = Counting()
    resume_endpoints(every(), actor=SYSTEM)
    pump()
    assert (states(), len(receiver.received)) == ({"delivered": 40}, 40)
    assert 2 <= counting.most <= 3


def test_b67_kingminos_ends_what_comes_meanwhile_visibly_and_it_can_be_sent_again(
    tenant, endpoint_under, receiver, pump
):
    endpoint_under("kingminos")
    pause_endpoints(every(), actor=SYSTEM, reason="test")
    events = publish(tenant, 10)
    assert set(Delivery.objects.values_list("state", "last_error")) == {("dead", "endpoint_inactive")}
    early = replay_delivery(delivery=only(events[0]), actor=SYSTEM)
    assert (early.state, early.last_error) == ("dead", "endpoint_inactive")

    resume_endpoints(every(), actor=SYSTEM)
    pump()
    assert (states(), receiver.received) == ({"dead": 11}, [])
    assert every().get().dead_in_a_row == 0

    for event in events:
        replay_delivery(delivery=event.deliveries.order_by("id").first(), actor=SYSTEM)
    pump()
    assert len(receiver.received) == 10
    assert {one.header("kingminos-event-id") for one in receiver.received} == {f"km{one.typeid}" for one in events}


def test_b67_betterstood_makes_no_deliveries_meanwhile_and_fills_nothing_in_later(
    tenant, endpoint_under, receiver, pump
):
    endpoint_under("betterstood")
    receiver.respond = answer(500)
    before = publish_lifecycle(tenant, "before")
    pump()
    pause_endpoints(every(), actor=SYSTEM, reason="test")
    events = [publish_lifecycle(tenant, f"int_{number}") for number in range(10)]
    assert not Delivery.objects.filter(event__in=events).exists()
    assert Event.objects.filter(pk__in=[one.pk for one in events], state="accepted").count() == 10
    assert only(before).state == "held"

    receiver.respond = answer(200)
    resume_endpoints(every(), actor=SYSTEM)
    services.release_stranded()
    make_due()
    pump()
    assert (states(), len(receiver.received)) == ({"held": 1}, 1)

    replay_delivery(delivery=only(before), actor=SYSTEM)
    after = publish_lifecycle(tenant, "after")
    pump()
    assert [json.loads(one.body)["id"] for one in receiver.received[1:]] == [before.typeid, after.typeid]


# --- B68


@pytest.fixture
def three_retries(tenant, endpoint, receiver, pump) -> Endpoint:
    """An endpoint with three retries pending."""
    receiver.respond = answer(500)
    publish(tenant, 3)
    pump()
    assert states() == {"pending": 3}
    return endpoint


def test_b68a_what_waits_for_a_deleted_endpoint_ends_without_a_post(three_retries, receiver, pump, tenant, caplog):
    delete_endpoint(endpoint=three_retries, actor=SYSTEM)
    make_due()
    publish(tenant)
    pump()
    pump()
    assert len(receiver.received) == 3
    assert set(Delivery.objects.values_list("state", "last_error")) == {("dead", "endpoint_deleted")}
    assert Attempt.objects.count() == 3  # history stays
    assert [one for one in caplog.records if one.levelname in ("WARNING", "ERROR")] == []


def test_b68a_what_a_pump_finds_due_at_a_deleted_endpoint_ends_without_a_post(three_retries, receiver, pump, caplog):
    """As if it had been deleted between a fan-out and its commit."""
    Endpoint.objects.update(status="deleted")
    EndpointSecret.objects.all().delete()
    make_due()
    pump()
    assert (len(receiver.received), states(), Attempt.objects.count()) == (3, {"dead": 3}, 3)
    assert [one for one in caplog.records if one.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("stop", [pause_endpoints, disable_endpoints])
def test_b68b_what_waits_for_a_disabled_endpoint_is_sent_only_when_it_is_resumed(three_retries, receiver, pump, stop):
    stop(every(), actor=SYSTEM, reason="test")
    make_due()
    pump()
    assert (len(receiver.received), states()) == (3, {"held": 3})
    receiver.respond = answer(200)
    resume_endpoints(every(), actor=SYSTEM)
    pump()
    assert (len(receiver.received), states()) == (6, {"delivered": 3})
    assert {one.header("webhook-attempt") for one in receiver.received[3:]} == {"2"}


def test_b68c_a_tenant_with_history_stays_and_switching_it_off_stops_everything(three_retries, receiver, pump, tenant):
    with pytest.raises(models.ProtectedError):
        tenant.delete()
    assert (Tenant.objects.count(), Attempt.objects.count()) == (1, 3)

    switch_webhooks(tenant=tenant, enabled=False, actor=SYSTEM)
    make_due()
    publish(tenant)
    pump()
    assert (len(receiver.received), states()) == (3, {"held": 4})

    receiver.respond = answer(200)
    switch_webhooks(tenant=tenant, enabled=True, actor=SYSTEM)
    pump()
    assert (len(receiver.received), states()) == (7, {"delivered": 4})


@pytest.mark.parametrize(("status", "state"), [(500, "dead"), (200, "delivered"), (410, "dead")])
def test_b68d_a_request_in_flight_is_recorded_although_its_endpoint_was_deleted(
    tenant, endpoint, receiver, pump, caplog, status, state
):
    receiver.respond = in_receiver(lambda: delete_endpoint(endpoint=endpoint, actor=SYSTEM), answer(status))
    [event] = publish(tenant)
    pump()
    make_due()
    pump()
    attempt = Attempt.objects.get()
    assert (len(receiver.received), only(event).state, attempt.status) == (1, state, status)
    assert every().get().status == "deleted"
    assert [one for one in caplog.records if one.levelname in ("WARNING", "ERROR")] == []


def test_b68e_the_next_retry_uses_the_new_url(three_retries, receiver, pump):
    old = three_retries.url
    with Receiver() as other:
        three_retries.url = other.url
        update_endpoint(endpoint=three_retries, fields=["url"], actor=SYSTEM)
        make_due()
        pump()
        assert (len(receiver.received), len(other.received), states()) == (3, 3, {"delivered": 3})
    assert set(Attempt.objects.filter(number=1).values_list("url", flat=True)) == {old}
    assert set(Attempt.objects.filter(number=2).values_list("url", flat=True)) == {other.url}


# --- B69


def test_b69_replaying_what_has_arrived_twice_makes_two_more_posts(tenant, endpoint, receiver, pump):
    [event] = publish(tenant, caller_key="key-1")
    pump()
    old = only(event)
    for _ in range(2):
        replay_delivery(delivery=old, actor=SYSTEM)
        pump()
    assert len(receiver.received) == 3
    assert {one.header("webhook-id") for one in receiver.received} == {event.typeid}
    assert states() == {"delivered": 3}


def test_b69_two_replays_at_once_make_two_more_posts(tenant, endpoint, receiver, pump):
    [event] = publish(tenant)
    pump()
    old = only(event)
    in_threads(*[lambda: replay_delivery(delivery=old, actor=SYSTEM)] * 2)
    pump()
    assert len(receiver.received) == 3


def test_b69_a_replay_goes_to_the_endpoint_of_its_delivery_alone(tenant, make_endpoint, receiver, pump):
    chosen, _ = make_endpoint(url=f"{receiver.url}/a"), make_endpoint(url=f"{receiver.url}/b")
    publish(tenant)
    pump()
    replay_delivery(delivery=Delivery.objects.get(endpoint=chosen), actor=SYSTEM)
    pump()
    assert Counter(one.line.split()[1] for one in receiver.received) == {"/hook/a": 2, "/hook/b": 1}


def test_b69_a_replay_while_a_retry_is_due_in_a_second_is_refused_and_the_retry_comes_once(
    tenant, endpoint, receiver, pump, clock
):
    receiver.respond = answer(500)
    [event] = publish(tenant)
    pump()
    due = only(event).due_at
    clock.advance_to(due - SECOND)
    receiver.respond = answer(200)

    with pytest.raises(NotReplayable, match="still under way"):
        replay_delivery(delivery=only(event), actor=SYSTEM)
    pump()
    assert (len(receiver.received), only(event).due_at, only(event).attempts_made) == (1, due, 1)

    clock.advance_to(due)
    pump()
    assert len(receiver.received) == 2
    assert (only(event).state, only(event).attempts_made) == ("delivered", 2)


def test_b69_a_replay_during_a_request_in_flight_is_refused_and_the_schedule_stays(tenant, endpoint, receiver, pump):
    refused = []

    def replay() -> None:
        with pytest.raises(NotReplayable) as error:
            replay_delivery(delivery=Delivery.objects.get(), actor=SYSTEM)
        refused.append(str(error.value))

    receiver.respond = in_receiver(replay, answer(500))
    [event] = publish(tenant)
    pump()
    assert "still under way" in refused[0]
    delivery = only(event)
    assert (delivery.state, delivery.attempts_made, len(receiver.received)) == ("pending", 1, 1)
    assert first_wait(delivery) <= wait_after(delivery.attempts.get()) <= first_wait(delivery) + 0.3


# --- B74


def test_b74_a_later_event_has_the_higher_sequence_whoever_posts_it(tenant, endpoint, receiver, pump):
    other = Tenant.objects.create(name="Other")
    turn = threading.Condition()
    handed_on = [0]

    def work(name: int) -> Callable[[], None]:
        def run() -> None:
            for step in range(10):  # each after the one before of this thread, and in between others of its own
                publish(tenant, payload=b"own %d %d" % (name, step))
                publish(other)
            for step in range(10):  # and each after one of the other threads
                with turn:
                    turn.wait_for(lambda step=step: handed_on[0] == step * 4 + name, 20)
                    publish(tenant, payload=b"chain %d" % handed_on[0])
                    handed_on[0] += 1
                    turn.notify_all()

        return run

    in_threads(*(work(name) for name in range(4)))
    pump()

    found = {one.body: int(one.header("webhook-sequence")) for one in receiver.received}
    assert len(found) == len(set(found.values())) == 80
    for names in ([b"own %d %d" % (name, step) for step in range(10)] for name in range(4)):
        numbers = [found[name] for name in names]
        assert numbers == sorted(numbers)
    numbers = [found[b"chain %d" % number] for number in range(40)]
    assert numbers == sorted(numbers)
    assert found[b"own 0 9"] < found[b"chain 0"]


def test_b74_events_of_one_call_are_numbered_in_its_order(tenant, endpoint, receiver, pump):
    publish_events([NewEvent(tenant.pk, "a", b"%d" % number) for number in range(100)])
    pump()
    found = sorted(receiver.received, key=lambda one: int(one.header("webhook-sequence")))
    assert [int(one.body) for one in found] == list(range(100))


@pytest.mark.parametrize("under", FOUR, ids=lambda one: one.name)
def test_b74_what_arrives_late_can_be_told_to_be_older(tenant, endpoint_under, receiver, pump, under):
    endpoint_under(under.name)
    receiver.respond = lambda _: answer(500 if len(receiver.received) == 1 else 200)
    created = publish_lifecycle(tenant, "created")
    pump()
    updated = publish_lifecycle(tenant, "updated")
    pump()
    make_due()
    pump()

    first, second, third = receiver.received
    assert b"created" in first.body
    assert b"updated" in second.body
    assert b"created" in third.body
    times = [one.header("webhook-event-time") for one in receiver.received]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", text) for text in times)
    assert times == [rfc3339(created.accepted_at), rfc3339(updated.accepted_at), times[0]]
    assert times[0] < times[1]
    numbers = [int(one.header("webhook-sequence")) for one in receiver.received]
    assert numbers == [created.sequence, updated.sequence, created.sequence]
    assert numbers[0] < numbers[1]


# --- B75


@pytest.mark.parametrize("under", FOUR, ids=lambda one: one.name)
def test_b75_a_retry_two_hours_later_says_which_attempt_it_is_and_how_old_its_event(
    tenant, endpoint_under, receiver, pump, clock, under
):
    endpoint = endpoint_under(under.name)
    receiver.respond = lambda _: answer(500 if len(receiver.received) == 1 else 200)
    event = publish_lifecycle(tenant)
    pump()
    Delivery.objects.update(due_at=Now() + 2 * HOUR)
    clock.advance_to(only(event).due_at)
    pump()

    first, second = receiver.received
    assert (first.header("webhook-attempt"), second.header("webhook-attempt")) == ("1", "2")
    for request in (first, second):
        assert request.header("webhook-event-time") == rfc3339(event.accepted_at)
    age = clock.now() - datetime.fromisoformat(second.header("webhook-event-time"))
    assert 2 * HOUR < age < 2 * HOUR + 60 * SECOND
    signed = verify(second.body, dict(second.headers), endpoint.secret, scheme=under.signature, tolerance=10**9)
    assert abs(signed.timestamp - clock.now().timestamp()) < 60  # the signature is of today
    if under.envelope:
        assert json.loads(second.body)["time"] == rfc3339(event.accepted_at)


# --- B88


def challenge_in(request: Received) -> str:
    return json.loads(request.body)["challenge"]


@pytest.fixture
def challenged(unverified, receiver, pump) -> str:
    """A challenge that the receiver has answered with 200."""
    start_verification(endpoint=unverified, actor=SYSTEM)
    pump()
    return challenge_in(receiver.received[-1])


def confirm(endpoint: Endpoint, text: str) -> None:
    confirm_verification(endpoint=endpoint, answer=text, actor=SYSTEM)


def status_of(endpoint: Endpoint) -> str:
    return Endpoint.objects.get(pk=endpoint.pk).status


def test_b88_the_challenge_is_signed_and_has_the_exact_shape_and_is_no_event(unverified, receiver, pump, challenged):
    [request] = receiver.received
    assert re.fullmatch(rb'\{"challenge": "[0-9a-f]{32}"\}', request.body)
    assert request.header("content-type") == "application/json"
    verify(request.body, dict(request.headers), unverified.secret, scheme="elicitra")
    assert not Event.objects.all().log().exists()
    make_due()
    pump()
    assert len(receiver.received) == 1


def test_b88_the_challenge_may_be_pasted_as_it_was_seen(unverified, challenged):
    body = json.dumps({"challenge": challenged})
    lines = [challenged, f"{challenged}\n", f" \t{challenged}\r\n", f'"{challenged}"', f"'{challenged}'\n"]
    lines += [body, f"{body}\n", f' {{ "challenge":\n"{challenged}\\n", "more": [1] }} ']
    for line in lines:
        confirm(unverified, line)
        unverified.refresh_from_db()
        assert (unverified.status, unverified.verified_at is not None) == ("active", True), line
        Endpoint.objects.update(status="unverified", verified_at=None)
        Verification.objects.update(confirmed_at=None)


def test_b88_anything_else_is_refused_with_a_clear_text(unverified, challenged):
    lines = ["", "1", "null", "[]", "{}", '{"challenge": null}', '{"challenge": ["x"]}', "é", "[" * 100_000]
    for line in [*lines, "1" * 5_000, challenged[:-1], challenged.upper() + "x", "x" * 1_000_000]:
        Verification.objects.update(wrong_answers=0)
        with pytest.raises(NotDone, match="This is not the challenge; 4 tries are left"):
            confirm(unverified, line)
        assert status_of(unverified) == "unverified"
    confirm(unverified, challenged)
    assert status_of(unverified) == "active"


def test_b88_half_a_character_is_refused_with_a_clear_text(unverified, challenged):
    with pytest.raises(NotDone, match="This is not the challenge"):
        confirm(unverified, '"\\ud800"')
    assert status_of(unverified) == "unverified"


def test_b88_a_challenge_that_looks_like_a_number_is_accepted(unverified, challenged):
    challenge = "1234567890123456e123456789012345"
    Verification.objects.update(challenge=challenge)
    confirm(unverified, challenge)
    assert status_of(unverified) == "active"


def test_b88_a_megabyte_is_refused_by_the_api(client, unverified, challenged, api_key):
    for text, status in (("x" * 1_000_000, 400), ("wrong", 409), (f'"{challenged}"\n', 200)):
        response = client.post(
            f"/v1/endpoints/{unverified.typeid}/verification/confirm",
            json.dumps({"challenge": text}),
            content_type="application/json",
            headers={"Authorization": f"Bearer {api_key}"},
        )
        assert response.status_code == status
        assert status_of(unverified) == ("active" if status == 200 else "unverified")


def test_b88_a_challenge_counts_once(unverified, challenged):
    confirm(unverified, challenged)
    with pytest.raises(NotDone, match="No challenge is open"):
        confirm(unverified, challenged)
    pause_endpoints(every(), actor=SYSTEM, reason="test")
    with pytest.raises(NotDone, match="No challenge is open"):
        confirm(unverified, challenged)
    assert status_of(unverified) == "paused"


def test_b88_a_challenge_expires_after_a_day(unverified, challenged):
    found = Verification.objects.get()
    assert abs(found.expires_at - found.created_at - 24 * HOUR) < 5 * SECOND
    Verification.objects.update(expires_at=Now() - SECOND)
    with pytest.raises(NotDone, match="has expired after 24 hours; send a new one"):
        confirm(unverified, challenged)
    assert status_of(unverified) == "unverified"


def test_b88_five_wrong_answers_void_a_challenge(unverified, challenged, receiver, pump):
    for left in ("4 tries are", "3 tries are", "2 tries are", "1 try is"):
        with pytest.raises(NotDone, match=f"{left} left"):
            confirm(unverified, "0" * 32)
    with pytest.raises(NotDone, match="Wrong too often; send a new challenge"):
        confirm(unverified, "0" * 32)
    with pytest.raises(NotDone, match="No challenge is open"):
        confirm(unverified, challenged)
    assert status_of(unverified) == "unverified"

    start_verification(endpoint=unverified, actor=SYSTEM)
    pump()
    confirm(unverified, challenge_in(receiver.received[-1]))
    assert status_of(unverified) == "active"


def test_b88_of_two_verifications_the_older_is_void(unverified, challenged, receiver, pump):
    start_verification(endpoint=unverified, actor=SYSTEM)
    pump()
    newer = challenge_in(receiver.received[-1])
    assert newer != challenged
    with pytest.raises(NotDone, match="This is not the challenge"):
        confirm(unverified, challenged)
    confirm(unverified, newer)
    assert status_of(unverified) == "active"


def test_b88_of_verifications_at_once_one_stays_open(unverified, receiver, pump):
    in_threads(*[lambda: start_verification(endpoint=unverified, actor=SYSTEM)] * 4)
    pump()
    assert (Verification.objects.count(), len(receiver.received)) == (4, 4)
    confirm(unverified, Verification.objects.get(voided_at=None).challenge)
    assert status_of(unverified) == "active"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (answer(302, "Location: /hook"), r"did not answer it with 2xx \(http_302\)"),
        (answer(500), r"did not answer it with 2xx \(http_500\)"),
        (answer(410), r"did not answer it with 2xx \(http_410\)"),
        ([30.0], r"did not answer it with 2xx \(total_timeout\)"),
        (b"", r"did not answer it with 2xx \(closed_before_response\)"),
    ],
    ids=["302", "500", "410", "slow", "none"],
)
def test_b88_the_challenge_counts_only_after_a_2xx(unverified, receiver, pump, contract, reply, text):
    contract("betterstood", deadline=0.2)
    receiver.respond = reply
    start_verification(endpoint=unverified, actor=SYSTEM)
    with pytest.raises(NotDone, match="has not answered yet; try again in a moment"):
        confirm(unverified, Verification.objects.get().challenge)
    pump()
    make_due()
    pump()
    with pytest.raises(NotDone, match=text):
        confirm(unverified, challenge_in(receiver.received[-1]))
    assert (status_of(unverified), len(receiver.received)) == ("unverified", 1)


def test_b88_what_was_queued_before_the_verification_is_not_sent(unverified, tenant, receiver, pump):
    publish_lifecycle(tenant, "before")
    start_verification(endpoint=unverified, actor=SYSTEM)
    pump()
    with pytest.raises(NotDone):
        send_test(endpoint=unverified, event_type=LIFECYCLE, actor=SYSTEM)
    resume_endpoints(every(), actor=SYSTEM)
    assert status_of(unverified) == "unverified"
    confirm(unverified, challenge_in(receiver.received[-1]))
    services.release_stranded()
    after = publish_lifecycle(tenant, "after")
    make_due()
    pump()
    assert len(receiver.received) == 2
    assert json.loads(receiver.received[-1].body)["id"] == after.typeid


def test_b88_a_verified_url_cannot_be_changed(client, unverified, challenged, receiver, api_key):
    confirm(unverified, challenged)
    url = unverified.url
    unverified.url = f"{url}/other"
    with pytest.raises(ValidationError, match="make a new endpoint"):
        update_endpoint(endpoint=unverified, fields=["url"], actor=SYSTEM)
    response = client.patch(
        f"/v1/endpoints/{unverified.typeid}",
        json.dumps({"url": f"{url}/other"}),
        content_type="application/json",
        headers={"Authorization": f"Bearer {api_key}"},
    )
    assert response.status_code == 400
    assert "make a new endpoint" in response.content.decode()
    unverified.refresh_from_db()
    assert (unverified.url, unverified.status) == (url, "active")


def test_b88_nothing_goes_to_a_new_url_that_is_not_verified_under_a_contract_of_the_operator_s(
    tenant, receiver, pump, monkeypatch
):
    for name, one in read_contracts('[checked]\nbase = "standard"\nchallenge = true\n', CONTRACTS).items():
        monkeypatch.setitem(CONTRACTS, name, one)
    endpoint = Endpoint(tenant=tenant, name="checked", url=receiver.url, contract="checked")
    create_endpoint(endpoint=endpoint, actor=SYSTEM)
    start_verification(endpoint=endpoint, actor=SYSTEM)
    pump()
    confirm(endpoint, challenge_in(receiver.received[-1]))
    receiver.respond = answer(500)
    publish(tenant)
    pump()
    with Receiver() as other:
        endpoint.refresh_from_db()
        endpoint.url = other.url
        with contextlib.suppress(ValidationError):  # refused, or taken and not verified any more
            update_endpoint(endpoint=endpoint, fields=["url"], actor=SYSTEM)
        make_due()
        pump()
        assert other.received == []


def test_b88_a_challenge_brings_no_deleted_endpoint_back(unverified, challenged):
    delete_endpoint(endpoint=unverified, actor=SYSTEM)
    with pytest.raises(NotDone):
        confirm(unverified, challenged)
    assert status_of(unverified) == "deleted"
