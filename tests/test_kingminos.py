"""The contract `kingminos` beyond its schedule: exact words, the workspace's switch, auto-disable, replays."""

import re

import pytest

from deliveries.models import Delivery, Event
from deliveries.publishing import NewEvent, publish_events
from deliveries.replays import replay_delivery
from deliveries.services import pause_endpoints, switch_webhooks
from endpoints.models import AuditEvent, Endpoint, EndpointSecret
from endpoints.services import SYSTEM
from tests.receiver import answer, in_receiver
from tests.test_api import Api

pytestmark = pytest.mark.django_db(transaction=True)

# policies.json, last_error_regex of kingminos
GRAMMAR = re.compile(
    r"(http_[1-5][0-9]{2}|timeout|transport_error|dns_nxdomain|webhook_secret_unavailable|endpoint_inactive|"
    r"webhooks_not_enabled|blocked_endpoint_host:[a-z0-9_:]+)"
)


@pytest.fixture
def endpoint(make_endpoint):
    return make_endpoint(contract="kingminos")


def publish(tenant, count: int = 1):
    found = publish_events([NewEvent(tenant.pk, "run.failed", b"{}") for _ in range(count)])
    return [one.event_id for one in found]


def state_of(delivery) -> tuple[str, str, str]:
    delivery.refresh_from_db()
    assert not delivery.last_error or GRAMMAR.fullmatch(delivery.last_error)
    return delivery.state, delivery.outcome, delivery.last_error


@pytest.mark.parametrize("status", [404, 413])
def test_404_and_413_are_dead_at_once(tenant, endpoint, receiver, pump, status):
    receiver.respond = answer(status)
    publish(tenant)
    pump()
    assert state_of(Delivery.objects.get()) == ("dead", "dead", f"http_{status}")


@pytest.mark.parametrize("status", [301, 307, 400, 410, 429, 500])
def test_anything_else_is_tried_again(tenant, endpoint, receiver, pump, status):
    receiver.respond = answer(status, "Location: /elsewhere")
    publish(tenant)
    pump()
    assert state_of(Delivery.objects.get()) == ("pending", "", f"http_{status}")
    assert len(receiver.received) == 1
    endpoint.refresh_from_db()
    assert endpoint.status == "active"


def test_the_words_of_what_never_got_an_answer(tenant, endpoint, receiver, pump):
    receiver.respond = b""
    publish(tenant)
    pump()
    assert state_of(Delivery.objects.get()) == ("pending", "", "transport_error")
    assert Delivery.objects.get().attempts.get().error == "closed_before_response"


def test_a_host_that_is_blocked_is_dead_without_a_send(tenant, endpoint, receiver, pump):
    Endpoint.objects.update(url="http://10.1.2.3/hook")
    publish(tenant)
    pump()
    assert state_of(Delivery.objects.get()) == ("dead", "dead", "blocked_endpoint_host:private")
    assert not receiver.received


def test_without_a_readable_secret_nothing_is_sent_and_it_is_tried_again(tenant, endpoint, receiver, pump):
    EndpointSecret.objects.update(sealed=b"nonsense")
    publish(tenant)
    pump()
    assert state_of(Delivery.objects.get()) == ("pending", "", "webhook_secret_unavailable")
    assert not receiver.received


# --- The workspace's switch


def test_switching_webhooks_off_ends_what_waits_and_what_comes_and_keeps_the_log(
    tenant, endpoint, make_endpoint, receiver, pump, api_key
):
    standard = make_endpoint(contract="standard", name="kept")
    receiver.respond = answer(500)
    [waiting] = publish(tenant)
    pump()
    assert switch_webhooks(tenant=tenant, enabled=False, actor=SYSTEM, reason="not paid")
    assert not switch_webhooks(tenant=tenant, enabled=False, actor=SYSTEM)
    [later] = publish(tenant)
    for event in (waiting, later):
        dead = Delivery.objects.get(event=event, endpoint=endpoint)
        assert state_of(dead) == ("dead", "dead", "webhooks_not_enabled")
        assert dead.finished_at is not None
        assert Delivery.objects.get(event=event, endpoint=standard).state == "held"
    sent = len(receiver.received)
    pump()
    assert len(receiver.received) == sent
    log = Api(api_key).call("GET", "events?delivered=false")["data"]
    assert [one["id"] for one in log] == [Event.objects.get(pk=key).typeid for key in (later, waiting)]

    switch_webhooks(tenant=tenant, enabled=True, actor=SYSTEM)
    receiver.respond = answer(200)
    pump()
    assert set(Delivery.objects.filter(endpoint=standard).values_list("state", flat=True)) == {"delivered"}
    assert set(Delivery.objects.filter(endpoint=endpoint).values_list("state", flat=True)) == {"dead"}
    assert set(AuditEvent.objects.filter(object_id=tenant.typeid).values_list("action", "reason")) == {
        ("tenant.webhooks_off", "not paid"),
        ("tenant.webhooks_on", ""),
    }


def test_a_delivery_claimed_when_the_webhooks_go_off_is_not_tried_again(tenant, endpoint, receiver, pump, monkeypatch):
    receiver.respond = in_receiver(lambda: switch_webhooks(tenant=tenant, enabled=False, actor=SYSTEM), answer(500))
    publish(tenant)
    pump()
    assert state_of(Delivery.objects.get()) == ("dead", "dead", "webhooks_not_enabled")
    assert Delivery.objects.get().attempts.get().status == 500


# --- Endpoints that are not active


def test_deliveries_to_a_paused_endpoint_are_dead_and_so_are_replays_until_it_is_active(
    tenant, endpoint, receiver, pump, api_key
):
    receiver.respond = answer(500)
    publish(tenant)
    pump()
    waiting = Delivery.objects.get()
    pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="maintenance")
    assert state_of(waiting) == ("dead", "dead", "endpoint_inactive")
    publish(tenant)
    assert state_of(Delivery.objects.latest("id")) == ("dead", "dead", "endpoint_inactive")
    replayed = replay_delivery(delivery=waiting, actor=SYSTEM)
    assert state_of(replayed) == ("dead", "dead", "endpoint_inactive")
    assert replayed.replay_of == waiting

    receiver.respond = answer(200)
    Api(api_key).call("PATCH", f"webhooks/{endpoint.typeid}", {"is_active": True})
    again = replay_delivery(delivery=waiting, actor=SYSTEM)
    pump()
    assert state_of(again) == ("delivered", "succeeded", "")
    assert len(receiver.received) == 2


# --- Auto-disable


def test_twenty_dead_deliveries_in_a_row_disable_the_webhook_and_patch_enables_it_from_zero(
    tenant, endpoint, receiver, pump, api_key
):
    receiver.respond = answer(404)
    publish(tenant, 19)
    pump()
    endpoint.refresh_from_db()
    assert (endpoint.status, endpoint.dead_in_a_row) == ("active", 19)
    publish(tenant)
    pump()
    endpoint.refresh_from_db()
    assert (endpoint.status, endpoint.status_reason) == ("disabled", "auto-disabled: 20 deliveries in a row are dead")

    path = f"webhooks/{endpoint.typeid}"
    assert Api(api_key).call("GET", path)["is_active"] is False
    enabled = Api(api_key).call("PATCH", path, {"is_active": True})
    assert (enabled["is_active"], enabled["dead_in_a_row"]) == (True, 0)
    publish(tenant, 19)
    pump()
    endpoint.refresh_from_db()
    assert (endpoint.status, endpoint.dead_in_a_row) == ("active", 19)


def test_a_success_starts_the_count_anew(tenant, endpoint, receiver, pump):
    for status, count in ((404, 19), (200, 1), (404, 19)):
        receiver.respond = answer(status)
        publish(tenant, count)
        pump()
    endpoint.refresh_from_db()
    assert (endpoint.status, endpoint.dead_in_a_row) == ("active", 19)


def test_blocked_hosts_count_and_what_was_never_sent_does_not(tenant, endpoint, receiver, pump):
    url = endpoint.url
    Endpoint.objects.update(url="http://10.1.2.3/hook")
    publish(tenant, 10)
    pump()
    pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="")
    publish(tenant, 30)
    endpoint.refresh_from_db()
    assert endpoint.dead_in_a_row == 10
    Endpoint.objects.update(url=url, status="active")
    receiver.respond = answer(404)
    publish(tenant, 10)
    pump()
    endpoint.refresh_from_db()
    assert endpoint.status == "disabled"


def test_replays_neither_count_nor_reset(tenant, endpoint, receiver, pump):
    receiver.respond = answer(404)
    publish(tenant, 5)
    pump()
    old = Delivery.objects.first()
    for status in (404, 404, 200):
        receiver.respond = answer(status)
        replay_delivery(delivery=old, actor=SYSTEM)
        pump()
        endpoint.refresh_from_db()
        assert endpoint.dead_in_a_row == 5


def test_the_log_has_the_id_that_receivers_know(tenant, endpoint, receiver, pump, api_key):
    api = Api(api_key)
    [found] = publish_events([NewEvent(tenant.pk, "run.done", b"{}")])
    pump()
    [logged] = api.call("GET", "events")["data"]
    assert logged["id"] == Event.objects.get(pk=found.event_id).typeid
    assert logged["receiver_ids"] == {"kingminos": receiver.received[0].header("kingminos-event-id")}
    assert api.call("GET", f"events/{logged['receiver_ids']['kingminos']}")["id"] == logged["id"]
