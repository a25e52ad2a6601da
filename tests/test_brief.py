"""The contract `brief` beyond its schedule: the replay resource, and the receiver's half at the other end of it."""

import threading
from datetime import timedelta
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from django.core.wsgi import get_wsgi_application
from django.db import connection
from django.db.models.functions import Now

from deliveries.models import Delivery, Event
from deliveries.publishing import NewEvent, publish_events
from deliveries.replays import ReplayExpired, delete_payload, replay_delivery
from endpoints.models import ApiKey
from endpoints.services import SYSTEM, create_api_key
from tests.receiver import answer
from tests.test_api import Api
from webhookhub.pull import pull
from webhookhub.receiver import Receiver, verify
from webhookhub.stores import MemoryStore

pytestmark = pytest.mark.django_db(transaction=True)

DATA = b'{ "amount": 1.10, "name": "Zo\xc3\xab" }'


@pytest.fixture
def endpoint(make_endpoint):
    return make_endpoint(contract="brief")


@pytest.fixture
def key(tenant, endpoint) -> str:
    return create_api_key(key=ApiKey(tenant=tenant, endpoint=endpoint, name="receiver"), actor=SYSTEM)


@pytest.fixture
def mine(key) -> Api:
    """The receiver's program."""
    return Api(key)


def fail(tenant, receiver, pump, *statuses: int) -> list[Event]:
    """Publishes an event for each status, which the receiver answers with it, one after the other."""
    events = []
    for status in statuses:
        receiver.respond = answer(status)
        [found] = publish_events([NewEvent(tenant.pk, "invoice.paid", DATA)])
        events.append(Event.objects.get(pk=found.event_id))
        pump()
    return events


def age(seconds: int) -> None:
    Delivery.objects.update(finished_at=Now() - timedelta(seconds=seconds))


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 409, 410, 422])
def test_a_terminal_status_ends_a_delivery_at_once_and_leaves_the_endpoint_active(
    tenant, endpoint, receiver, pump, status
):
    fail(tenant, receiver, pump, status)
    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.outcome, delivery.last_error) == ("dead", "terminal", f"http_{status}")
    endpoint.refresh_from_db()
    assert endpoint.status == "active"


def test_a_409_after_an_attempt_without_an_answer_is_shown_as_outcome_unknown(
    tenant, endpoint, receiver, pump, api_key, admin_client
):
    fail(tenant, receiver, pump, 409)
    receiver.respond = b""
    publish_events([NewEvent(tenant.pk, "invoice.paid", DATA)])
    pump()
    Delivery.objects.update(due_at=Now())
    receiver.respond = answer(409)
    pump()
    unknown, known = Api(api_key).call("GET", "deliveries")["data"]
    assert (known["outcome"], known["outcome_unknown"]) == ("terminal", False)
    assert (unknown["outcome"], unknown["outcome_unknown"], unknown["attempts_made"]) == ("terminal", True, 2)
    page = admin_client.get(f"/admin/deliveries/delivery/{Delivery.objects.latest('id').pk}/change/").text
    assert "http_409, outcome unknown" in page


def test_the_key_is_one_uuid4_on_every_endpoint_attempt_and_replay(tenant, endpoint, make_endpoint, receiver, pump):
    make_endpoint(contract="brief")
    fail(tenant, receiver, pump, 500)
    Delivery.objects.update(due_at=Now())
    receiver.respond = answer(200)
    pump()
    replay_delivery(delivery=Delivery.objects.first(), actor=SYSTEM)
    pump()
    assert len(receiver.received) == 5
    [only] = {request.header("idempotency-key") for request in receiver.received}
    assert only == str(Event.objects.get().key)


def test_the_list_holds_what_ended_without_arriving_oldest_first_with_event_and_time(
    tenant, endpoint, receiver, pump, mine
):
    gone, delivered, refused = fail(tenant, receiver, pump, 404, 200, 422)
    Delivery.objects.filter(event=gone).update(outcome="exhausted")
    waiting = fail(tenant, receiver, pump, 500)
    rows = mine.call("GET", "replay")["data"]
    assert [(row["event_id"], row["state"]) for row in rows] == [
        (gone.typeid, "exhausted"),
        (refused.typeid, "terminal"),
    ]
    assert rows[0]["idempotency_key"] == str(gone.key)
    assert rows[0]["finished_at"] < rows[1]["finished_at"]
    assert {delivered, *waiting}
    first = mine.call("GET", "replay?limit=1")
    assert first["data"] == rows[:1]
    assert mine.call("GET", f"replay?limit=1&cursor={first['next_cursor']}")["data"] == rows[1:]


def test_an_event_is_handed_over_as_it_would_be_delivered(tenant, endpoint, receiver, pump, mine):
    [event] = fail(tenant, receiver, pump, 404)
    response = mine.get(f"/v1/replay/{event.typeid}")
    assert response.content == DATA
    verified = verify(response.content, dict(response.headers), endpoint.secret)
    assert verified.message_id == event.typeid == receiver.received[0].header("webhook-id")
    assert response.headers["idempotency-key"] == receiver.received[0].header("idempotency-key")
    assert response.headers["webhook-attempt"] == "2"


def test_the_hub_sends_it_again_when_asked_and_not_twice_at_once(tenant, endpoint, receiver, pump, mine):
    [event] = fail(tenant, receiver, pump, 404)
    assert mine.call("POST", f"replay/{event.typeid}", status=202)["trigger"] == "manual"
    assert mine.call("POST", f"replay/{event.typeid}", status=409)["code"] == "under_way"
    assert mine.call("GET", f"replay/{event.typeid}", status=409)["code"] == "under_way"
    assert mine.call("GET", "replay")["data"] == []
    receiver.respond = answer(200)
    pump()
    assert len(receiver.received) == 2
    assert mine.call("GET", "replay")["data"] == []
    assert mine.call("POST", f"replay/{event.typeid}", status=404)["code"] == "delivered"


def test_after_72_hours_it_is_gone_everywhere(tenant, endpoint, receiver, pump, mine):
    [event] = fail(tenant, receiver, pump, 404)
    age(72 * 3600 - 60)
    assert mine.get(f"/v1/replay/{event.typeid}").status_code == 200
    age(72 * 3600 + 1)
    assert mine.call("GET", f"replay/{event.typeid}", status=410)["code"] == "replay_expired"
    assert mine.call("POST", f"replay/{event.typeid}", status=410)["code"] == "replay_expired"
    assert mine.call("GET", "replay")["data"] == []
    with pytest.raises(ReplayExpired):
        replay_delivery(delivery=Delivery.objects.get(), actor=SYSTEM)


def test_a_replay_does_not_prolong_the_72_hours(tenant, endpoint, receiver, pump, mine):
    [event] = fail(tenant, receiver, pump, 404)
    age(71 * 3600)
    ended = Delivery.objects.get().finished_at
    for _ in range(2):
        mine.call("POST", f"replay/{event.typeid}", status=202)
        pump()
    [row] = mine.call("GET", "replay")["data"]
    expires = (ended + timedelta(hours=72)).isoformat().replace("+00:00", "Z")
    assert row["replay_expires_at"] == expires
    Delivery.objects.exclude(first_finished_at=None).update(first_finished_at=Now() - timedelta(hours=72, seconds=1))
    assert mine.call("GET", "replay")["data"] == []
    assert mine.call("GET", f"replay/{event.typeid}", status=410)["code"] == "replay_expired"


def test_the_list_goes_by_the_contract_that_a_delivery_kept_to(tenant, endpoint, receiver, pump, mine):
    fail(tenant, receiver, pump, 404)
    age(80 * 3600)
    endpoint.contract = "standard"
    endpoint.save(update_fields=["contract"])
    assert mine.call("GET", "replay")["data"] == []


def test_the_list_is_in_the_order_of_events_whenever_their_deliveries_were_made(tenant, endpoint, receiver, pump, mine):
    first, second, third = fail(tenant, receiver, pump, 404, 404, 404)
    mine.call("POST", f"replay/{second.typeid}", status=202)
    pump()
    mine.call("POST", f"replay/{first.typeid}", status=202)
    pump()
    pages, cursor = [], ""
    while True:
        found = mine.call("GET", f"replay?limit=1{cursor}")
        pages += [row["event_id"] for row in found["data"]]
        if "next_cursor" not in found:
            break
        cursor = f"&cursor={found['next_cursor']}"
    assert pages == [first.typeid, second.typeid, third.typeid]


def test_an_event_whose_payload_was_deleted_is_not_to_be_had(tenant, endpoint, receiver, pump, mine):
    [event] = fail(tenant, receiver, pump, 404)
    delete_payload(event=event, actor=SYSTEM)
    assert mine.call("GET", "replay")["data"] == []
    assert mine.call("GET", f"replay/{event.typeid}", status=410)["code"] == "replay_expired"
    assert mine.call("POST", f"replay/{event.typeid}", status=410)["code"] == "replay_expired"


def test_another_endpoint_s_events_are_not_there(tenant, endpoint, make_endpoint, receiver, pump, mine):
    [event] = fail(tenant, receiver, pump, 404)
    other = make_endpoint(contract="brief", event_types=["other"])
    theirs = Api(create_api_key(key=ApiKey(tenant=tenant, endpoint=other, name="x"), actor=SYSTEM))
    assert theirs.call("GET", "replay")["data"] == []
    for method in ("GET", "POST"):
        assert theirs.call(method, f"replay/{event.typeid}", status=404)["code"] == "not_found"
        assert mine.call(method, "replay/evt_x", status=404)["code"] == "not_found"


def test_a_paused_endpoint_s_receiver_can_still_fetch_what_it_missed(tenant, endpoint, receiver, pump, mine):
    [event] = fail(tenant, receiver, pump, 404)
    endpoint.status = "paused"
    endpoint.save(update_fields=["status"])
    assert mine.get(f"/v1/replay/{event.typeid}").status_code == 200


class _Quiet(WSGIRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def site():
    """The hub's API, served on loopback."""
    application = get_wsgi_application()

    def close_after(environ, start_response):
        try:
            return [b"".join(application(environ, start_response))]
        finally:
            connection.close()

    server = make_server("127.0.0.1", 0, close_after, handler_class=_Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_kit_pulls_what_was_missed_and_processes_each_event_once(tenant, endpoint, receiver, pump, key, site):
    assert urlsplit(site).hostname == "127.0.0.1"
    first, second, third = fail(tenant, receiver, pump, 404, 422, 403)
    processed = []
    kit = Receiver(endpoint.secret, lambda message: processed.append(message), MemoryStore())
    # The first had come and been processed, although its answer was lost.
    kit.receive(receiver.received[0].body, dict(receiver.received[0].headers))

    pulled = pull(site, key, kit)

    assert pulled.repeated == [first.typeid]
    assert pulled.processed == [second.typeid, third.typeid]
    assert [message.key for message in processed] == [str(event.key) for event in (first, second, third)]
    assert all(message.body == DATA for message in processed)
    assert pull(site, key, kit).processed == []
    assert len(processed) == 3
    age(72 * 3600 + 1)
    assert pull(site, key, kit) == ([], [], [], [])
