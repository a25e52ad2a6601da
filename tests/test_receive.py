"""`manage.py receive`: what it prints, and how it misbehaves when it is told to."""

import argparse
import dataclasses
import threading
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.db.models.functions import Now

from deliveries.management.commands import receive as receive_command
from deliveries.management.commands.receive import Receiver
from deliveries.models import Attempt, Delivery
from deliveries.publishing import NewEvent, publish_events
from deliveries.replays import replay_delivery
from endpoints import contracts
from endpoints.contract_file import read_contracts
from endpoints.models import Endpoint, EndpointSecret
from endpoints.services import SYSTEM, create_endpoint, rotate_secret, verifying_secrets
from endpoints.signing import SCHEMES, generate_ed25519_secret

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def receive(tenant, make_endpoint, pump, monkeypatch):
    """Sends one event to a receiver with some switches, under a short deadline; returns what it printed."""
    short = dataclasses.replace(contracts.STANDARD, deadline=0.5)
    monkeypatch.setitem(contracts.CONTRACTS, "standard", short)
    servers = []

    def run(rotate=False, copies=1, contract="standard", **switches):
        defaults = {"port": 0, "secret": None, "endpoint": None, "status": 200, "header": [], "wait": 0}
        defaults |= {"scheme": "standard-webhooks", "drip": None, "hang": False, "close": False, "quiet": False}
        printed: list[str] = []
        server = Receiver(argparse.Namespace(**{**defaults, **switches}), printed.append)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = make_endpoint(url=f"http://127.0.0.1:{server.server_port}/", contract=contract)
        if rotate:
            rotate_secret(endpoint=endpoint, actor=SYSTEM, overlap=timedelta())
        publish_events([NewEvent(tenant.pk, "a", b'{"amount":19.90}')])
        pump()
        for _ in range(copies - 1):
            if not Delivery.objects.filter(state="pending").update(due_at=Now()):
                replay_delivery(delivery=Delivery.objects.latest("id"), actor=SYSTEM)
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


def test_a_copy_is_printed_as_repeated_and_answered_the_same(receive):
    lines = receive(copies=3, status=201)
    assert [line.split()[0] for line in lines] == ["verified", "repeated", "repeated"]
    assert [attempt.status for attempt in Attempt.objects.all()] == [201] * 3


@pytest.mark.parametrize("status", [500, 429])
def test_a_status_after_which_the_sender_tries_again_is_answered_to_every_copy(receive, status):
    lines = receive(copies=3, status=status)
    assert [line.split()[0] for line in lines] == ["verified"] * 3
    assert [attempt.status for attempt in Attempt.objects.all()] == [status] * 3


@pytest.mark.parametrize(
    ("switches", "error"), [({"close": True}, "closed_before_response"), ({"hang": True}, "total_timeout")]
)
def test_it_misbehaves_on_copies_too_although_it_knows_them(receive, switches, error):
    lines = receive(copies=2, **switches)
    assert [line.split()[0] for line in lines] == ["verified", "repeated"]
    assert [attempt.error for attempt in Attempt.objects.all()] == [error] * 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_that_a_contract_can_name_is_verified(receive, monkeypatch, scheme):
    own = dataclasses.replace(contracts.STANDARD, name="own", signature=scheme)
    monkeypatch.setitem(contracts.CONTRACTS, "own", own)
    [line] = receive(contract="own", rotate=True)
    assert line.startswith("verified evt_")


def test_an_endpoint_that_cannot_be_verified_is_said_so(receive, monkeypatch):
    own = dataclasses.replace(contracts.STANDARD, name="own")
    monkeypatch.setitem(contracts.CONTRACTS, "own", own)
    with monkeypatch.context() as here:
        here.setattr(receive_command, "CONTRACTS", {})
        lines = receive(contract="own")
    assert "follows own, a contract that is not known here" in lines[0]
    assert lines[1].startswith("NOT VERIFIED evt_")
    EndpointSecret.objects.update(sealed=b"nonsense")
    lines = receive(endpoint=Endpoint.objects.get().typeid)
    assert "has a secret that cannot be used" in lines[0]
    assert lines[1].startswith("NOT VERIFIED")


def test_a_secret_given_by_hand_is_of_the_scheme_given_with_it(receive, monkeypatch):
    own = read_contracts('[own]\nsignature = "stripe-like"', contracts.CONTRACTS)["own"]
    monkeypatch.setitem(contracts.CONTRACTS, "own", own)
    [line] = receive(contract="own", secret=["not the one"], scheme="stripe-like")
    assert line.startswith("NOT VERIFIED evt_")


def test_of_a_pair_the_receiver_verifies_with_the_public_half(tenant):
    endpoint = Endpoint(tenant=tenant, name="pair", url="http://127.0.0.1:9999/")
    create_endpoint(endpoint=endpoint, actor=SYSTEM, secret=generate_ed25519_secret())
    assert [secret[:5] for secret in verifying_secrets(endpoint)] == ["whpk_"]


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
