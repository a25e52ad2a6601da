"""The API of endpoints, deliveries, events, rules and credits, as a tenant's program calls it."""

import json

import pytest
from django.test import Client

from deliveries.models import Delivery, Event
from deliveries.publishing import NewEvent, publish_events
from endpoints.models import ApiKey, AuditEvent, Endpoint, Tenant
from endpoints.services import SYSTEM, create_api_key, create_endpoint
from tests.receiver import answer
from webhookhub.api import JSONRenderer

pytestmark = pytest.mark.django_db(transaction=True)


class Api(Client):
    """Calls with a key, JSON in and out."""

    def __init__(self, key: str) -> None:
        super().__init__(headers={"Authorization": f"Bearer {key}"})

    def call(self, method: str, path: str, body=None, status: int = 200):
        options = {} if body is None else {"data": json.dumps(body), "content_type": "application/json"}
        response = self.generic(method, f"/v1/{path}", **options)
        assert response.status_code == status, response.content
        if status >= 400:
            assert response.headers["Content-Type"] == "application/problem+json"
        return response.json() if response.content else None


@pytest.fixture
def api(api_key) -> Api:
    return Api(api_key)


@pytest.fixture
def stranger(db) -> Api:
    """Another tenant's program."""
    other = Tenant.objects.create(name="Other")
    return Api(create_api_key(key=ApiKey(tenant=other, name="x"), actor=SYSTEM))


def publish(tenant, event_type="invoice.paid", payload=b"{}"):
    return publish_events([NewEvent(tenant.pk, event_type, payload)])[0].event_id


# --- Endpoints


@pytest.mark.parametrize("resource", ["endpoints", "webhooks"])
def test_an_endpoint_is_made_changed_paused_and_deleted(api, tenant, receiver, resource):
    made = api.call("POST", resource, {"name": "orders", "url": receiver.url, "contract": "kingminos"}, 201)
    assert made["secret"].startswith("kmwhsec_")
    assert (made["contract"], made["is_active"], made["event_types"]) == ("kingminos", True, ["*"])
    path = f"{resource}/{made['id']}"
    changed = api.call("PATCH", path, {"name": "bills", "event_types": ["invoice.*"]})
    assert (changed["name"], changed["event_types"]) == ("bills", ["invoice.*"])
    assert api.call("PATCH", path, {"is_active": False})["status"] == "paused"
    assert api.call("PATCH", path, {"is_active": True})["status"] == "active"
    assert [one["id"] for one in api.call("GET", resource)["data"]] == [made["id"]]
    assert "secret" not in api.call("GET", path)
    assert api.call("DELETE", path, status=204) is None
    api.call("GET", path, status=404)
    assert api.call("GET", resource) == {"data": []}
    assert set(AuditEvent.objects.values_list("action", flat=True)) >= {
        "endpoint.create",
        "endpoint.change",
        "endpoint.paused",
        "endpoint.active",
        "endpoint.deleted",
    }


@pytest.mark.parametrize(
    ("body", "pointer", "words"),
    [
        ({}, "/name", "required"),
        ({"name": "a", "url": "ftp://x.test"}, "/url", "scheme"),
        ({"name": "a", "url": "https://10.0.0.1/"}, "/url", "private"),
        (
            {"name": "a", "url": "https://x.example.com", "contract": "none"},
            "/contract",
            "standard, brief, betterstood",
        ),
        ({"name": "a", "url": "https://x.example.com", "event_types": []}, "/event_types", "blank"),
        ({"name": "a", "url": "https://x.example.com", "event_types": ["a b"]}, "/event_types", "Give an event type"),
        ({"name": "a", "url": "https://x.example.com", "status": "active"}, "/status", "no such member"),
        (
            {"name": "a", "url": "https://x.example.com:8443", "contract": "betterstood"},
            "/url",
            "https URL on port 443",
        ),
        (
            {"name": "a", "url": "https://x.example.com", "contract": "betterstood", "event_types": ["invoice.paid"]},
            "/event_types",
            "com.elicitra.interaction.ended.v1",
        ),
        ({"name": "a", "url": "https://x.example.com", "secret": "short"}, "/secret", "whsec_"),
    ],
)
def test_what_an_endpoint_cannot_be_is_said_with_its_place(api, body, pointer, words):
    problem = api.call("POST", "endpoints", body, 400)
    assert words in problem["detail"]
    assert pointer in [error["pointer"].rsplit("/0")[0] for error in problem["errors"]]
    assert not Endpoint.objects.exists()


def test_the_contract_of_an_endpoint_stays_where_its_receiver_would_have_to_change(api, receiver):
    made = api.call("POST", "endpoints", {"name": "a", "url": receiver.url}, 201)
    assert api.call("PATCH", f"endpoints/{made['id']}", {"contract": "brief"})["contract"] == "brief"
    problem = api.call("PATCH", f"endpoints/{made['id']}", {"contract": "kingminos"}, 400)
    assert "make a new endpoint" in problem["detail"]
    assert Endpoint.objects.get().contract == "brief"


def test_a_test_is_sent_once_marked_and_counts_for_nothing(api, make_endpoint, receiver, pump):
    endpoint = make_endpoint(contract="kingminos")
    receiver.respond = answer(500)
    sent = api.call("POST", f"endpoints/{endpoint.typeid}/test", status=202)
    assert (sent["trigger"], sent["state"]) == ("test", "pending")
    pump()
    endpoint.refresh_from_db()
    found = api.call("GET", f"deliveries/{sent['id']}")
    assert (found["state"], found["last_error"], found["attempts_made"]) == ("dead", "http_500", 1)
    assert endpoint.dead_in_a_row == 0
    api.call("POST", f"deliveries/{sent['id']}/replay", status=409)
    problem = api.call("POST", f"endpoints/{endpoint.typeid}/test", {"type": "invoice.paid"}, 409)
    assert "webhookhub.test" in problem["detail"]
    assert api.call("GET", "events") == {"data": []}


# --- The log


def test_the_log_holds_every_event_and_filters_by_type_and_arrival(api, tenant, receiver, pump):
    nobody = publish(tenant, "run.failed")
    endpoint = Endpoint(tenant=tenant, name="a", url=receiver.url, event_types=["run.*"])
    create_endpoint(endpoint=endpoint, actor=SYSTEM)
    arrived, failed = publish(tenant, "run.done"), publish(tenant, "run.failed")
    receiver.respond = lambda request: answer(200 if b"evt" in request.body else 500)
    replies = iter([answer(200), answer(500)])
    receiver.respond = lambda _: next(replies)
    pump()
    if Delivery.objects.get(event=failed).state == "delivered":  # they may have come in the other order
        arrived, failed = failed, arrived

    def ids(query):
        return [one["id"] for one in api.call("GET", f"events{query}")["data"]]

    def shown(*keys):
        return [Event.objects.get(pk=key).typeid for key in sorted(keys, reverse=True)]

    assert ids("") == shown(nobody, arrived, failed)
    assert ids("?delivered=true") == shown(arrived)
    assert ids("?delivered=false") == shown(nobody, failed)
    assert len(ids("?type=run.failed")) == 2
    assert ids("?type=run") == []
    one = api.call("GET", f"events/{shown(failed)[0].replace('evt_', 'kmevt_')}")
    assert (one["delivered"], one["deliveries"][0]["last_error"]) == (False, "http_500")
    assert one["receiver_ids"] == {}


def test_next_cursor_is_there_exactly_when_a_full_page_came(api, tenant):
    made = [publish(tenant) for _ in range(4)]
    first = api.call("GET", "events?limit=2")
    second = api.call("GET", f"events?limit=2&cursor={first['next_cursor']}")
    assert len(second["data"]) == 2
    last = api.call("GET", f"events?limit=2&cursor={second['next_cursor']}")
    assert last == {"data": []}
    assert "next_cursor" not in api.call("GET", "events?limit=5")
    seen = [one["id"] for page in (first, second) for one in page["data"]]
    assert seen == [Event.objects.get(pk=key).typeid for key in reversed(made)]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=0", "limit_invalid"),
        ("limit=251", "limit_invalid"),
        ("limit=x", "limit_invalid"),
        ("limit=%C2%B2", "limit_invalid"),
        ("cursor=abc", "cursor_invalid"),
        ("cursor=", "cursor_invalid"),
        ("delivered=yes", "parameter_invalid"),
        ("type=a&type=b", "parameter_invalid"),
        ("type=%00", "parameter_invalid"),
        ("typ=a", "unknown_parameter"),
    ],
)
def test_a_query_that_cannot_be_answered_is_refused(api, query, code):
    assert api.call("GET", f"events?{query}", status=400)["code"] == code


# --- Deliveries and access


def test_a_delivery_is_shown_with_its_attempts_and_sent_again(api, tenant, endpoint, receiver, pump):
    publish(tenant)
    pump()
    [found] = api.call("GET", f"deliveries?endpoint={endpoint.typeid}&state=delivered")["data"]
    assert (found["outcome"], found["replay_expires_at"]) == ("succeeded", None)
    assert [one["status"] for one in api.call("GET", f"deliveries/{found['id']}")["attempts"]] == [200]
    again = api.call("POST", f"deliveries/{found['id']}/replay", {"reason": "lost"}, 202)
    assert (again["replay_of"], again["trigger"], again["event"]) == (found["id"], "manual", found["event"])
    pump()
    assert len(receiver.received) == 2
    assert receiver.received[0].header("webhook-id") == receiver.received[1].header("webhook-id")


def test_another_tenant_finds_nothing_and_changes_nothing(api, stranger, tenant, endpoint, pump):
    event = Event.objects.get(pk=publish(tenant)).typeid
    delivery = Delivery.objects.get().typeid
    for method, path in [
        ("GET", f"events/{event}"),
        ("GET", f"deliveries/{delivery}"),
        ("POST", f"deliveries/{delivery}/replay"),
        ("GET", f"endpoints/{endpoint.typeid}"),
        ("PATCH", f"endpoints/{endpoint.typeid}"),
        ("DELETE", f"endpoints/{endpoint.typeid}"),
        ("POST", f"endpoints/{endpoint.typeid}/test"),
        ("POST", f"endpoints/{endpoint.typeid}/verification"),
        ("GET", "events/evt_nonsense"),
        ("GET", f"deliveries/{event}"),
    ]:
        assert stranger.call(method, path, status=404)["code"] == "not_found"
    for path in ("events", "deliveries", f"deliveries?endpoint={endpoint.typeid}", "endpoints", "rules", "credits"):
        assert stranger.call("GET", path) == {"data": []}
    endpoint.refresh_from_db()
    assert endpoint.status == "active"
    assert Delivery.objects.count() == 1


@pytest.mark.parametrize("path", ["events", "deliveries", "endpoints", "webhooks", "rules", "credits", "replay"])
def test_without_a_key_nothing_is_shown(db, path):
    assert Api("whk_none").call("GET", path, status=401)["code"] == "unauthorized"


def test_a_key_of_an_endpoint_opens_the_replay_resource_and_nothing_else(tenant, endpoint, api):
    bound = Api(create_api_key(key=ApiKey(tenant=tenant, endpoint=endpoint, name="receiver"), actor=SYSTEM))
    for path in ("events", "deliveries", "endpoints", "rules", "credits"):
        assert bound.call("GET", path, status=403)["code"] == "key_of_an_endpoint"
    assert bound.call("POST", "events", {"type": "a", "data": {}}, 403)["code"] == "key_of_an_endpoint"
    assert bound.call("GET", "replay") == {"data": []}
    assert api.call("GET", "replay", status=403)["code"] == "key_of_a_tenant"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"\\ud800":1}', "lone_surrogate"),
        (b'{"name":"\\ud800"}', "lone_surrogate"),
        (b"[" * 100_000, "nesting_too_deep"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "nesting_too_deep"),
        (b'{"a":1,"a":2}', "duplicate_key"),
        (b'{"name":' + b"9" * 5_000 + b"}", "invalid_json"),
        (b'{"name":NaN}', "invalid_json"),
        (b"[]", "body_not_object"),
        (b"\xff", "invalid_utf8"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_and_never_a_500(api, endpoint, body, code):
    for method, path in [("POST", "endpoints"), ("PATCH", f"endpoints/{endpoint.typeid}"), ("POST", "rules")]:
        response = api.generic(method, f"/v1/{path}", body, "application/json")
        assert response.status_code == 400
        assert response.headers["Content-Type"] == "application/problem+json"
        assert response.json()["code"] == code


def test_a_tenant_is_told_what_failed_in_the_contract_s_words_and_not_where(api, tenant, make_endpoint, receiver, pump):
    endpoint = make_endpoint(contract="kingminos")
    receiver.respond = b"HTTP/1.1 999 secret-banner\r\nContent-Length: 0\r\n\r\n"
    publish(tenant)
    pump()
    Endpoint.objects.update(url="http://10.1.2.3/hook")
    publish(tenant)
    pump()
    shown = [api.call("GET", f"deliveries/{one.typeid}") for one in Delivery.objects.filter(endpoint=endpoint)]
    assert sorted(attempt["error"] for one in shown for attempt in one["attempts"]) == [
        "blocked_endpoint_host",
        "transport_error",
    ]
    assert "secret-banner" not in json.dumps(shown)
    assert "resolves" not in json.dumps(shown)


def test_an_answer_without_data_has_no_body_which_the_next_one_would_begin_with():
    # Not through Django's test client: it takes the body of a 204 away by itself, and a server does not.
    assert JSONRenderer().render(None) == b""
    assert JSONRenderer().render({"a": None}) == b'{"a":null}'
