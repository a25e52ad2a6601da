"""`manage.py receive`: what it prints, and how it misbehaves when it is told to."""

import argparse
import dataclasses
import threading
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command

from deliveries.management.commands.receive import Receiver
from deliveries.models import Attempt, Delivery
from deliveries.services import NewEvent, publish_events
from endpoints import contracts
from endpoints.services import SYSTEM, rotate_secret

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def receive(tenant, make_endpoint, pump, monkeypatch):
    """Sends one event to a receiver with some switches, under a short deadline; returns what it printed."""
    short = dataclasses.replace(contracts.STANDARD, deadline=0.5)
    monkeypatch.setitem(contracts.CONTRACTS, "standard", short)
    servers = []

    def run(rotate=False, **switches):
        defaults = {"port": 0, "secret": None, "endpoint": None, "status": 200, "header": [], "wait": 0}
        defaults |= {"scheme": "standard-webhooks", "drip": None, "hang": False, "close": False, "quiet": False}
        printed: list[str] = []
        server = Receiver(argparse.Namespace(**{**defaults, **switches}), printed.append)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = make_endpoint(url=f"http://127.0.0.1:{server.server_port}/")
        if rotate:
            rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=timedelta())
        publish_events([NewEvent(tenant.pk, "a", b'{"amount":19.90}')])
        pump()
        return printed

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_request_that_verifies_is_printed_and_answered(receive):
    [line] = receive()
    assert line.startswith("verified evt_")
    assert '{"amount":19.90}' in line
    assert Delivery.objects.get().state == "delivered"


def test_a_secret_that_was_rotated_is_found(receive):
    [line] = receive(rotate=True)
    assert line.startswith("verified evt_")


def test_a_request_that_does_not_verify_is_answered_401(receive):
    [line] = receive(secret=["whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="])
    assert line.startswith("NOT VERIFIED evt_")
    assert Attempt.objects.get().status == 401


def test_it_answers_the_status_and_the_headers_it_is_told(receive):
    receive(status=503, header=["Retry-After: 30"])
    attempt = Attempt.objects.get()
    assert attempt.status == 503
    assert "Retry-After: 30" in attempt.response_headers


@pytest.mark.parametrize(
    ("switches", "error"),
    [
        ({"wait": 2}, "total_timeout"),
        ({"drip": 0.1}, "total_timeout"),
        ({"hang": True}, "total_timeout"),
        ({"close": True}, "closed_before_response"),
    ],
    ids=["wait", "drip", "hang", "close"],
)
def test_it_misbehaves_as_it_is_told(receive, switches, error):
    receive(**switches)
    assert Attempt.objects.get().error == error


def test_a_busy_port_is_said_in_one_sentence(receiver):
    with pytest.raises(CommandError, match=f"cannot receive on port {receiver.port}"):
        call_command("receive", port=receiver.port)
