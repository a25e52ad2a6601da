"""The running product under what happens to it: killed workers, an emptied Valkey, a stop under load."""

import json
import signal
import socket
from collections import Counter

import pytest
import redis
import requests
from django.conf import settings
from django.db.models.functions import Now
from standardwebhooks import Webhook

from deliveries.models import Attempt, Delivery
from deliveries.publishing import NewEvent, publish_events
from tests.product import Product, wait_until

pytestmark = [pytest.mark.live, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def product(db):
    """The product, nothing of it started."""
    valkey = redis.Redis.from_url(settings.REDIS_URL)
    valkey.flushall()
    valkey.close()
    running = Product()
    yield running
    running.close()


def publish(tenant, count):
    for start in range(0, count, 500):
        numbers = range(start, min(start + 500, count))
        publish_events([NewEvent(tenant.pk, "a", b'{"n":%d}' % number) for number in numbers])


def numbers_of(receiver):
    """How often each numbered payload arrived."""
    return Counter(json.loads(request.body)["n"] for request in receiver.received)


def all_delivered():
    return not Delivery.objects.exclude(state="delivered").exists()


def test_a_posted_event_arrives_signed_within_a_second(product, api_key, endpoint, receiver):
    product.start_web()
    product.start_worker()
    body = b'{"type":"invoice.paid","data":{ "amount": 19.90 }}'
    product.post(api_key, body)  # the first one waits for the worker to be up
    wait_until(lambda: len(receiver.received) == 1)
    answer = product.post(api_key, body)
    wait_until(lambda: len(receiver.received) == 2, seconds=1)

    request = receiver.received[1]
    assert answer.status_code == 202
    assert request.header("webhook-id") == answer.json()["id"]
    assert request.body == b'{ "amount": 19.90 }'
    assert Webhook(endpoint.secret).verify(request.body, dict(request.headers)) == {"amount": 19.90}


def test_after_a_killed_worker_every_event_arrives_and_repeats_carry_the_same_id(product, tenant, endpoint, receiver):
    publish(tenant, 2_000)
    worker = product.start_worker()
    wait_until(lambda: len(receiver.received) > 500)
    product.kill(worker)
    assert Delivery.objects.filter(state="sending").exists()

    Delivery.objects.filter(state="sending").update(lease_until=Now())  # as if the lease had run out by itself
    product.start_worker()
    wait_until(all_delivered)

    counts = numbers_of(receiver)
    assert counts.keys() == set(range(2_000))
    ids = {(json.loads(request.body)["n"], request.header("webhook-id")) for request in receiver.received}
    assert len(ids) == 2_000
    repeats = sum(counts.values()) - 2_000
    assert 0 < Attempt.objects.filter(error="interrupted").count() <= settings.PUMP_IN_FLIGHT
    assert repeats <= settings.PUMP_IN_FLIGHT


def test_emptying_valkey_with_accepted_events_waiting_loses_none(product, api_key, endpoint, receiver):
    product.start_web()
    with requests.Session() as session:
        for number in range(1_000):
            assert product.post(api_key, b'{"type":"a","data":{"n":%d}}' % number, session).status_code == 202
    valkey = redis.Redis.from_url(settings.REDIS_URL)
    valkey.flushall()
    product.start_worker()
    wait_until(lambda: len(receiver.received) > 100)
    valkey.flushall()  # and once more under way
    valkey.close()
    wait_until(all_delivered)
    assert numbers_of(receiver) == Counter(range(1_000))


def test_a_worker_that_is_told_to_stop_ends_what_it_sends_and_leaves_nothing_behind(
    product, tenant, endpoint, receiver
):
    receiver.respond = lambda request: [0.2, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
    publish(tenant, 1_000)
    worker = product.start_worker()
    wait_until(lambda: len(receiver.received) > 100)
    product.kill(worker, signal.SIGTERM)
    assert not Delivery.objects.filter(state="sending").exists()
    assert Delivery.objects.filter(state="delivered").count() == len(receiver.received) < 1_000


def test_callers_who_send_their_bodies_slowly_hold_up_nobody_else(product):
    product.start_web()
    stalled = [socket.create_connection(("127.0.0.1", product.port)) for _ in range(12)]
    for connection in stalled:
        connection.sendall(b"POST /admin/login/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nx")
    assert requests.get(f"{product.url}/admin/login/", timeout=5).status_code == 200
    for connection in stalled:
        connection.close()
