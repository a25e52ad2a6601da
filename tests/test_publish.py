"""Publishing: an event and its deliveries are stored together or not at all, and one bad event harms no other."""

import psycopg
import pytest
from django.db import OperationalError, transaction

from deliveries import services
from deliveries.models import Delivery, Event
from deliveries.publishing import KeyReused, NewEvent, Published, Refused, publish_events
from deliveries.querysets import EventQuerySet
from deliveries.services import pause_endpoints
from endpoints.models import Endpoint, Tenant
from endpoints.services import SYSTEM


@pytest.fixture
def wakes(monkeypatch):
    """Counts the wake-ups."""
    sent: list[int] = []
    monkeypatch.setattr(services, "announce", lambda: sent.append(1))
    return sent


def event(tenant, type="invoice.paid", **fields):
    return NewEvent(tenant.pk, type, fields.pop("payload", b'{"a":1}'), **fields)


@pytest.mark.django_db(transaction=True)
def test_inside_a_transaction_the_wake_up_waits_for_the_commit(tenant, endpoint, wakes):
    with transaction.atomic():
        publish_events([event(tenant)])
        assert not wakes
    assert wakes


@pytest.mark.django_db(transaction=True)
def test_an_event_that_the_database_refuses_is_refused_alone(tenant, endpoint):
    nobody = NewEvent(endpoint.pk, "invoice.paid", b"{}")  # no tenant has this id
    results = publish_events([event(tenant), nobody, event(tenant)])
    assert [type(result) for result in results] == [Published, Refused, Published]
    assert results[1] == Refused(transient=False)
    assert Event.objects.count() == Delivery.objects.count() == 2


def test_so_is_one_inside_a_transaction_of_the_caller(tenant, endpoint, db):
    results = publish_events([event(tenant), event(tenant, "x" * 300), event(tenant)])
    assert [type(result) for result in results] == [Published, Refused, Published]
    assert Event.objects.count() == 2


def test_a_database_that_is_away_refuses_for_the_moment(tenant, monkeypatch):
    def fail(*args):
        raise OperationalError("gone")

    monkeypatch.setattr("deliveries.querysets.EventQuerySet.store", fail)
    assert publish_events([event(tenant), event(tenant)]) == [Refused(transient=True)] * 2


@pytest.mark.django_db(transaction=True)
def test_a_deadlock_over_keys_refuses_nobody(tenant, monkeypatch):
    store = EventQuerySet.store

    def meet(events, columns):
        if not asked_for:
            asked_for.append(columns)
            raise OperationalError("deadlock detected") from psycopg.errors.DeadlockDetected()
        return store(events, columns)

    asked_for = []
    monkeypatch.setattr(EventQuerySet, "store", meet)
    results = publish_events([event(tenant, caller_key="k"), event(tenant, caller_key="l")])
    assert [type(result) for result in results] == [Published, Published]


def test_redis_being_away_loses_nothing(tenant, endpoint, settings, django_capture_on_commit_callbacks):
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    with django_capture_on_commit_callbacks(execute=True):
        [result] = publish_events([event(tenant)])
    assert Delivery.objects.get(event=result.event_id).state == "pending"


@pytest.mark.parametrize(
    ("asked", "type", "wanted"),
    [
        (["*"], "invoice.paid", True),
        (["invoice.paid"], "invoice.paid", True),
        (["invoice.paid"], "invoice.paid.late", False),
        (["invoice.*"], "invoice.paid", True),
        (["invoice.*"], "invoice.paid.late", True),
        (["invoice.*"], "invoice", False),
        (["invoice.*"], "invoices.paid", False),
        (["invoice.paid.*"], "invoice.paid", False),
        (["Invoice.paid"], "invoice.paid", False),
        (["user.created", "invoice.*"], "invoice.paid", True),
        (["user.created"], "invoice.paid", False),
    ],
)
def test_an_endpoint_gets_the_types_it_asks_for(tenant, make_endpoint, asked, type, wanted):
    make_endpoint(event_types=asked)
    publish_events([event(tenant, type)])
    assert Delivery.objects.count() == wanted


def test_each_endpoint_of_the_tenant_and_of_no_other_gets_its_own_delivery(tenant, make_endpoint):
    first, second = make_endpoint(name="one"), make_endpoint(name="two")
    make_endpoint(tenant=Tenant.objects.create(name="Other"))
    publish_events([event(tenant)])
    deliveries = Delivery.objects.all()
    assert {delivery.endpoint_id for delivery in deliveries} == {first.pk, second.pk}
    assert len({delivery.pk for delivery in deliveries}) == 2


def test_what_comes_for_a_paused_endpoint_is_held(tenant, endpoint):
    pause_endpoints(Endpoint.objects.all(), actor=SYSTEM, reason="maintenance")
    publish_events([event(tenant)])
    assert Delivery.objects.get().state == "held"


def test_an_event_without_an_endpoint_is_kept(tenant):
    [result] = publish_events([event(tenant)])
    assert Event.objects.get(pk=result.event_id).deliveries.count() == 0


def test_an_event_keeps_what_it_was_posted_with(tenant):
    publish_events([event(tenant, payload=b'{ "a" : 1.10 }', caller_key="order-42", metadata={"source": "shop"})])
    stored = Event.objects.get()
    assert bytes(stored.payload) == b'{ "a" : 1.10 }'
    assert (stored.caller_key, stored.metadata, stored.type) == ("order-42", {"source": "shop"}, "invoice.paid")
    assert stored.key.version == 4


def test_the_same_key_and_content_is_the_same_event(tenant, endpoint):
    first, other = publish_events([event(tenant, caller_key="k"), event(tenant, caller_key="k")])
    [again] = publish_events([event(tenant, caller_key="k")])
    assert not first.repeated
    assert other == again == Published(first.event_id, repeated=True)
    assert Event.objects.count() == Delivery.objects.count() == 1


def test_the_same_key_with_other_content_is_refused(tenant):
    [first] = publish_events([event(tenant, caller_key="k")])
    assert publish_events([event(tenant, caller_key="k", payload=b'{"a":2}')]) == [KeyReused(first.event_id)]
    assert publish_events([event(tenant, "invoice.void", caller_key="k")]) == [KeyReused(first.event_id)]
    assert publish_events([event(tenant, caller_key="k", metadata={"a": "b"})]) == [KeyReused(first.event_id)]


def test_another_tenant_has_keys_of_its_own(tenant):
    other = Tenant.objects.create(name="Other")
    results = publish_events([event(tenant, caller_key="k"), event(other, caller_key="k")])
    assert [result.repeated for result in results] == [False, False]
