"""The admin's screens for what the three contracts bring: switches, challenges, tests, rules, gaps, credits."""

import dataclasses
import json
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.db.models import F
from django.db.models.functions import Now

from deliveries.models import Credit, Delivery, Event, ProjectionGap, Verification
from deliveries.publishing import NewEvent, publish_events, repair_projection_gaps
from deliveries.services import delete_endpoint
from endpoints.contracts import BETTERSTOOD, CONTRACTS
from endpoints.models import ApiKey, AuditEvent, Endpoint, EventType, Rule, Tenant
from endpoints.services import SYSTEM, authenticate
from tests.receiver import answer
from tests.test_admin import OPS, PASSWORD, Browser, action_page, change_page, page, shown_once, user_with

pytestmark = pytest.mark.django_db(transaction=True)

AUTOMATION = "com.elicitra.automation.triggered.v1"
COMPLETED = "com.elicitra.analysis.completed.v1"


@pytest.fixture(autouse=True)
def _loopback_urls(monkeypatch):
    monkeypatch.setitem(CONTRACTS, "betterstood", dataclasses.replace(BETTERSTOOD, https_443=False))


@pytest.fixture
def ops(db) -> Browser:
    return Browser(user_with(*OPS))


@pytest.fixture
def root(db) -> Browser:
    return Browser(User.objects.create_superuser("root", password=PASSWORD))


@pytest.fixture
def reader(db) -> Browser:
    """Somebody who may look and do nothing."""
    return Browser(user_with(*(name for name in OPS if name.startswith("view_")), name="reader"))


@pytest.fixture
def endpoint(make_endpoint):
    return make_endpoint(contract="betterstood")


def press(browser, obj, name, **answers) -> str:
    """Confirms an action, and returns the page that follows."""
    return browser.send(action_page(obj, name), confirmed="yes", follow=True, **{"reason": "because", **answers}).text


def publish(tenant, event_type, data):
    [found] = publish_events([NewEvent(tenant.pk, event_type, json.dumps(data).encode())])
    return found


def test_an_endpoint_is_made_challenged_confirmed_and_tested(ops, tenant, receiver, pump):
    form = {"tenant": tenant.pk, "name": "crm", "url": receiver.url, "contract": "betterstood", "event_types": "*"}
    secret = shown_once(ops.send(page("endpoints.endpoint", "add"), **form))
    assert secret.startswith("elsec_")
    endpoint = Endpoint.objects.get()
    shown = ops.get(change_page(endpoint)).text
    assert "Not verified" in shown
    assert "No challenge has been sent yet." in shown
    assert 'disabled title="It is not verified yet."' in shown

    assert "Queued as" in press(ops, endpoint, "challenge")
    pump()
    challenge = json.loads(receiver.received[0].body)["challenge"]
    assert "4 tries are left" in press(ops, endpoint, "confirm", challenge="wrong")
    assert "Verified. The endpoint is active" in press(
        ops, endpoint, "confirm", challenge=receiver.received[0].body.decode()
    )
    assert challenge == Verification.objects.get().challenge
    shown = ops.get(change_page(endpoint)).text
    assert "Confirmed." in shown
    assert 'disabled title="It is active."' in shown

    question = ops.send(action_page(endpoint, "test")).text
    assert COMPLETED in question
    assert AUTOMATION not in question
    assert "Queued as" in press(ops, endpoint, "test", event_type=COMPLETED)
    assert "Select a valid choice" in press(ops, endpoint, "test", event_type="invoice.paid")
    pump()
    assert Delivery.objects.latest("id").trigger == "test"
    assert json.loads(receiver.received[1].body)["type"] == COMPLETED
    assert set(AuditEvent.objects.values_list("action", flat=True)) >= {
        "endpoint.challenge",
        "endpoint.verify",
        "endpoint.test",
    }


def test_pausing_says_what_the_contract_does(ops, make_endpoint):
    for contract, words in (("standard", "is on hold"), ("kingminos", "is dead"), ("betterstood", "for a replay")):
        made = make_endpoint(contract=contract, name=contract)
        Endpoint.objects.update(status="active")
        assert words in ops.send(action_page(made, "pause")).text


def test_a_tenant_s_webhooks_are_switched_off_and_on_with_a_reason(ops, tenant, make_endpoint):
    make_endpoint(contract="kingminos")
    publish(tenant, "run.done", {})
    assert "This field is required" in press(ops, tenant, "webhooks_off", reason="")
    assert "Off. Events are taken in" in press(ops, tenant, "webhooks_off")
    assert Delivery.objects.get().last_error == "webhooks_not_enabled"
    assert 'disabled title="They are off."' in ops.get(change_page(tenant)).text
    assert "On." in press(ops, tenant, "webhooks_on")
    assert Tenant.objects.get().webhooks_enabled


def test_a_rule_is_made_tried_and_refused_when_it_cannot_be(ops, tenant, endpoint):
    form = {
        "tenant": tenant.pk,
        "name": "hot",
        "event_type": AUTOMATION,
        "condition": "event.data.score >",
        "endpoint": endpoint.pk,
        "position": 1,
        "enabled": "on",
    }
    assert "error at line 1" in ops.send(page("endpoints.rule", "add"), **form).text
    form["condition"] = "event.data.score > 80"
    ops.send(page("endpoints.rule", "add"), **form)
    made = Rule.objects.get()
    assert "It matches" in press(ops, made, "dry_run", payload='{"score": 90}')
    assert "does not match: The condition is false" in press(ops, made, "dry_run", payload='{"score": 9}')
    assert "cannot be the data of an event" in press(ops, made, "dry_run", payload="{")
    assert not Event.objects.exists()


def test_gaps_are_listed_with_what_does_not_fit_and_a_change_of_the_schema_has_them_tried_again(ops, tenant, endpoint):
    Endpoint.objects.update(status="active")
    kind = EventType.objects.get(name=COMPLETED)
    form = {"description": kind.description, "schema": json.dumps({**kind.schema, "required": ["organizationId"]})}
    ops.send(change_page(kind), **form)
    data = {"interactionId": "i", "lifecycleSequence": 2, "organizationId": "o" * 300}
    found = publish(tenant, COMPLETED, data)
    listed = ops.get(page("deliveries.projectiongap", "changelist")).text
    assert "organizationId" in listed
    assert "Not repaired." in ops.get(change_page(Event.objects.get(pk=found.event_id))).text
    wrong = ops.send(change_page(kind), **{**form, "schema": '{"properties": {"a": {"x-class": "no"}}}'}).text
    assert "x-class" in wrong
    ops.send(change_page(kind), **{**form, "schema": json.dumps(kind.schema)})
    assert repair_projection_gaps() == 1
    assert "organizationId" not in ops.get(page("deliveries.projectiongap", "changelist") + "?repaired=no").text
    assert ProjectionGap.objects.get().repaired_at


def test_a_plain_type_has_no_limits_to_set(ops, tenant):
    form = {"tenant": tenant.pk, "name": "invoice.paid", "mode": "subscribed", "schema": '{"required": ["a"]}'}
    assert "leave it empty for others" in ops.send(page("endpoints.eventtype", "add"), **form).text
    ops.send(page("endpoints.eventtype", "add"), **{**form, "schema": "{}"})
    assert EventType.objects.get().name == "invoice.paid"


def test_the_ledger_and_a_delivery_show_what_was_charged_and_until_when_it_can_be_sent_again(
    ops, tenant, endpoint, receiver, pump
):
    Endpoint.objects.update(status="active")
    Rule.objects.create(tenant=tenant, name="r", event_type=AUTOMATION, condition="true", endpoint=endpoint)
    publish(tenant, AUTOMATION, {"activation": {}})
    pump()
    credit = Credit.objects.get()
    listed = ops.get(page("deliveries.credit", "changelist"), {"q": tenant.typeid}).text
    assert credit.typeid in listed
    assert endpoint.typeid in listed
    delivery = Delivery.objects.get()
    shown = ops.get(change_page(delivery)).text
    assert "can be sent again until" in shown.lower()
    assert "Betterstood" in shown
    Event.objects.update(accepted_at=Now() - timedelta(days=31))
    assert "could be sent again until" in ops.get(change_page(delivery)).text
    receiver.respond = answer(200)
    assert "could be sent again until" in press(ops, delivery, "replay")


def test_a_payload_is_deleted_by_its_own_button(ops, tenant, make_endpoint, receiver, pump):
    make_endpoint()
    found = publish(tenant, "a", {"name": "Zoe"})
    event = Event.objects.get(pk=found.event_id)
    Delivery.objects.update(state="sending", claim_token=F("id"), lease_until=Now())
    assert "is being sent" in press(ops, event, "delete_payload")
    Delivery.objects.update(state="pending", claim_token=None, lease_until=None)
    assert "Deleted. The event stays" in press(ops, event, "delete_payload")
    shown = ops.get(change_page(event)).text
    assert "Zoe" not in shown
    assert "Deleted at" in shown
    pump()
    assert not receiver.received
    assert Delivery.objects.get().state == "discarded"


def test_a_key_is_bound_to_an_endpoint_of_its_own_tenant(ops, tenant, make_endpoint):
    mine = make_endpoint(contract="brief")
    other = Tenant.objects.create(name="Other")
    form = {"tenant": other.pk, "endpoint": mine.pk, "name": "receiver"}
    assert "belongs to another tenant" in ops.send(page("endpoints.apikey", "add"), **form).text
    text = shown_once(ops.send(page("endpoints.apikey", "add"), **{**form, "tenant": tenant.pk}))
    assert authenticate(text).endpoint == mine
    assert ApiKey.objects.count() == 1


def test_what_is_deleted_is_no_choice_for_a_key_or_a_rule(ops, tenant, make_endpoint):
    gone = make_endpoint(contract="brief", name="was-there")
    choices = "/admin/autocomplete/?app_label=endpoints&model_name=apikey&field_name=endpoint&term=was-there"
    assert str(gone.pk) in ops.get(choices).text
    delete_endpoint(endpoint=gone, actor=SYSTEM)
    assert str(gone.pk) not in ops.get(choices).text
    assert "was-there" in ops.get(page("endpoints.endpoint", "changelist"), {"q": "was-there"}).text
    form = {"tenant": tenant.pk, "endpoint": gone.pk, "name": "receiver"}
    assert "has been deleted" in ops.send(page("endpoints.apikey", "add"), **form).text
    assert not ApiKey.objects.exists()


@pytest.mark.parametrize("name", ["challenge", "confirm", "test", "pause", "remove", "rotate"])
def test_who_may_only_look_has_no_buttons(reader, endpoint, name):
    shown = reader.get(change_page(endpoint)).text
    assert f"../{name}/" not in shown
    assert reader.send(action_page(endpoint, name), confirmed="yes", reason="x").status_code == 403
    assert reader.send(action_page(endpoint.tenant, "webhooks_off"), confirmed="yes", reason="x").status_code == 403


def test_a_button_on_an_old_page_does_nothing_that_makes_no_sense_any_more(ops, endpoint):
    delete_endpoint(endpoint=endpoint, actor=SYSTEM)
    for name, words in (("confirm", "It is deleted"), ("test", "It is deleted"), ("resume", "It is deleted")):
        assert words in press(ops, endpoint, name, challenge="x", event_type=COMPLETED)
    endpoint.refresh_from_db()
    assert endpoint.status == "deleted"


@pytest.mark.parametrize(
    "schema", ['{"a": "\\u0000"}', '{"a": "\\ud800"}', '{"a": NaN}', "[" * 5_000, '{"a":' * 900, "9" * 5_000]
)
def test_a_schema_that_cannot_be_kept_is_refused(ops, tenant, schema):
    form = {"tenant": tenant.pk, "name": "a.b", "mode": "conditional_destination", "schema": schema}
    response = ops.send(page("endpoints.eventtype", "add"), **form)
    assert response.status_code == 200
    assert "errorlist" in response.text
    assert not EventType.objects.exists()


def test_a_type_that_a_contract_goes_by_is_not_deleted(ops, root, tenant, endpoint):
    kind = EventType.objects.get(name=COMPLETED)
    assert root.send(page("endpoints.eventtype", "delete", kind.pk), post="yes").status_code == 403
    assert EventType.objects.filter(pk=kind.pk).exists()
