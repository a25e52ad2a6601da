"""Batches over HTTP: each event is answered for itself, by both lanes alike."""

import json

import pytest
from django.db import DatabaseError, OperationalError
from django.test import Client

from deliveries.models import Delivery, Event
from deliveries.querysets import EventQuerySet
from endpoints.models import Endpoint, Tenant
from endpoints.services import SYSTEM, create_endpoint
from tests.test_intake import GOOD, JSON, by_django, by_fast_lane, comparable, error
from webhookhub.ids import parse_typeid

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/events/batch"


def batch(*events):
    """The body of a batch; an event is its text."""
    return b'{"events":[' + b",".join(events) + b"]}"


def by_both(headers, body):
    """The answer of the fast lane, after Django's view has given the same, each on an empty log."""
    slow = by_django(headers, body, PATH)
    Event.objects.all().delete()
    [fast] = by_fast_lane((headers, body), path=PATH)
    assert comparable(fast) == comparable(slow)
    return fast


def told(answer):
    """The code of each event's answer, None of one that was stored."""
    return [one.get("code") for one in json.loads(answer[2])["data"]]


@pytest.fixture
def headers(api_key):
    """The headers of a right request."""
    return {**JSON, "Authorization": f"Bearer {api_key}"}


WHOLE = {
    "empty body": ({}, b"", 400, "empty_body", None),
    "not json": ({}, b"{", 400, "invalid_json", None),
    "an event broken off": ({}, b'{"events":[{"type":"a","data":{]}', 400, "invalid_json", "/events/0/data"),
    "an array": ({}, b"[" + GOOD + b"]", 400, "events_missing", "/events"),
    "one event": ({}, GOOD, 400, "unknown_member", "/data"),
    "no events": ({}, batch(), 400, "events_missing", "/events"),
    "too many events": ({}, batch(*[GOOD] * 101), 400, "events_too_many", "/events"),
    "no object": ({}, batch(GOOD, b"5"), 400, "body_not_object", "/events/1"),
    "a name twice": (
        *({}, batch(GOOD, b'{"type":"a","data":{"a":[{"k":1,"k":2}]}}')),
        *(400, "duplicate_key", "/events/1/data/a/0/k"),
    ),
    "surrogate": ({}, batch(b'{"type":"a","data":["\\ud800"]}'), 400, "lone_surrogate", "/events/0/data/0"),
    "bad utf-8": ({}, batch(b'{"type":"a","data":["\xff"]}'), 400, "invalid_utf8", "/events/0"),
    "deep": ({}, batch(b'{"type":"a","data":' + b"[" * 1001 + b"]" * 1001 + b"}"), 400, "nesting_too_deep", None),
    "key of the batch": ({"Idempotency-Key": "k"}, batch(GOOD), 400, "idempotency_key_of_batch", None),
    "body too large": ({}, batch(GOOD) + b" " * 8_388_608, 413, "body_too_large", None),
    "form": ({"Content-Type": "text/plain"}, batch(GOOD), 415, "not_json", None),
    "no key": ({"Authorization": ""}, batch(GOOD), 401, "unauthorized", None),
}


@pytest.mark.parametrize(("changes", "body", "status", "code", "pointer"), WHOLE.values(), ids=WHOLE.keys())
def test_what_is_no_batch_is_refused_whole(headers, changes, body, status, code, pointer):
    answer = by_both({**headers, **changes}, body)
    assert error(answer) == (status, code)
    document = json.loads(answer[2])
    assert document.get("errors", [{"pointer": None}])[0]["pointer"] == pointer
    assert "data" not in document
    assert not Event.objects.exists()


ONE_BAD = {
    "no data": (b'{"type":"a"}', 400, "data_missing", "/data"),
    "data text": (b'{"type":"a","data":"x"}', 400, "payload_not_object_or_array", "/data"),
    "no type": (b'{"data":{}}', 400, "type_invalid", "/type"),
    "type with space": (b'{"type":"a b","data":{}}', 400, "type_invalid", "/type"),
    "unknown member": (b'{"type":"a","data":{},"channel":"x"}', 400, "unknown_member", "/channel"),
    "metadata": (b'{"type":"a","data":{},"metadata":[]}', 400, "metadata_invalid", "/metadata"),
    "key empty": (b'{"type":"a","data":{},"idempotency_key":""}', 400, "idempotency_key_empty", "/idempotency_key"),
    "key null": (
        *(b'{"type":"a","data":{},"idempotency_key":null}', 400, "idempotency_key_malformed"),
        "/idempotency_key",
    ),
    "key not ascii": (
        *('{"type":"a","data":{},"idempotency_key":"é"}'.encode(), 400, "idempotency_key_malformed"),
        "/idempotency_key",
    ),
    "key too long": (
        *(b'{"type":"a","data":{},"idempotency_key":"%b"}' % (b"x" * 256), 400, "idempotency_key_too_long"),
        "/idempotency_key",
    ),
    "payload too large": (b'{"type":"a","data":["' + b"x" * 262_141 + b'"]}', 413, "payload_too_large", "/data"),
    "payload far too large": (b'{"type":"a","data":["' + b"x" * 600_000 + b'"]}', 413, "payload_too_large", "/data"),
    "event too large": (b'{"type":"a","data":["' + b"x" * 1_048_576 + b'"]}', 413, "event_too_large", None),
    "lifecycle": (
        *(b'{"type":"com.elicitra.interaction.ended.v1","data":{"interactionId":"i","lifecycleSequence":2}}',),
        *(400, "lifecycle_sequence_wrong", "/data/lifecycleSequence"),
    ),
}


@pytest.fixture
def catalogue(tenant):
    """The tenant's types are those of the contract betterstood."""
    create_endpoint(
        endpoint=Endpoint(tenant=tenant, name="a", url="https://hooks.example.com/", contract="betterstood"),
        actor=SYSTEM,
    )


@pytest.mark.parametrize(("bad", "status", "code", "pointer"), ONE_BAD.values(), ids=ONE_BAD.keys())
def test_the_fault_of_one_event_is_its_own(headers, endpoint, catalogue, bad, status, code, pointer):
    answer = by_both(headers, batch(GOOD, bad, GOOD))
    assert answer[0] == 202
    assert told(answer) == [None, code, None]
    refused = json.loads(answer[2])["data"][1]
    assert refused["status"] == status
    assert refused["detail"]
    assert refused.get("errors", [{"pointer": None}])[0]["pointer"] == (pointer and f"/events/1{pointer}")
    assert Event.objects.count() == Delivery.objects.filter(endpoint=endpoint).count() == 2


@pytest.mark.parametrize(("bad", "status", "code", "pointer"), ONE_BAD.values(), ids=ONE_BAD.keys())
def test_a_batch_of_which_nothing_is_stored_has_the_status_of_its_first_event(
    headers, catalogue, bad, status, code, pointer
):
    answer = by_both(headers, batch(bad, b"{}"))
    assert error(answer) == (status, code)
    assert told(answer) == [code, "type_invalid"]
    assert not Event.objects.exists()


def test_answers_come_in_the_order_sent_and_payloads_are_kept_byte_for_byte(headers):
    texts = [b'{ "n" : %d.10 }' % number for number in range(100)]
    for send in (by_django, lambda *request: by_fast_lane(request[:2], path=request[2])[0]):
        Event.objects.all().delete()
        status, _, body = send(headers, batch(*(b' { "data" :%b, "type":"x.y" } ' % text for text in texts)), PATH)
        assert status == 202
        stored = {event.typeid: bytes(event.payload) for event in Event.objects.order_by("sequence")}
        assert [stored[one["id"]] for one in json.loads(body)["data"]] == list(stored.values()) == texts
        assert {one["type"] for one in json.loads(body)["data"]} == {"x.y"}


def test_a_payload_of_a_batch_may_be_as_deep_as_any(headers):
    deepest = b"[" * 1000 + b"]" * 1000
    assert by_both(headers, batch(b'{"type":"a","data":%b}' % deepest, GOOD))[0] == 202
    assert deepest in {bytes(event.payload) for event in Event.objects.all()}


def test_a_batch_larger_than_a_single_body_is_taken(headers):
    large = b'{"type":"a","data":["' + b"x" * 262_140 + b'"]}'
    answer = by_both(headers, batch(*[large] * 31))
    assert told(answer) == [None] * 31


KEYED = b'{"type":"a","data":{"n":%d},"idempotency_key":"k"}'


def test_a_key_that_is_repeated_gives_the_first_answer_and_with_other_content_a_refusal(headers, endpoint):
    status, _, body = by_both(headers, batch(KEYED % 1, GOOD, KEYED % 1, KEYED % 2))
    first, _, again, other = json.loads(body)["data"]
    assert status == 202
    assert again == {**first, "repeated": True}
    assert "repeated" not in first
    assert (other["status"], other["code"]) == (422, "idempotency_key_reused")
    [later] = by_fast_lane((headers, batch(KEYED % 1)), path=PATH)
    assert json.loads(later[2])["data"] == [again]
    assert Event.objects.count() == Delivery.objects.count() == 2


def test_a_key_means_the_same_in_a_batch_and_in_a_header(headers):
    [single] = by_fast_lane(({**headers, "Idempotency-Key": '"k"'}, b'{"type":"a","data":{"n":1}}'))
    answer = by_django(headers, batch(KEYED % 1), PATH)
    assert json.loads(answer[2])["data"] == [{**json.loads(single[2]), "repeated": True}]


def test_a_batch_sent_again_is_stored_once(headers):
    body = batch(*(b'{"type":"a","data":{},"idempotency_key":"k%d"}' % number for number in range(50)))
    first = by_fast_lane((headers, body), path=PATH)
    second = by_fast_lane((headers, body), path=PATH)
    ids = [[one["id"] for one in json.loads(answer[2])["data"]] for [answer] in (first, second)]
    assert ids[0] == ids[1]
    assert Event.objects.count() == 50


def test_a_lifecycle_conflict_in_a_batch_is_that_events_alone(headers, catalogue):
    one = b'{"type":"com.elicitra.analysis.%b.v1","data":{"interactionId":"i","lifecycleSequence":2}}'
    answer = by_both(headers, batch(one % b"completed", GOOD, one % b"failed", one % b"completed"))
    assert answer[0] == 202
    assert told(answer) == [None, None, "lifecycle_conflict", None]
    data = json.loads(answer[2])["data"]
    assert data[3] == {**data[0], "repeated": True}
    assert data[2]["errors"][0]["pointer"] == "/events/2/type"


def test_an_event_that_the_database_refuses_is_refused_alone(headers, monkeypatch):
    store, astore = EventQuerySet.store, EventQuerySet.astore

    def check(columns):
        if b'{"a":"bad"}' in bytes(columns["payload"]):
            raise DatabaseError("no")

    def refuse_one(events, columns):
        check(columns)
        return store(events, columns)

    async def refuse_group(events, columns, database):
        check(columns)
        return await astore(events, columns, database)

    monkeypatch.setattr(EventQuerySet, "store", refuse_one)
    monkeypatch.setattr(EventQuerySet, "astore", refuse_group)
    answer = by_both(headers, batch(GOOD, b'{"type":"a","data":{"a":"bad"}}', GOOD))
    assert told(answer) == [None, "internal", None]
    assert Event.objects.count() == 2


def test_a_database_that_is_away_is_503_for_the_whole_batch(headers, monkeypatch):
    def fail(*args):
        raise OperationalError("gone")

    monkeypatch.setattr(EventQuerySet, "store", fail)
    monkeypatch.setattr(EventQuerySet, "astore", fail)
    answer = by_both(headers, batch(b"{}", GOOD))
    assert error(answer) == (503, "unavailable")
    assert told(answer) == ["type_invalid", "unavailable"]
    assert answer[1]["retry-after"] == "1"


def test_batches_and_single_posts_that_wait_together_share_a_commit(headers, groups):
    bodies = [
        batch(*(b'{"type":"a","data":{"n":%d}}' % (10 * first + number) for number in range(10))) for first in range(9)
    ]
    answers = by_fast_lane(*((headers, body) for body in bodies), path=PATH)
    assert sum(groups) == 90
    assert len(groups) <= 2
    for first, (_, _, body) in enumerate(answers):
        stored = [
            bytes(Event.objects.get(pk=parse_typeid("evt", one["id"])).payload) for one in json.loads(body)["data"]
        ]
        assert stored == [b'{"n":%d}' % (10 * first + number) for number in range(10)]


def test_a_length_that_is_announced_too_large_is_refused_unread(headers):
    [answer] = by_fast_lane(({**headers, "Content-Length": "8388609"}, b""), chunks=[], path=PATH)
    assert error(answer) == (413, "body_too_large")


def test_a_body_is_refused_as_soon_as_it_is_too_large(headers):
    [answer] = by_fast_lane((headers, b""), chunks=[b" " * 1_000_000] * 1_000, path=PATH)
    assert error(answer) == (413, "body_too_large")


def test_another_tenant_has_keys_of_its_own(headers, tenant):
    other = Tenant.objects.create(name="Other")
    event = Event.objects.create(tenant=other, type="a", payload=b'{"n":1}', caller_key="k")
    [(_, _, body)] = by_fast_lane((headers, batch(KEYED % 1)), path=PATH)
    assert json.loads(body)["data"][0]["id"] != event.typeid


def test_a_batch_can_only_be_posted_and_is_no_event(headers):
    response = Client().get(PATH, HTTP_AUTHORIZATION=headers["Authorization"])
    assert (response.status_code, response.headers["Allow"]) == (405, "POST, OPTIONS")
