"""Taking events in over HTTP: both lanes give one answer, and nothing that is sent brings a 500."""

import asyncio
import json
import re
import threading
import uuid

import pytest
from django.db import OperationalError, connection, transaction
from django.test import Client
from django.utils import timezone

from deliveries.intake import FastLane, Turns, key_of
from deliveries.models import Delivery, Event
from deliveries.publishing import NewEvent, publish_events
from endpoints.models import ApiKey, Endpoint
from endpoints.services import SYSTEM, contract_keys, create_endpoint, revoke_api_key
from tests import vectors_loader
from webhookhub.api import MAX_KEY_CHARS, Problem, parse_idempotency_key
from webhookhub.database import LoopConnection

pytestmark = pytest.mark.django_db(transaction=True)

GOOD = b'{"type":"invoice.paid","data":{"a": 1.10}}'
NEVER = object()  # a piece of a body that does not come
JSON = {"Content-Type": "application/json"}


async def exchange(lane, headers, body, chunks=None, path="/v1/events"):
    """Sends one request through a fast lane; returns (status, headers, body)."""
    pieces = list(chunks or [body])
    sent = []

    async def receive():
        piece = pieces.pop(0)
        if piece is NEVER:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message):
        sent.append(message)

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await lane({"type": "http", "method": "POST", "path": path, "headers": raw}, receive, send)
    start, end = sent
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, end["body"]


def by_fast_lane(*requests, chunks=None, path="/v1/events"):
    """Sends requests (headers, body) side by side through one fast lane; returns (status, headers, body) of each."""

    async def all_of_them():
        lane = FastLane()
        try:
            return await asyncio.gather(*(exchange(lane, headers, body, chunks, path) for headers, body in requests))
        finally:
            await lane.close()

    return asyncio.run(all_of_them())


def by_django(headers, body, path="/v1/events"):
    """Sends one request through Django's view."""
    environ = {
        f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items() if name != "Content-Type"
    }
    environ["CONTENT_TYPE"] = headers.get("Content-Type", "")
    response = Client().generic("POST", path, body, environ["CONTENT_TYPE"], **environ)
    return response.status_code, {name.lower(): value for name, value in response.headers.items()}, response.content


def comparable(answer):
    """An answer without what differs by nature: ids of events, and the headers that Django adds to every page."""
    status, headers, body = answer
    kept = {
        name: value
        for name, value in headers.items()
        if name in {"content-type", "retry-after", "www-authenticate", "idempotent-replayed"}
    }
    return status, kept, re.sub(rb"evt_[0-9a-z]{26}", b"evt_...", body)


def error(answer):
    """The status and code of a problem document."""
    status, headers, body = answer
    assert headers["content-type"] == "application/problem+json"
    document = json.loads(body)
    assert document["status"] == status
    assert document["detail"]
    return status, document["code"]


@pytest.fixture
def headers(api_key):
    """The headers of a right request."""
    return {**JSON, "Authorization": f"Bearer {api_key}"}


CASES = {
    "plain": ({}, GOOD, 202, None),
    "charset": ({"Content-Type": "Application/JSON; charset=utf-8"}, GOOD, 202, None),
    "metadata": ({}, b'{"type":"a","data":[],"metadata":{"k":"v"}}', 202, None),
    "key": ({"Idempotency-Key": '"order 42"'}, GOOD, 202, None),
    "no content type": ({"Content-Type": ""}, GOOD, 415, "not_json"),
    "form": ({"Content-Type": "text/plain"}, GOOD, 415, "not_json"),
    "no key": ({"Authorization": ""}, GOOD, 401, "unauthorized"),
    "wrong scheme": ({"Authorization": "Basic abc"}, GOOD, 401, "unauthorized"),
    "nonsense key": ({"Authorization": "Bearer \xe9\xff.."}, GOOD, 401, "unauthorized"),
    "empty body": ({}, b"", 400, "empty_body"),
    "not json": ({}, b"{", 400, "invalid_json"),
    "array": ({}, b"[]", 400, "body_not_object"),
    "bad utf-8": ({}, b'{"type":"a","data":{"x":"\xff"}}', 400, "invalid_utf8"),
    "surrogate": ({}, b'{"type":"a","data":{"x":"\\ud800"}}', 400, "lone_surrogate"),
    "twice": ({}, b'{"type":"a","data":{},"data":{}}', 400, "duplicate_key"),
    "no data": ({}, b'{"type":"a"}', 400, "data_missing"),
    "data null": ({}, b'{"type":"a","data":null}', 400, "payload_not_object_or_array"),
    "data text": ({}, b'{"type":"a","data":"x"}', 400, "payload_not_object_or_array"),
    "no type": ({}, b'{"data":{}}', 400, "type_invalid"),
    "type number": ({}, b'{"type":5,"data":{}}', 400, "type_invalid"),
    "type with space": ({}, b'{"type":"a b","data":{}}', 400, "type_invalid"),
    "type with newline": ({}, b'{"type":"a\\n","data":{}}', 400, "type_invalid"),
    "type too long": ({}, b'{"type":"' + b"a" * 201 + b'","data":{}}', 400, "type_invalid"),
    "unknown member": ({}, b'{"type":"a","data":{},"channel":"x"}', 400, "unknown_member"),
    "metadata array": ({}, b'{"type":"a","data":{},"metadata":[]}', 400, "metadata_invalid"),
    "metadata null": ({}, b'{"type":"a","data":{},"metadata":null}', 400, "metadata_invalid"),
    "metadata number": ({}, b'{"type":"a","data":{},"metadata":{"a":1}}', 400, "metadata_invalid"),
    "metadata NUL": ({}, b'{"type":"a","data":{},"metadata":{"a":"\\u0000"}}', 400, "metadata_invalid"),
    "key empty": ({"Idempotency-Key": '""'}, GOOD, 400, "idempotency_key_empty"),
    "key malformed": ({"Idempotency-Key": "a, b"}, GOOD, 400, "idempotency_key_malformed"),
    "key too long": ({"Idempotency-Key": "x" * 256}, GOOD, 400, "idempotency_key_too_long"),
    "payload too large": ({}, b'{"type":"a","data":["' + b"x" * 262_141 + b'"]}', 413, "payload_too_large"),
    "payload just right": ({}, b'{"type":"a","data":["' + b"x" * 262_140 + b'"]}', 202, None),
    "body too large": ({}, b'{"type":"a","data":{}' + b" " * 1_048_576 + b"}", 413, "body_too_large"),
    "deep": ({}, b'{"type":"a","data":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nesting_too_deep"),
}


@pytest.mark.parametrize(("changes", "body", "status", "code"), CASES.values(), ids=CASES.keys())
def test_both_lanes_answer_alike(headers, endpoint, changes, body, status, code):
    request = {**headers, **changes}
    [fast] = by_fast_lane((request, body))
    Event.objects.all().delete()
    slow = by_django(request, body)
    assert comparable(fast) == comparable(slow)
    assert fast[0] == status
    if code:
        assert error(fast) == (status, code)
        assert not Event.objects.exists()
    else:
        assert Delivery.objects.count() == 1


def test_the_answer_names_the_event_and_the_payload_is_kept_byte_for_byte(headers):
    [(status, _, body)] = by_fast_lane(
        (headers, b' { "data" : { "a" : 1.10 , "n":12345678901234567890123} , "type":"x.y" } ')
    )
    assert status == 202
    stored = Event.objects.get()
    assert json.loads(body) == {"id": stored.typeid, "type": "x.y"}
    assert bytes(stored.payload) == b'{ "a" : 1.10 , "n":12345678901234567890123}'


def test_posts_that_wait_together_share_a_commit_and_each_gets_its_own_answer(headers, groups):
    bodies = [f'{{"type":"a","data":{{"n":{number}}}}}'.encode() for number in range(50)]
    answers = by_fast_lane(*((headers, body) for body in bodies))
    assert [status for status, _, _ in answers] == [202] * 50
    assert sum(groups) == 50
    assert len(groups) <= 2
    stored = {event.typeid: bytes(event.payload) for event in Event.objects.all()}
    for body, (_, _, answer) in zip(bodies, answers, strict=True):
        assert stored[json.loads(answer)["id"]] in body


def test_one_of_a_group_that_clashes_is_answered_alone(headers):
    by_fast_lane(({**headers, "Idempotency-Key": "k"}, GOOD))
    other = b'{"type":"a","data":{}}'
    answers = by_fast_lane((headers, GOOD), ({**headers, "Idempotency-Key": "k"}, other), (headers, GOOD))
    assert [status for status, _, _ in answers] == [202, 422, 202]
    assert error(answers[1]) == (422, "idempotency_key_reused")


def test_the_same_key_gives_the_first_answer_again(headers):
    request = ({**headers, "Idempotency-Key": "k"}, GOOD)
    [first] = by_fast_lane(request)
    [again] = by_fast_lane(request)
    quoted = by_django({**headers, "Idempotency-Key": '"k"'}, GOOD)
    assert first[2] == again[2] == quoted[2]
    assert again[1]["idempotent-replayed"] == "true"
    assert Event.objects.count() == 1


def test_twenty_posts_at_once_with_one_key_make_one_event(headers, endpoint):
    answers = []

    def post():
        answers.append(by_django({**headers, "Idempotency-Key": "k"}, GOOD))
        from django.db import connection

        connection.close()

    threads = [threading.Thread(target=post) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _, _ in answers} <= {202, 503}
    assert len({body for status, _, body in answers if status == 202}) == 1
    assert Event.objects.count() == Delivery.objects.count() == 1


def test_a_body_in_pieces_is_put_together(headers):
    [(status, _, _)] = by_fast_lane((headers, b""), chunks=[GOOD[:7], b"", GOOD[7:]])
    assert status == 202


def test_a_body_is_refused_as_soon_as_it_is_too_large(headers):
    endless = [b" " * 100_000] * 1_000
    [answer] = by_fast_lane((headers, b""), chunks=endless)
    assert error(answer) == (413, "body_too_large")


def test_a_length_that_is_announced_too_large_is_refused_unread(headers):
    [answer] = by_fast_lane(({**headers, "Content-Length": "1048577"}, b""), chunks=[])
    assert error(answer) == (413, "body_too_large")


def test_a_body_that_does_not_come_is_refused_in_time(headers, settings):
    settings.INTAKE_BODY_SECONDS = 0.1
    [answer] = by_fast_lane((headers, b""), chunks=[b"{", NEVER])
    assert error(answer) == (408, "body_timeout")


def test_a_key_that_was_revoked_or_has_expired_is_refused(headers, settings):
    settings.API_KEY_CACHE_SECONDS = 0
    key = ApiKey.objects.get()
    key.expires_at = timezone.now()
    key.save()
    assert error(by_django(headers, GOOD)) == (401, "unauthorized")
    key.expires_at = None
    key.save()
    assert by_django(headers, GOOD)[0] == 202
    revoke_api_key(key=key, actor=SYSTEM)
    [fast] = by_fast_lane((headers, GOOD))
    assert error(fast) == error(by_django(headers, GOOD)) == (401, "unauthorized")


LIFECYCLE = {
    "in its place": (b'"com.elicitra.interaction.ended.v1"', b'{"interactionId":"i","lifecycleSequence":1}', 202, None),
    "out of it": (
        *(b'"com.elicitra.interaction.ended.v1"', b'{"interactionId":"i","lifecycleSequence":2}'),
        *(400, "lifecycle_sequence_wrong"),
    ),
    "no interaction": (
        *(b'"com.elicitra.analysis.failed.v1"', b'{"lifecycleSequence":2}', 400, "interaction_missing"),
    ),
    "an array": (b'"com.elicitra.analysis.failed.v1"', b"[]", 400, "data_not_object"),
    "conditional": (b'"com.elicitra.automation.triggered.v1"', b'{"score":1}', 202, None),
    "test": (b'"com.elicitra.analysis.failed.v1"', b'{"isTest":true,"lifecycleSequence":2}', 202, None),
}


@pytest.mark.parametrize(("kind", "data", "status", "code"), LIFECYCLE.values(), ids=LIFECYCLE.keys())
def test_both_lanes_answer_alike_to_events_with_rules_of_their_own(headers, tenant, kind, data, status, code):
    create_endpoint(
        endpoint=Endpoint(tenant=tenant, name="a", url="https://hooks.example.com/", contract="betterstood"),
        actor=SYSTEM,
    )
    body = b'{"type":%b,"data":%b}' % (kind, data)
    [fast] = by_fast_lane((headers, body))
    first = Event.objects.count()
    Event.objects.all().delete()
    slow = by_django(headers, body)
    assert comparable(fast) == comparable(slow)
    assert (fast[0], first) == (status, int(status == 202))
    assert Event.objects.count() == first
    if code:
        assert error(fast) == (status, code)


def test_a_lifecycle_event_among_others_of_a_group_is_answered_for_itself(headers, tenant, endpoint):
    create_endpoint(
        endpoint=Endpoint(tenant=tenant, name="a", url="https://hooks.example.com/", contract="betterstood"),
        actor=SYSTEM,
    )
    place = b'{"type":"com.elicitra.interaction.ended.v1","data":{"interactionId":"i","lifecycleSequence":%d}}'
    answers = by_fast_lane((headers, GOOD), (headers, place % 2), (headers, place % 1), (headers, GOOD))
    assert [status for status, _, _ in answers] == [202, 400, 202, 202]
    assert Event.objects.count() == 3


def test_tenants_take_turns_where_events_are_looked_at_one_by_one():
    turns, tenants = Turns(), [uuid.UUID(int=number) for number in range(3)]
    for number, tenant_id in enumerate([tenants[0]] * 4 + [tenants[1]] * 2 + [tenants[2]]):
        turns.put((NewEvent(tenant_id, str(number), b""), None))
    turns.close()
    order = []
    while waiting := turns.get():
        order.append(waiting[0].type)
    assert order == ["0", "4", "6", "1", "5", "2", "3"]
    assert turns.get() is None


def test_a_key_with_the_secret_of_another_is_refused(headers, api_key):
    identity, _, secret = api_key.partition(".")
    for text in (f"{identity}.{secret[:-1]}", f"{identity}.", identity, f"{identity}.{secret}.x"):
        assert error(by_django({**headers, "Authorization": f"Bearer {text}"}, GOOD)) == (401, "unauthorized")


def test_every_error_of_the_api_is_a_problem_document(headers):
    cases = [
        ("/v1/nothing", "get", 404),
        ("/v1/nothing", "post", 404),
        ("/v1/", "get", 404),
        ("/v1/events", "put", 405),
    ]
    client = Client(enforce_csrf_checks=True)
    for path, method, status in cases:
        response = getattr(client, method)(path)
        assert response.status_code == status
        assert response.headers["Content-Type"] == "application/problem+json"
        assert response.json()["status"] == status
    assert client.put("/v1/events").headers["Allow"] == "GET, POST, HEAD, OPTIONS"


@pytest.mark.parametrize("path", ["/v1/events", "/v1/events/"])
def test_a_trailing_slash_makes_no_difference(headers, path):
    environ = {"HTTP_AUTHORIZATION": headers["Authorization"]}
    assert Client().post(path, GOOD, content_type="application/json", **environ).status_code == 202


@pytest.mark.vectors
@pytest.mark.parametrize(
    "case", vectors_loader.load("policies")["idempotency_key"]["inbound_parsing"], ids=lambda case: case["note"]
)
def test_idempotency_keys_are_read_as_the_vectors_say(case):
    if case.get("error") in (None, "missing"):
        assert parse_idempotency_key(case["header"]) == case["key"]
        return
    with pytest.raises(Problem) as refused:
        parse_idempotency_key(case["header"])
    assert refused.value.status == 400
    assert refused.value.code == f"idempotency_key_{case['error']}"
    assert MAX_KEY_CHARS == 255


def test_a_post_that_waits_for_another_s_transaction_holds_up_no_other_post(headers, tenant):
    contract_keys()  # kept already, as they are after a hub's first event
    connected, done = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic():
            publish_events([NewEvent(tenant.pk, "a", b"{}", caller_key="k")])
            connected.set()
            done.wait(20)
        connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    connected.wait(20)

    async def post():
        lane = FastLane()
        try:
            await exchange(lane, headers, GOOD)  # the key has been looked up then
            same = exchange(lane, {**headers, "Idempotency-Key": "k"}, b'{"type":"a","data":{}}')
            waiting = asyncio.create_task(same)
            await asyncio.sleep(0.02)
            others = [await asyncio.wait_for(exchange(lane, headers, GOOD), 5) for _ in range(3)]
            assert not waiting.done()
            done.set()
            return await waiting, others
        finally:
            done.set()
            await lane.close()

    waited, others = asyncio.run(post())
    holder.join()
    assert [status for status, _, _ in others] == [202] * 3
    assert (waited[0], waited[1]["idempotent-replayed"]) == (202, "true")


def test_a_database_that_is_away_at_the_look_up_of_the_key_is_503(headers, monkeypatch):
    def fail(*args):
        raise OperationalError("gone")

    monkeypatch.setattr("endpoints.models.ApiKey.objects.usable", fail)
    [fast] = by_fast_lane((headers, GOOD))
    slow = by_django(headers, GOOD)
    assert comparable(fast) == comparable(slow)
    assert error(fast) == (503, "unavailable")
    assert fast[1]["retry-after"] == "1"


def test_when_the_connection_is_lost_after_the_commit_the_answer_does_not_say_that_nothing_is_stored(
    headers, monkeypatch
):
    run = LoopConnection.run

    async def lose(*args):
        await run(*args)
        raise OperationalError("server closed the connection unexpectedly")

    keyed = {**headers, "Idempotency-Key": "order-42"}
    with monkeypatch.context() as patch:
        patch.setattr(LoopConnection, "run", lose)
        [lost] = by_fast_lane((keyed, GOOD))
    [again] = by_fast_lane((keyed, GOOD))
    assert error(lost) == (503, "unavailable")
    assert b"may not have been stored" in lost[2]
    assert (again[0], again[1]["idempotent-replayed"]) == (202, "true")
    assert Event.objects.count() == 1


def test_a_refusal_is_a_new_one_each_time(db):
    """One instance raised again and again would keep the frames, and so the bodies, of all requests before."""
    with pytest.raises(Problem) as first:
        key_of(None)
    with pytest.raises(Problem) as second:
        key_of(None)
    assert first.value is not second.value
