"""Which of the deliveries that are due goes when: priorities, paces of endpoints, and what hangs."""

import json
import threading
import time
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test import override_settings

from deliveries.control import send_test
from deliveries.models import Attempt, Delivery, Event, ReplayJob
from deliveries.publishing import NewEvent, publish_events
from deliveries.pump import Pump
from deliveries.replays import create_replay_job, replay_delivery, step_replay_job
from deliveries.results import reclaim_lost
from deliveries.services import cancel_delivery, pause_endpoints, resume_endpoints
from endpoints.models import Endpoint, Tenant
from endpoints.services import SYSTEM
from tests.receiver import Receiver, answer
from tests.test_api import Api

pytestmark = pytest.mark.django_db(transaction=True)


def publish(tenant, count=1, event_type="a", start=0):
    items = [NewEvent(tenant.pk, event_type, json.dumps({"n": n}).encode()) for n in range(start, start + count)]
    return [one.event_id for one in publish_events(items)]


def numbers(receiver) -> list[int]:
    return [json.loads(request.body)["n"] for request in receiver.received]


def run_pumps(count: int, until, seconds: float = 20.0) -> None:
    """Runs so many pumps side by side until something is so."""
    stop, faults = threading.Event(), []

    def work() -> None:
        try:
            Pump().run(stop.is_set)
        except Exception as error:
            faults.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not faults
    assert until()


# --- Priority


@override_settings(PUMP_IN_FLIGHT=10, PUMP_ENDPOINT_IN_FLIGHT=10)
def test_first_tries_go_before_retries_and_bulk_replays_that_are_due_for_longer(tenant, make_endpoint, receiver, pump):
    endpoint = make_endpoint(event_types=["a"])
    publish(tenant, 60)
    Delivery.objects.update(priority=1, due_at=Now() - timedelta(minutes=5))
    publish(tenant, 60, start=100)
    pump()
    order = numbers(receiver)
    assert len(order) == 120
    first_tries = [place for place, number in enumerate(order) if number >= 100]
    retries = [place for place, number in enumerate(order) if number < 100]
    assert sum(first_tries) / 60 < sum(retries) / 60 - 20
    assert endpoint.status == "active"


def test_what_failed_and_what_is_replayed_in_bulk_waits_behind_first_tries(tenant, endpoint, receiver, pump):
    receiver.respond = answer(500)
    publish(tenant)
    assert Delivery.objects.get().priority == Delivery.Priority.FIRST
    pump()
    failed = Delivery.objects.get()
    assert (failed.state, failed.priority) == ("pending", Delivery.Priority.AGAIN)
    Delivery.objects.update(state="dead")
    job = create_replay_job(job=ReplayJob(endpoint=endpoint, states=["dead"], reason="x"), actor=SYSTEM)
    step_replay_job(job.pk, 10)
    assert Delivery.objects.get(trigger="replay").priority == Delivery.Priority.AGAIN
    assert replay_delivery(delivery=failed, actor=SYSTEM).priority == Delivery.Priority.FIRST


@pytest.fixture
def hanging():
    """A receiver that does not answer in time."""
    with Receiver() as one:
        one.respond = lambda _: [30.0]
        yield one


@pytest.fixture
def beside(tenant, make_endpoint, receiver, hanging):
    """Runs a pump over so many events for each of so many endpoints that hang, with some posted for `receiver` once
    they do, until these have arrived or ten seconds are over.
    """

    def run(endpoints, each, *, quick, quick_tenant=tenant, of_hanging=None):
        for number in range(endpoints):
            make_endpoint(url=hanging.url, event_types=[f"h{number}"])
        make_endpoint(tenant=quick_tenant, event_types=["quick"])
        for number in range(endpoints):
            publish(tenant, each, f"h{number}")
        if of_hanging:
            Delivery.objects.update(**of_hanging)
        began = time.monotonic()

        def is_over() -> bool:
            if time.monotonic() > began + 1.5 and not Event.objects.filter(type="quick").exists():
                publish(quick_tenant, quick, "quick")
            return len(receiver.received) == quick or time.monotonic() > began + 10

        Pump(drain_seconds=0).run(is_over)

    return run


@override_settings(PUMP_IN_FLIGHT=20, PUMP_ENDPOINT_IN_FLIGHT=20)
def test_retries_that_hang_leave_places_for_first_tries(beside, receiver, hanging):
    beside(20, 3, quick=5, of_hanging={"priority": 1, "due_at": Now() - timedelta(minutes=1)})
    assert len(receiver.received) == 5
    assert len(hanging.received) <= 10


@override_settings(PUMP_IN_FLIGHT=40, PUMP_ENDPOINT_IN_FLIGHT=40)
def test_however_many_endpoints_hang_there_are_places_left_for_others(beside, receiver, hanging):
    beside(8, 40, quick=20)
    assert len(receiver.received) == 20
    assert 8 <= len(hanging.received) < 40


@override_settings(PUMP_IN_FLIGHT=40, PUMP_ENDPOINT_IN_FLIGHT=40)
def test_however_many_endpoints_of_one_tenant_hang_others_have_places(beside, receiver, hanging):
    beside(60, 2, quick=20, quick_tenant=Tenant.objects.create(name="Other"))
    assert len(receiver.received) == 20
    assert 20 <= len(hanging.received) <= 30


# --- Rate and cap


def test_a_rate_holds_over_all_workers_and_costs_no_attempt(tenant, make_endpoint, receiver):
    make_endpoint(rate_limit=20)
    publish(tenant, 40)
    run_pumps(2, lambda: len(receiver.received) == 40 and not Delivery.objects.in_hand().exists())
    times = sorted(request.at for request in receiver.received)
    assert times[-1] - times[0] >= 39 / 20 - 0.15
    for start in range(40 - 12):
        assert times[start + 12] - times[start] > 0.4, "13 within 0.4 s are more than 20 a second"
    assert set(Delivery.objects.values_list("state", "attempts_made")) == {("delivered", 1)}


def test_a_rate_of_less_than_one_a_second_is_kept(tenant, make_endpoint, receiver):
    make_endpoint(rate_limit=0.5)
    publish(tenant, 2)
    run_pumps(1, lambda: len(receiver.received) == 2)
    first, second = (request.at for request in receiver.received)
    assert second - first >= 1.9


def test_other_endpoints_do_not_wait_for_one_that_is_limited(tenant, make_endpoint, receiver):
    make_endpoint(rate_limit=1, event_types=["slow"])
    make_endpoint(event_types=["quick"])
    publish(tenant, 50, "slow")
    publish(tenant, 50, "quick", start=1_000)
    run_pumps(1, lambda: sum(number >= 1_000 for number in numbers(receiver)) == 50, seconds=5)
    assert sum(number < 1_000 for number in numbers(receiver)) < 10


def test_a_cap_holds_over_all_workers(tenant, make_endpoint, receiver):
    make_endpoint(max_in_flight=3)
    lock, now, most = threading.Lock(), [0], [0]

    def respond(_):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return answer(200)

    receiver.respond = respond
    publish(tenant, 30)
    run_pumps(2, lambda: Delivery.objects.filter(state="delivered").count() == 30)
    assert most[0] == 3


def test_limits_are_set_and_shown_by_api(tenant, endpoint, api_key):
    api = Api(api_key)
    path = f"endpoints/{endpoint.typeid}"
    shown = api.call("GET", path)
    assert (shown["rate_limit"], shown["max_in_flight"], shown["ordered"]) == (None, None, False)
    assert shown["health"] == "healthy"
    changed = api.call("PATCH", path, {"rate_limit": 2.5, "max_in_flight": 4, "ordered": True})
    assert (changed["rate_limit"], changed["max_in_flight"], changed["ordered"]) == (2.5, 4, True)
    assert api.call("PATCH", path, {"rate_limit": None})["rate_limit"] is None
    for wrong in ({"rate_limit": 0}, {"max_in_flight": 0}, {"ordered": "perhaps"}, {"rate_limit": "fast"}):
        assert api.call("PATCH", path, wrong, 400)["errors"][0]["pointer"] == f"/{next(iter(wrong))}"
    body = {"name": "b", "url": endpoint.url, "rate_limit": 5, "ordered": True}
    assert api.call("POST", "endpoints", body, 201)["rate_limit"] == 5


# --- In order


def test_events_go_one_after_the_other_in_their_order_over_all_workers(tenant, make_endpoint, receiver):
    make_endpoint(ordered=True)
    for start in range(0, 30, 10):
        publish(tenant, 10, start=start)
    receiver.respond = lambda _: [0.005, answer(200)]
    run_pumps(2, lambda: Delivery.objects.filter(state="delivered").count() == 30)
    assert numbers(receiver) == list(range(30))


def test_one_that_fails_blocks_the_others_until_it_arrives_or_has_ended(tenant, make_endpoint, receiver, pump):
    make_endpoint(ordered=True)
    publish(tenant, 4)
    receiver.respond = lambda request: answer(500 if b'"n": 0' in request.body else 200)
    run_pumps(1, lambda: Delivery.objects.filter(attempts_made=1).count() == 1, seconds=5)
    assert numbers(receiver) == [0]
    Delivery.objects.filter(attempts_made=1).update(attempts_made=9, due_at=Now())  # its last attempt is to come
    pump()
    assert numbers(receiver) == [0, 0, 1, 2, 3]
    assert sorted(Delivery.objects.values_list("state", flat=True)) == ["dead", *["delivered"] * 3]


def test_ops_see_the_one_that_blocks_and_let_the_others_go_by_cancelling_it(
    tenant, make_endpoint, receiver, pump, api_key, admin_client
):
    endpoint = make_endpoint(ordered=True)
    publish(tenant, 3)
    receiver.respond = answer(500)
    run_pumps(1, lambda: Delivery.objects.filter(attempts_made=1).exists(), seconds=5)
    receiver.respond = answer(200)
    blocking = Delivery.objects.get(attempts_made=1)
    page = admin_client.get(f"/admin/endpoints/endpoint/{endpoint.pk}/change/").text
    assert f"{blocking.typeid}</a>: 1 attempts made, the next at" in page
    api = Api(api_key)
    assert api.call("POST", f"deliveries/{blocking.typeid}/cancel")["state"] == "discarded"
    assert api.call("POST", f"deliveries/{blocking.typeid}/cancel", status=409)["code"] == "not_waiting"
    pump()
    assert numbers(receiver) == [0, 1, 2]
    assert not cancel_delivery(delivery=blocking, actor=SYSTEM)


def test_an_endpoint_that_becomes_ordered_gets_what_waits_in_order_too(tenant, endpoint, receiver, pump, api_key):
    pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="x")
    publish(tenant, 5)
    Api(api_key).call("PATCH", f"endpoints/{endpoint.typeid}", {"ordered": True})
    publish(tenant, 5, start=5)
    resume_endpoints(Endpoint.objects.all(), actor=SYSTEM)
    pump()
    assert numbers(receiver) == list(range(10))


def test_what_was_posted_while_the_order_was_being_set_is_not_forgotten(tenant, endpoint, receiver, pump):
    publish(tenant, 3)
    Endpoint.objects.update(ordered=True)
    pump()
    assert numbers(receiver) == [0, 1, 2]


def test_a_test_goes_before_what_waits_in_line(tenant, make_endpoint, receiver, pump):
    endpoint = make_endpoint(ordered=True)
    publish(tenant, 2)
    receiver.respond = answer(500)
    run_pumps(1, lambda: Delivery.objects.filter(attempts_made=1).exists(), seconds=5)
    send_test(endpoint=endpoint, event_type="webhookhub.test", actor=SYSTEM)
    run_pumps(1, lambda: Delivery.objects.get(trigger="test").attempts_made == 1, seconds=5)
    assert Delivery.objects.filter(trigger="automatic", attempts_made=1).count() == 1


# --- Circuit


def test_an_endpoint_that_only_fails_is_probed_by_single_requests_and_gets_all_once_it_recovers(
    tenant, endpoint, receiver, pump, admin_client, api_key
):
    receiver.respond = answer(503)
    publish(tenant, 12)
    pump()
    assert len(receiver.received) == 12
    endpoint.refresh_from_db()
    assert endpoint.health == "open"
    assert Api(api_key).call("GET", f"endpoints/{endpoint.typeid}")["health"] == "open"
    shown = admin_client.get(f"/admin/endpoints/endpoint/{endpoint.pk}/change/").text
    assert "12 attempts in a row have failed" in shown

    publish(tenant, 30, start=100)
    run_pumps(1, lambda: len(receiver.received) >= 14, seconds=8)
    assert len(receiver.received) == 14, "one probe a second, then after two"
    attempted = Attempt.objects.count()
    assert attempted == 14
    assert Delivery.objects.filter(attempts_made=0).count() == 28

    receiver.respond = lambda _: [0.2, answer(200)]
    run_pumps(1, lambda: Delivery.objects.filter(state="delivered").count() >= 28, seconds=15)
    arrivals = [request.at for request in receiver.received[14:]]
    assert sum(one < arrivals[0] + 0.4 for one in arrivals) <= 4, "not all at once"
    endpoint.refresh_from_db()
    assert endpoint.failures_in_a_row == 0
    assert endpoint.health in ("healthy", "failing")


def test_nothing_waits_for_longer_than_the_contract_allows(tenant, endpoint, receiver, pump):
    receiver.respond = answer(503)
    Endpoint.objects.update(probe_at=Now() + timedelta(minutes=5), probes=9, failures_in_a_row=50)
    publish(tenant, 3)
    run_pumps(1, lambda: True)
    time.sleep(0.1)
    assert not receiver.received
    Delivery.objects.update(due_at=Now() - timedelta(seconds=61))
    run_pumps(1, lambda: len(receiver.received) == 3, seconds=5)


def test_a_contract_without_patience_has_no_circuit(tenant, make_endpoint, receiver, pump):
    make_endpoint(contract="brief")
    receiver.respond = answer(500)
    publish(tenant, 40)
    pump()
    assert len(receiver.received) == 40


def test_a_receiver_that_turns_events_down_is_not_probed(tenant, make_endpoint, receiver, pump):
    endpoint = make_endpoint(contract="kingminos")
    receiver.respond = answer(404)
    publish(tenant, 19)
    pump()
    endpoint.refresh_from_db()
    assert (endpoint.health, len(receiver.received)) == ("healthy", 19)


# --- Poison


def test_what_workers_do_not_survive_is_set_aside_after_three_attempts(tenant, endpoint, caplog):
    publish(tenant)
    for attempt in (1, 2, 3):
        Delivery.objects.update(
            state="sending",
            claim_token=Delivery.objects.get().pk,
            claimed_at=Now(),
            lease_until=Now() - timedelta(seconds=1),
        )
        assert reclaim_lost() == 1
        delivery = Delivery.objects.get()
        assert delivery.attempts_made == attempt
        assert delivery.state == ("pending" if attempt < 3 else "dead")
    assert (delivery.outcome, delivery.last_error) == ("dead", "interrupted")
    assert "Set aside" in delivery.attempts.get(number=3).detail
    assert delivery.typeid in caplog.text
