"""The running product: web and workers as processes."""

import socket

import pytest
import requests
from standardwebhooks import Webhook

from tests.product import wait_until

pytestmark = [pytest.mark.live, pytest.mark.django_db(transaction=True)]


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


def test_callers_who_send_their_bodies_slowly_hold_up_nobody_else(product):
    product.start_web()
    stalled = [socket.create_connection(("127.0.0.1", product.port)) for _ in range(12)]
    for connection in stalled:
        connection.sendall(b"POST /admin/login/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nx")
    assert requests.get(f"{product.url}/admin/login/", timeout=5).status_code == 200
    for connection in stalled:
        connection.close()
