"""A delivery keeps to the contract it started with, whatever becomes of the one of that name."""

import dataclasses

import pytest

from deliveries.models import Attempt, Delivery
from deliveries.publishing import NewEvent, publish_events
from deliveries.replays import replay_delivery
from endpoints import contracts
from endpoints.contract_file import SIGNATURES, read_contracts
from endpoints.contracts import BETTERSTOOD, BRIEF, KINGMINOS, STANDARD, Step, definition, from_definition, key_of
from endpoints.models import ContractVersion, Endpoint
from endpoints.services import SYSTEM, contract_of
from tests.receiver import answer
from webhookhub import receiver as kit

QUICK = dataclasses.replace(STANDARD, steps=(Step(1_000_000, 1_000_000),))


@pytest.fixture
def redefine(monkeypatch):
    """Gives the name `standard` to another contract, as a new release or a changed file does."""
    return lambda contract: monkeypatch.setitem(contracts.CONTRACTS, "standard", contract)


@pytest.mark.parametrize("contract", [STANDARD, BRIEF, BETTERSTOOD, KINGMINOS], ids=lambda contract: contract.name)
def test_a_definition_gives_the_contract_back(contract):
    assert from_definition(definition(contract)) == contract
    assert key_of(contract).startswith(f"{contract.name}@")


def test_contracts_that_differ_have_keys_that_differ():
    assert len({key_of(one) for one in (STANDARD, QUICK, dataclasses.replace(STANDARD, deadline=14.0))}) == 3


@pytest.mark.django_db(transaction=True)
def test_a_delivery_under_way_keeps_its_schedule_and_new_ones_have_the_new(tenant, endpoint, receiver, pump, redefine):
    receiver.respond = answer(500)
    publish_events([NewEvent(tenant.pk, "a", b"{}")])
    redefine(QUICK)
    publish_events([NewEvent(tenant.pk, "a", b"{}")])
    pump()

    old, new = Delivery.objects.order_by("id")
    waits = [(one.due_at - one.attempts.get().started_at).total_seconds() for one in (old, new)]
    assert 4 < waits[0] < 7
    assert 1_000 < waits[1] < 1_002
    assert (old.contract, new.contract) == (key_of(STANDARD), key_of(QUICK))
    assert old.first_attempt_at == old.attempts.get().started_at


@pytest.mark.django_db(transaction=True)
def test_a_replay_follows_the_contract_of_today(tenant, endpoint, redefine):
    publish_events([NewEvent(tenant.pk, "a", b"{}")])
    Delivery.objects.update(state="dead")
    redefine(QUICK)
    assert replay_delivery(delivery=Delivery.objects.get(), actor=SYSTEM).contract == key_of(QUICK)


@pytest.mark.django_db(transaction=True)
def test_what_follows_a_contract_that_nobody_knows_is_held(tenant, endpoint, receiver, pump):
    Endpoint.objects.update(contract="forgotten")
    publish_events([NewEvent(tenant.pk, "a", b"{}")])
    pump(seconds=2)
    assert Delivery.objects.get().state == "held"
    assert not receiver.received
    assert not Attempt.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_definition_that_this_release_cannot_read_is_nobody_s(tenant):
    ContractVersion.objects.create(key="standard@000000000000", definition='{"name": 5}')
    assert contract_of("standard@000000000000") is None
    assert contract_of("standard@111111111111") is None
    assert contract_of("standard") is STANDARD
    assert contract_of(key_of(STANDARD)) is STANDARD


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("scheme", SIGNATURES)
def test_a_contract_of_ones_own_signs_by_the_scheme_it_names(
    tenant, make_endpoint, receiver, pump, monkeypatch, scheme
):
    own = read_contracts(f'[own]\nsignature = "{scheme}"', contracts.CONTRACTS)
    monkeypatch.setitem(contracts.CONTRACTS, "own", own["own"])
    endpoint = make_endpoint(contract="own")
    publish_events([NewEvent(tenant.pk, "a", b'{"amount":1.10}')])
    pump()
    [request] = receiver.received
    assert kit.verify(request.body, dict(request.headers), [endpoint.secret], scheme=scheme)
    with pytest.raises(kit.VerificationError):
        kit.verify(request.body + b" ", dict(request.headers), [endpoint.secret], scheme=scheme)
