"""The contract `betterstood` beyond its schedule: lifecycle, conditions, limits, credits, verification, no backfill."""

import dataclasses
import json
import re
import threading
from datetime import timedelta

import pytest
from django.db import DatabaseError, connection
from django.db.models import F
from django.db.models.functions import Now
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deliveries.control import NotDone, confirm_verification, start_verification
from deliveries.models import Credit, Delivery, Event, ProjectionGap, ReplayJob, Reservation, Verification
from deliveries.publishing import NewEvent, Published, publish_events, repair_projection_gaps
from deliveries.pump import Pump
from deliveries.replays import (
    NotReplayable,
    ReplayExpired,
    create_replay_job,
    delete_payload,
    replay_delivery,
    replay_expires_at,
    step_replay_job,
)
from deliveries.results import reclaim_lost
from deliveries.routing import Rejected
from deliveries.services import pause_endpoints, resume_endpoints
from endpoints.contracts import BETTERSTOOD, CONTRACTS
from endpoints.models import ApiKey, Endpoint, EventType, Rule
from endpoints.services import SYSTEM, create_api_key
from tests.receiver import answer
from tests.test_api import Api
from webhookhub.receiver import verify

pytestmark = pytest.mark.django_db(transaction=True)

ENDED, COMPLETED, FAILED = (
    f"com.elicitra.{name}.v1" for name in ("interaction.ended", "analysis.completed", "analysis.failed")
)
AUTOMATION = "com.elicitra.automation.triggered.v1"
SEQUENCES = {ENDED: 1, COMPLETED: 2, FAILED: 2}


@pytest.fixture(autouse=True)
def _loopback_urls(monkeypatch):
    monkeypatch.setitem(CONTRACTS, "betterstood", dataclasses.replace(BETTERSTOOD, https_443=False))


@pytest.fixture
def unverified(make_endpoint):
    return make_endpoint(contract="betterstood")


@pytest.fixture
def endpoint(unverified):
    Endpoint.objects.update(status="active", status_at=Now() - timedelta(hours=1))
    unverified.refresh_from_db()
    return unverified


@pytest.fixture
def api(api_key) -> Api:
    return Api(api_key)


def lifecycle(tenant, event_type=ENDED, interaction="int_1", **data):
    data = {"interactionId": interaction, "lifecycleSequence": SEQUENCES.get(event_type), **data}
    return post(tenant, event_type, {name: value for name, value in data.items() if value is not None})


def automation(tenant, **data):
    return post(tenant, AUTOMATION, {"activation": {"executionId": "exe_1"}, **data})


def post(tenant, event_type, data, **fields):
    [found] = publish_events([NewEvent(tenant.pk, event_type, json.dumps(data).encode(), **fields)])
    return found


def rule(endpoint, condition="event.data.score > 80", **fields) -> Rule:
    values = {"tenant": endpoint.tenant, "name": "r", "event_type": AUTOMATION, "endpoint": endpoint, **fields}
    made = Rule(condition=condition, **values)
    made.full_clean()
    made.save()
    return made


def data_of(request) -> dict:
    return json.loads(request.body)["data"]


# --- Lifecycle


def test_an_endpoint_asks_for_the_three_lifecycle_types_and_no_others(endpoint, tenant, api, receiver):
    assert endpoint.event_types == [ENDED, COMPLETED, FAILED]
    for wrong in ([AUTOMATION], ["com.elicitra.*"], ["invoice.paid"]):
        problem = api.call("PATCH", f"endpoints/{endpoint.typeid}", {"event_types": wrong}, 400)
        assert problem["errors"][0]["pointer"] == "/event_types"
    assert api.call("PATCH", f"endpoints/{endpoint.typeid}", {"event_types": [FAILED]})["event_types"] == [FAILED]
    assert set(EventType.objects.values_list("name", "mode", "lifecycle_sequence")) == {
        (ENDED, "subscribed", 1),
        (COMPLETED, "subscribed", 2),
        (FAILED, "subscribed", 2),
        (AUTOMATION, "conditional_destination", None),
    }


@pytest.mark.parametrize(
    ("event_type", "data", "code"),
    [
        (ENDED, {"lifecycleSequence": 2}, "lifecycle_sequence_wrong"),
        (ENDED, {"lifecycleSequence": None}, "lifecycle_sequence_wrong"),
        (ENDED, {"lifecycleSequence": True}, "lifecycle_sequence_wrong"),
        (COMPLETED, {"lifecycleSequence": 1}, "lifecycle_sequence_wrong"),
        (FAILED, {"lifecycleSequence": "2"}, "lifecycle_sequence_wrong"),
        (AUTOMATION, {"lifecycleSequence": 1}, "lifecycle_sequence_unexpected"),
        (ENDED, {"interactionId": None}, "interaction_missing"),
        (ENDED, {"interactionId": ""}, "interaction_missing"),
        (ENDED, {"interactionId": 5}, "interaction_missing"),
    ],
)
def test_an_event_out_of_its_place_is_refused_and_nothing_of_it_is_stored(tenant, endpoint, event_type, data, code):
    found = lifecycle(tenant, event_type, **data) if event_type != AUTOMATION else automation(tenant, **data)
    assert isinstance(found, Rejected)
    assert (found.status, found.code) == (400, code)
    assert not Event.objects.exists()


def test_the_answer_of_the_api_names_the_member(tenant, endpoint, api):
    body = {"type": ENDED, "data": {"interactionId": "i", "lifecycleSequence": 7}}
    problem = api.call("POST", "events", body, 400)
    assert problem["errors"] == [
        {
            "pointer": "/data/lifecycleSequence",
            "code": "lifecycle_sequence_wrong",
            "detail": f"data.lifecycleSequence of {ENDED} must be 1",
        }
    ]


def test_the_same_place_sent_again_gives_the_first_event_and_no_second_delivery(tenant, endpoint, receiver, pump):
    first = lifecycle(tenant, ENDED, note="first")
    again = lifecycle(tenant, ENDED, note="second")
    assert again == Published(first.event_id, repeated=True)
    pump()
    assert len(receiver.received) == Event.objects.count() == Reservation.objects.count() == 1
    other = lifecycle(tenant, ENDED, interaction="int_2")
    assert not other.repeated


@pytest.mark.parametrize(("first", "second"), [(COMPLETED, FAILED), (FAILED, COMPLETED)])
def test_completed_and_failed_exclude_each_other(tenant, endpoint, api, first, second):
    lifecycle(tenant, first)
    body = {"type": second, "data": {"interactionId": "int_1", "lifecycleSequence": 2}}
    problem = api.call("POST", "events", body, 409)
    assert problem["code"] == "lifecycle_conflict"
    assert Event.objects.get().typeid in problem["detail"]
    assert isinstance(lifecycle(tenant, ENDED), Published)
    assert Event.objects.count() == 2


def test_of_many_at_once_one_takes_the_place(tenant, endpoint):
    found, start = [], threading.Barrier(8)

    def send(event_type):
        start.wait()
        try:
            found.append(lifecycle(tenant, event_type))
        finally:
            connection.close()

    threads = [threading.Thread(target=send, args=[COMPLETED if n % 2 else FAILED]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    event = Event.objects.get()
    assert sum(one == Published(event.pk) for one in found) == 1
    assert sum(one == Published(event.pk, repeated=True) for one in found) == 3
    assert sum(isinstance(one, Rejected) and one.status == 409 for one in found) == 4
    assert Delivery.objects.count() == 1


def test_another_tenant_s_interactions_are_its_own(tenant, endpoint, make_endpoint):
    from endpoints.models import Tenant

    other = Tenant.objects.create(name="Other")
    make_endpoint(tenant=other, contract="betterstood")
    assert not lifecycle(tenant).repeated
    assert not lifecycle(other).repeated


@pytest.mark.parametrize("mark", [{"isTest": True}, {"mode": "MOCK"}])
def test_a_test_is_stored_and_goes_nowhere_nor_takes_a_place(tenant, endpoint, make_endpoint, pump, receiver, mark):
    make_endpoint(name="everything")
    rule(endpoint, "true")
    assert isinstance(lifecycle(tenant, **mark), Published)
    assert isinstance(automation(tenant, **mark), Published)
    assert set(Event.objects.values_list("state", flat=True)) == {"test"}
    assert not Delivery.objects.exists()
    assert not lifecycle(tenant).repeated


def test_other_contracts_get_lifecycle_events_as_they_were_posted(tenant, endpoint, make_endpoint, receiver, pump):
    make_endpoint(name="everything", url=receiver.url + "/plain")
    payload = b'{ "interactionId":"int_1", "lifecycleSequence": 1 , "n": 1.10 }'
    publish_events([NewEvent(tenant.pk, ENDED, payload)])
    pump()
    [plain] = [request.body for request in receiver.received if "/plain" in request.line]
    assert plain == payload


# --- Conditional destinations


def test_a_conditional_event_goes_to_the_endpoint_of_the_first_rule_that_matches_and_to_no_other(
    tenant, endpoint, make_endpoint, receiver, pump
):
    make_endpoint(name="everything")
    other = make_endpoint(name="other", contract="betterstood")
    Endpoint.objects.update(status="active")
    rule(other, "event.data.score > 50", position=20)
    rule(endpoint, "event.data.score > 80", position=10)
    rule(other, "true", position=1, enabled=False)
    automation(tenant, score=90)
    automation(tenant, score=60)
    automation(tenant, score=10)
    automation(tenant)
    assert list(Delivery.objects.order_by("id").values_list("endpoint", flat=True)) == [endpoint.pk, other.pk]
    assert Event.objects.count() == 4
    pump()
    event = json.loads(receiver.received[0].body)
    assert event["type"] == AUTOMATION
    assert "lifecycleSequence" not in event["data"]
    assert event["data"]["activation"]["executionId"] == "exe_1"


def test_a_rule_is_made_tried_without_sending_and_removed_by_api(tenant, endpoint, api, receiver):
    body = {"name": "hot", "event_type": AUTOMATION, "condition": "event.data.score > 80", "endpoint": endpoint.typeid}
    made = api.call("POST", "rules", body, 201)
    trial = {"type": AUTOMATION, "data": {"score": 81}}
    assert api.call("POST", "rules/dry-run", trial)["endpoint"] == endpoint.typeid
    trial["data"] = {"score": 80}
    found = api.call("POST", "rules/dry-run", trial)
    assert (found["endpoint"], found["rules"][0]["reason"]) == (None, "The condition is false.")
    trial["data"] = {}
    assert "score" in api.call("POST", "rules/dry-run", trial)["rules"][0]["reason"]
    assert not Event.objects.exists()
    assert not receiver.received
    api.call("PATCH", f"rules/{made['id']}", {"enabled": False})
    assert api.call("POST", "rules/dry-run", trial)["rules"] == []
    api.call("DELETE", f"rules/{made['id']}", status=204)
    assert api.call("GET", "rules") == {"data": []}


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"condition": "event.data.x >"}, "/condition"),
        ({"condition": "other.x == 1"}, "/condition"),
        ({"event_type": ENDED}, "/event_type"),
        ({"endpoint": "ep_01kb9zzzzzzzzzzzzzzzzzzzzz"}, "/endpoint"),
        ({"endpoint": "nonsense"}, "/endpoint"),
        ({"endpoint": "plain"}, "/endpoint"),
        ({"priority": 1}, "/priority"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_with_its_place(tenant, endpoint, make_endpoint, api, change, pointer):
    if change == {"endpoint": "plain"}:
        change = {"endpoint": make_endpoint(name="plain").typeid}
    body = {"name": "hot", "event_type": AUTOMATION, "condition": "true", "endpoint": endpoint.typeid, **change}
    assert api.call("POST", "rules", body, 400)["errors"][0]["pointer"] == pointer
    assert not Rule.objects.exists()


# --- Not active: nothing is made, nothing is filled in later


def test_creation_and_reactivation_fill_nothing_in(tenant, unverified, receiver, pump):
    rule(unverified, "true")
    lifecycle(tenant, interaction="before")
    automation(tenant)
    Endpoint.objects.update(status="active")
    pump()
    assert not Delivery.objects.exists()

    pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="x")
    lifecycle(tenant, interaction="during")
    resume_endpoints(Endpoint.objects.all(), actor=SYSTEM)
    pump()
    assert not Delivery.objects.exists()
    lifecycle(tenant, interaction="after")
    pump()
    assert [data_of(request)["interactionId"] for request in receiver.received] == ["after"]


def test_410_disables_the_endpoint_and_what_waited_is_kept_for_a_replay(tenant, endpoint, receiver, pump):
    receiver.respond = answer(500)
    lifecycle(tenant, interaction="waits")
    pump()
    waiting = Delivery.objects.get()
    receiver.respond = answer(410)
    lifecycle(tenant, interaction="gone")
    pump()
    endpoint.refresh_from_db()
    assert endpoint.status == "disabled"
    assert endpoint.status_reason.startswith("gone")
    gone = Delivery.objects.exclude(pk=waiting.pk).get()
    assert (gone.state, gone.outcome, gone.last_error) == ("dead", "dead_letter", "http_410")
    waiting.refresh_from_db()
    assert waiting.state == "held"
    with pytest.raises(NotReplayable, match="make it active first"):
        replay_delivery(delivery=waiting, actor=SYSTEM)

    resume_endpoints(Endpoint.objects.all(), actor=SYSTEM)
    receiver.respond = answer(200)
    pump()
    assert len(receiver.received) == 2, "reactivation sends nothing by itself"
    for old in (waiting, gone):
        replay_delivery(delivery=old, actor=SYSTEM)
    pump()
    assert {data_of(request)["interactionId"] for request in receiver.received[2:]} == {"waits", "gone"}


def test_what_is_kept_can_be_fetched_and_sent_in_bulk_and_has_then_ended(tenant, endpoint, receiver, pump):
    receiver.respond = answer(500)
    for interaction in ("one", "two", "three"):
        lifecycle(tenant, interaction=interaction)
    pump()
    receiver.respond = answer(410)
    lifecycle(tenant, interaction="gone")
    pump()
    mine = Api(create_api_key(key=ApiKey(tenant=tenant, endpoint=endpoint, name="receiver"), actor=SYSTEM))
    rows = mine.call("GET", "replay")["data"]
    assert [row["state"] for row in rows] == ["held", "held", "held", "dead_letter"]
    assert mine.get(f"/v1/replay/{rows[0]['event_id']}").status_code == 200

    resume_endpoints(Endpoint.objects.all(), actor=SYSTEM)
    receiver.respond = answer(200)
    job = create_replay_job(job=ReplayJob(endpoint=endpoint, states=["held"], reason="back"), actor=SYSTEM)
    assert step_replay_job(job.pk, 100) == 3
    pump()
    assert mine.call("GET", "replay")["data"][0]["state"] == "dead_letter"
    assert set(Delivery.objects.values_list("state", flat=True)) == {"discarded", "delivered", "dead"}
    for event in Event.objects.all():
        delete_payload(event=event, actor=SYSTEM)


def test_a_bulk_replay_passes_over_what_has_expired(tenant, endpoint, receiver, pump):
    for interaction in ("old", "new"):
        lifecycle(tenant, interaction=interaction)
    pump()
    old = Event.objects.order_by("id").first()
    Event.objects.filter(pk=old.pk).update(accepted_at=Now() - timedelta(days=31))
    job = create_replay_job(job=ReplayJob(endpoint=endpoint, states=["delivered"], reason="again"), actor=SYSTEM)
    assert (job.matched, step_replay_job(job.pk, 100)) == (2, 1)
    pump()
    assert data_of(receiver.received[2])["interactionId"] == "new"


# --- Replays


def test_a_replay_has_the_same_id_and_body_and_ends_with_the_window(tenant, endpoint, receiver, pump, api):
    lifecycle(tenant)
    pump()
    delivery = Delivery.objects.get()
    accepted = delivery.event.accepted_at
    assert replay_expires_at(delivery) == accepted + timedelta(days=30)
    shown = api.call("GET", f"deliveries/{delivery.typeid}")["replay_expires_at"]
    assert shown == (accepted + timedelta(days=30)).isoformat().replace("+00:00", "Z")
    replay_delivery(delivery=delivery, actor=SYSTEM)
    pump()
    first, second = receiver.received
    assert first.body == second.body

    Event.objects.update(accepted_at=Now() - timedelta(days=30) + timedelta(minutes=1))
    api.call("POST", f"deliveries/{delivery.typeid}/replay", status=202)
    Event.objects.update(accepted_at=Now() - timedelta(days=30, seconds=1))
    assert api.call("POST", f"deliveries/{delivery.typeid}/replay", status=410)["code"] == "replay_expired"


def test_a_replay_ends_earlier_when_the_data_is_deleted(tenant, endpoint, receiver, pump, api):
    lifecycle(tenant)
    pump()
    assert api.call("GET", "events")["data"][0]["payload_deleted_at"] is None
    delete_payload(event=Event.objects.get(), actor=SYSTEM)
    event = Event.objects.get()
    assert (bytes(event.payload), event.projection) == (b"", None)
    assert api.call("GET", f"events/{event.typeid}")["payload_deleted_at"]
    delivery = Delivery.objects.get()
    assert replay_expires_at(delivery) == event.payload_deleted_at
    with pytest.raises(ReplayExpired, match="deleted"):
        replay_delivery(delivery=delivery, actor=SYSTEM)


# --- Limits


def test_optional_content_is_cut_and_told_of(tenant, endpoint, receiver, pump):
    lifecycle(
        tenant, COMPLETED, summary="ü" * 5_000, tags=[f"t{n}" for n in range(150)], transcript="secret", other=1.5
    )
    pump()
    data = data_of(receiver.received[0])
    assert data["summary"] == "ü" * 4096
    assert data["tags"] == [f"t{n}" for n in range(100)]
    assert "transcript" not in data
    assert data["other"] == 1.5
    assert data["truncation"] == {"omittedFields": ["/summary", "/tags"]}


def test_the_whole_envelope_stays_within_256_kib(tenant, endpoint, receiver, pump):
    answers = [{"text": "x" * 2_500} for _ in range(100)]
    data = {"interactionId": "int_1", "lifecycleSequence": 2, "answers": answers, "unknown": ""}
    data |= {f"more{n}": "y" * 8_000 for n in range(32)}
    post(tenant, COMPLETED, data)
    pump()
    [request] = receiver.received
    assert 250_000 < len(request.body) <= 262_144
    sent = data_of(request)
    assert sent["truncation"]["omittedFields"] == ["/answers"]
    assert 0 < len(sent["answers"]) < 100
    assert sent["more31"] == "y" * 8_000


@pytest.mark.parametrize(("size", "status"), [(262_145, 202), (524_288, 202), (524_289, 413)])
def test_data_that_is_cut_anyway_may_be_twice_as_large(tenant, endpoint, api, receiver, pump, size, status):
    data = {"interactionId": "int_1", "lifecycleSequence": 2, "answers": [["x" * 5_000] for _ in range(50)], "z": ""}
    data["z"] = "z" * (size - len(json.dumps(data)))
    found = api.call("POST", "events", {"type": COMPLETED, "data": data}, status)
    pump()
    if status == 202:
        [request] = receiver.received
        assert data_of(request)["truncation"] == {"omittedFields": ["/z"]}
        assert len(data_of(request)["z"]) == 8_192
    else:
        assert found["code"] == "payload_too_large"
        assert not Event.objects.exists()
    assert api.call("POST", "events", {"type": "plain", "data": data}, 413)["code"] == "payload_too_large"


def test_nothing_is_sent_that_is_never_to_be_sent_wherever_it_is(tenant, endpoint, receiver, pump):
    never = {"transcript": "secret", "rawError": "secret", "debug": {"a": "secret"}, "raw_model_output": ["secret"]}
    lifecycle(tenant, COMPLETED, a={"b": [never, {"c": never}]}, answers=[{"q": 1, **never}], **never)
    rule(endpoint, "event.data.a.transcript == 'secret'")
    automation(tenant, a=never)
    pump()
    sent = [request.body for request in receiver.received]
    assert len(sent) == 2
    assert b"secret" not in b"".join(sent)
    completed = next(data_of(request) for request in receiver.received if b"int_1" in request.body)
    assert completed["a"] == {"b": [{}, {"c": {}}]}
    assert completed["truncation"] == {"omittedFields": []}


def test_each_value_has_a_limit_although_no_schema_knows_it(tenant, endpoint, receiver, pump):
    lifecycle(
        tenant,
        COMPLETED,
        list=list(range(500)),
        note={"text": "x" * 18_000},
        contact={"email": "e" * 400, "phone": "1" * 33, "id": "i" * 257},
        tags=["t" * 257, "u"],
    )
    pump()
    data = data_of(receiver.received[0])
    assert data["truncation"] == {
        "omittedFields": ["/list", "/note/text", "/contact/email", "/contact/phone", "/contact/id", "/tags/0"]
    }
    assert (len(data["list"]), len(data["note"]["text"]), data["contact"], data["tags"]) == (100, 8_192, {}, ["u"])


def test_an_interaction_whose_id_is_too_long_is_a_gap_and_still_one_interaction(tenant, endpoint, receiver, pump, api):
    long = "ü" * 300
    first = lifecycle(tenant, COMPLETED, interaction=long)
    event = Event.objects.get(pk=first.event_id)
    assert event.state == "projection_gap"
    assert "interactionId" in event.gap.detail
    assert lifecycle(tenant, COMPLETED, interaction=long) == Published(event.pk, repeated=True)
    assert lifecycle(tenant, FAILED, interaction=long).code == "lifecycle_conflict"
    assert not lifecycle(tenant, COMPLETED, interaction=long + "x").repeated
    assert not lifecycle(tenant, COMPLETED, interaction="a\0b").repeated
    pump()
    assert [data_of(request)["interactionId"] for request in receiver.received] == ["a\0b"]
    kind = EventType.objects.get(name=COMPLETED)
    properties = {**kind.schema["properties"], "interactionId": {"x-class": "text"}}
    EventType.objects.filter(pk=kind.pk).update(schema={**kind.schema, "properties": properties}, schema_at=Now())
    assert repair_projection_gaps() == 2
    pump()
    assert len(receiver.received) == 3


def test_a_gap_is_recorded_kept_apart_from_failures_and_repaired_when_the_limits_change(
    tenant, endpoint, make_endpoint, receiver, pump
):
    make_endpoint(name="everything", url=receiver.url + "/plain")
    late = make_endpoint(name="late", contract="betterstood")
    kind = EventType.objects.get(name=COMPLETED)
    lifecycle(tenant, COMPLETED, organizationId="o" * 300, score=1)
    assert not ProjectionGap.objects.exists(), "what is optional is left out"
    EventType.objects.filter(pk=kind.pk).update(
        schema={**kind.schema, "required": ["interactionId", "organizationId"]}, schema_at=Now()
    )
    found = lifecycle(tenant, COMPLETED, interaction="int_2", organizationId="o" * 300)
    gap = ProjectionGap.objects.get(event=found.event_id)
    assert "organizationId" in gap.detail
    assert Event.objects.get(pk=found.event_id).state == "projection_gap"
    pump()
    kept_back = Delivery.objects.filter(event=found.event_id)
    assert kept_back.get().endpoint.name == "everything"
    assert not Delivery.objects.filter(state="dead").exists()
    assert repair_projection_gaps() == 0, "nothing has changed"

    Endpoint.objects.filter(pk=late.pk).update(status="active", status_at=Now())
    EventType.objects.filter(pk=kind.pk).update(schema=kind.schema, schema_at=Now())
    assert repair_projection_gaps() == 1
    assert repair_projection_gaps() == 0
    gap.refresh_from_db()
    assert gap.repaired_at is not None
    assert Event.objects.get(pk=found.event_id).state == "accepted"
    assert set(kept_back.values_list("endpoint__name", flat=True)) == {"everything", "orders"}
    pump()
    [request] = [one for one in receiver.received if b"int_2" in one.body and "/plain" not in one.line]
    assert data_of(request)["truncation"] == {"omittedFields": ["/organizationId"]}


@pytest.mark.parametrize("event_type", [COMPLETED, AUTOMATION])
def test_a_gap_whose_payload_was_deleted_stays_one_and_stops_no_other(
    tenant, endpoint, receiver, pump, event_type, caplog
):
    rule(endpoint, "true")
    kind = EventType.objects.get(name=event_type)
    strict = {
        **kind.schema,
        "required": ["email"],
        "properties": {**kind.schema["properties"], "email": {"x-class": "email"}},
    }
    EventType.objects.filter(pk=kind.pk).update(schema=strict, schema_at=Now())
    data = {"interactionId": "i", "lifecycleSequence": 2} if event_type == COMPLETED else {}
    found = [post(tenant, event_type, {**data, "email": "e" * 400, **extra}) for extra in ({}, {"interactionId": "j"})]
    gone, left = (Event.objects.get(pk=one.event_id) for one in found)
    assert gone.state == left.state == "projection_gap"
    delete_payload(event=gone, actor=SYSTEM)
    EventType.objects.filter(pk=kind.pk).update(schema=kind.schema, schema_at=Now())
    assert repair_projection_gaps() == 1
    assert repair_projection_gaps() == 0
    pump()
    assert [json.loads(request.body)["id"] for request in receiver.received] == [left.typeid]
    assert "cannot be repaired" not in caplog.text


def test_a_gap_is_tried_again_when_its_schema_changed_although_the_clock_says_it_was_before(tenant, endpoint):
    kind = EventType.objects.get(name=COMPLETED)
    EventType.objects.filter(pk=kind.pk).update(schema={**kind.schema, "required": ["organizationId"]}, schema_at=Now())
    lifecycle(tenant, COMPLETED, organizationId="o" * 300)
    earlier = Now() - timedelta(minutes=1)
    EventType.objects.filter(pk=kind.pk).update(schema=kind.schema, schema_at=earlier)
    assert repair_projection_gaps() == 1


# --- Credits


def test_a_conditional_delivery_costs_one_credit_when_it_first_arrives_and_nothing_else_costs(
    tenant, endpoint, receiver, pump, api
):
    rule(endpoint, "event.data.go == true")
    receiver.respond = answer(500)
    automation(tenant, go=True)
    automation(tenant, go=False)
    lifecycle(tenant)
    api.call("POST", f"endpoints/{endpoint.typeid}/test", {"type": FAILED}, 202)
    pump()
    assert not Credit.objects.exists()
    receiver.respond = answer(200)
    Delivery.objects.filter(state="pending").update(due_at=Now())
    pump()
    delivery = Delivery.objects.get(event__type=AUTOMATION)
    [credit] = Credit.objects.all()
    assert (credit.tenant, credit.amount, credit.delivery_id) == (tenant, 1, delivery.pk)
    for old in Delivery.objects.filter(trigger="automatic"):
        replay_delivery(delivery=old, actor=SYSTEM)
    pump()
    assert Credit.objects.count() == 1
    assert [one["amount"] for one in api.call("GET", "credits")["data"]] == [1]


def test_a_replay_that_arrives_first_is_the_first_success(tenant, endpoint, receiver, pump):
    rule(endpoint, "true")
    receiver.respond = answer(500)
    automation(tenant)
    Delivery.objects.update(attempts_made=7)
    pump()
    dead = Delivery.objects.get()
    assert dead.outcome == "dead_letter"
    receiver.respond = answer(200)
    for _ in range(2):
        replay_delivery(delivery=dead, actor=SYSTEM)
        pump()
    assert Credit.objects.count() == 1


def test_the_ledger_is_only_added_to(tenant, endpoint, receiver, pump):
    rule(endpoint, "true")
    automation(tenant)
    pump()
    with pytest.raises(DatabaseError, match="append-only"):
        Credit.objects.update(amount=0)
    with pytest.raises(DatabaseError, match="append-only"):
        Credit.objects.all().delete()
    assert Credit.objects.get().amount == 1


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["arrives", "fails", "crashes", "is replayed"]), min_size=3, max_size=8))
def test_credits_are_charged_at_most_once_whatever_crashes_is_retried_or_replayed(tenant, endpoint, receiver, steps):
    if not Rule.objects.exists():
        rule(endpoint, "true")
    event_id = automation(tenant).event_id
    arrivals = 0

    def mine():
        return Delivery.objects.filter(event=event_id)

    def pump_once(status):
        receiver.respond = answer(status)
        mine().filter(state="pending").update(due_at=Now())
        one = Pump()
        one.run(lambda: not Delivery.objects.in_hand().filter(event=event_id).exists())

    for step in steps:
        before = len(receiver.received)
        if step == "is replayed":
            ended = mine().filter(state__in=["delivered", "dead"]).first()
            if ended:
                replay_delivery(delivery=ended, actor=SYSTEM)
            continue
        pump_once(500 if step == "fails" else 200)
        sent = len(receiver.received) - before
        if step == "crashes" and sent:
            # The receiver has it, and the pump has died before it could write that down: as if never recorded.
            with connection.cursor() as cursor:
                cursor.execute("ALTER TABLE deliveries_credit DISABLE TRIGGER append_only")
                if not arrivals:
                    cursor.execute("DELETE FROM deliveries_credit WHERE event_id = %s", [event_id])
                cursor.execute("ALTER TABLE deliveries_credit ENABLE TRIGGER append_only")
            last = mine().filter(state="delivered").order_by("-id").first()
            last.attempts.all().delete()
            Delivery.objects.filter(pk=last.pk).update(
                state="sending", claim_token=F("id"), lease_until=Now() - timedelta(minutes=1), attempts_made=0
            )
            reclaim_lost()
        elif step == "arrives":
            arrivals += sent
        assert Credit.objects.filter(event_id=event_id).count() == min(arrivals, 1)


# --- Verification


def challenge_in(request) -> str:
    match = re.fullmatch(rb'\{"challenge": "([0-9a-f]{32})"\}', request.body)
    assert match
    return match[1].decode()


def test_an_endpoint_is_active_after_a_2xx_and_the_challenge_pasted_back(tenant, unverified, receiver, pump, api):
    path = f"endpoints/{unverified.typeid}"
    assert api.call("GET", path)["status"] == "unverified"
    assert api.call("PATCH", path, {"is_active": True}, 409)["code"] == "not_verified"
    api.call("GET", f"{path}/verification", status=404)
    assert api.call("POST", f"{path}/verification", status=202)["state"] == "pending"
    pump()
    [request] = receiver.received
    challenge = challenge_in(request)
    assert request.header("content-type") == "application/json"
    verify(request.body, dict(request.headers), unverified.secret, scheme="elicitra")
    assert api.call("GET", f"{path}/verification")["state"] == "delivered"
    assert resume_endpoints(Endpoint.objects.all(), actor=SYSTEM) == 0

    wrong = api.call("POST", f"{path}/verification/confirm", {"challenge": "0" * 32}, 409)
    assert "4 tries are left" in wrong["detail"]
    done = api.call("POST", f"{path}/verification/confirm", {"challenge": f' "{challenge}"\n'})
    assert (done["status"], done["is_active"]) == ("active", True)
    assert done["verified_at"]
    assert "is open" in api.call("POST", f"{path}/verification/confirm", {"challenge": challenge}, 409)["detail"]
    assert api.call("POST", f"{path}/verification", status=409)["code"] == "not_to_be_verified"
    lifecycle(tenant)
    pump()
    assert len(receiver.received) == 2


def test_the_challenge_is_told_to_the_receiver_alone(tenant, unverified, receiver, pump, api, admin_client):
    api.call("POST", f"endpoints/{unverified.typeid}/verification", status=202)
    pump()
    challenge = challenge_in(receiver.received[0])
    seen = [
        api.call("GET", f"endpoints/{unverified.typeid}/verification"),
        api.call("GET", "events"),
        api.call("GET", "deliveries"),
    ]
    assert challenge not in json.dumps(seen)
    api.call("GET", f"events/{Event.objects.get().typeid}", status=404)
    for page in (
        f"/admin/deliveries/event/{Event.objects.get().pk}/change/",
        f"/admin/deliveries/delivery/{Delivery.objects.get().pk}/change/",
        f"/admin/endpoints/endpoint/{unverified.pk}/change/",
    ):
        response = admin_client.get(page)
        assert response.status_code == 200
        assert challenge not in response.text


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (answer(302, "Location: /"), "http_302"),
        (answer(500), "http_500"),
        (b"", "closed_before_response"),
        (None, "has not answered yet"),
    ],
)
def test_without_a_2xx_the_right_challenge_is_not_enough(tenant, unverified, receiver, pump, reply, words):
    verification = start_verification(endpoint=unverified, actor=SYSTEM)
    if reply is not None:
        receiver.respond = reply
        pump()
        pump()
        assert len(receiver.received) == 1, "a challenge is not tried again"
    with pytest.raises(NotDone, match=words):
        confirm_verification(endpoint=unverified, answer=verification.challenge, actor=SYSTEM)
    unverified.refresh_from_db()
    assert unverified.status == "unverified"


def test_five_wrong_answers_or_a_day_or_a_newer_one_void_a_challenge(tenant, unverified, receiver, pump):
    first = start_verification(endpoint=unverified, actor=SYSTEM)
    second = start_verification(endpoint=unverified, actor=SYSTEM)
    pump()
    for left in ("4 tries are", "3 tries are", "2 tries are", "1 try is"):
        with pytest.raises(NotDone, match=f"{left} left"):
            confirm_verification(endpoint=unverified, answer=first.challenge, actor=SYSTEM)
    with pytest.raises(NotDone, match="Wrong too often"):
        confirm_verification(endpoint=unverified, answer="x", actor=SYSTEM)
    with pytest.raises(NotDone, match="No challenge is open"):
        confirm_verification(endpoint=unverified, answer=second.challenge, actor=SYSTEM)

    third = start_verification(endpoint=unverified, actor=SYSTEM)
    pump()
    Verification.objects.filter(pk=third.pk).update(expires_at=Now())
    with pytest.raises(NotDone, match="expired after 24 hours"):
        confirm_verification(endpoint=unverified, answer=third.challenge, actor=SYSTEM)
    unverified.refresh_from_db()
    assert unverified.status == "unverified"


def test_the_url_stays(tenant, endpoint, api):
    problem = api.call("PATCH", f"endpoints/{endpoint.typeid}", {"url": endpoint.url + "2"}, 400)
    assert "make a new endpoint" in problem["detail"]


@pytest.mark.parametrize("url", ["http://hooks.example.com/", "https://hooks.example.com:8443/"])
def test_the_url_is_https_on_port_443(tenant, api, monkeypatch, url):
    monkeypatch.setitem(CONTRACTS, "betterstood", BETTERSTOOD)
    body = {"name": "a", "url": url, "contract": "betterstood"}
    assert "https URL on port 443" in api.call("POST", "endpoints", body, 400)["detail"]
    body["url"] = "https://hooks.example.com/"
    assert api.call("POST", "endpoints", body, 201)["status"] == "unverified"


def test_a_test_sends_fixtures_of_the_three_types_in_their_envelope(tenant, endpoint, receiver, pump, api):
    for event_type in (ENDED, COMPLETED, FAILED):
        api.call("POST", f"endpoints/{endpoint.typeid}/test", {"type": event_type}, 202)
    api.call("POST", f"endpoints/{endpoint.typeid}/test", {"type": AUTOMATION}, 409)
    pump()
    events = {event["type"]: event for event in (json.loads(request.body) for request in receiver.received)}
    assert {kind: event["data"]["lifecycleSequence"] for kind, event in events.items()} == {
        ENDED: 1,
        COMPLETED: 2,
        FAILED: 2,
    }
    assert all(event["data"]["truncation"] == {"omittedFields": []} for event in events.values())
    assert set(Delivery.objects.values_list("trigger", flat=True)) == {"test"}
    assert not Reservation.objects.exists()


def test_an_unverified_endpoint_gets_no_test(tenant, unverified, api):
    assert "not verified" in api.call("POST", f"endpoints/{unverified.typeid}/test", status=409)["detail"]
