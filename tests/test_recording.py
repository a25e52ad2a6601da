"""Recording results: one that the database refuses neither stops the others nor is lost."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import OperationalError
from django.db.models import F
from django.db.models.functions import Now

from deliveries.models import Attempt, Delivery
from deliveries.publishing import NewEvent, publish_events
from deliveries.querysets import Result
from deliveries.results import reclaim_lost, record_results
from endpoints.models import Endpoint
from webhookhub.ids import uuid7


@pytest.fixture
def claimed(tenant, endpoint):
    """Three deliveries as a pump has claimed them."""
    publish_events([NewEvent(tenant.pk, "a", b"{}") for _ in range(3)])
    lease = Now() + timedelta(minutes=1)
    Delivery.objects.update(state="sending", claim_token=F("id"), claimed_at=Now(), lease_until=lease)
    return list(Delivery.objects.order_by("id"))


def result(delivery, **fields):
    return Result(
        **{
            "delivery_id": delivery.pk,
            "endpoint_id": delivery.endpoint_id,
            "token": delivery.claim_token,
            "state": "delivered",
            "id": uuid7(),
            "number": 1,
            "started_at": datetime.now(UTC),
            "status": 200,
            "response_headers": ["Server: x"],
            "response_body": b"ok",
            **fields,
        }
    )


@pytest.mark.django_db(transaction=True)
def test_a_result_that_the_database_refuses_is_written_without_the_exchange(claimed):
    record_results([result(claimed[0]), result(claimed[1], address="fe80::1%eth0"), result(claimed[2])])

    assert set(Delivery.objects.values_list("state", "last_status", "claim_token")) == {("delivered", 200, None)}
    good, bad, _ = (Attempt.objects.get(delivery=delivery) for delivery in claimed)
    assert (bytes(good.response_body), good.response_headers) == (b"ok", ["Server: x"])
    assert (bad.response_body, bad.response_headers, bad.status) == (None, [], 200)
    assert "refused" in bad.detail


@pytest.mark.django_db
def test_so_it_is_inside_a_transaction(claimed):
    record_results([result(claimed[0]), result(claimed[1], address="nonsense")])
    assert Delivery.objects.filter(state="delivered").count() == 2


@pytest.mark.django_db
def test_a_database_that_is_away_is_the_caller_s_to_wait_for(claimed, monkeypatch):
    def fail(*args):
        raise OperationalError("gone")

    monkeypatch.setattr("deliveries.querysets.DeliveryQuerySet.record", fail)
    with pytest.raises(OperationalError):
        record_results([result(claimed[0])])


@pytest.mark.django_db
def test_a_claim_that_no_longer_stands_writes_nothing(claimed):
    record_results([result(claimed[0], token=uuid7()), result(claimed[1])])
    assert Delivery.objects.get(pk=claimed[0].pk).state == "sending"
    assert list(Attempt.objects.values_list("delivery", flat=True)) == [claimed[1].pk]


@pytest.mark.django_db
def test_a_lost_delivery_is_taken_back_once_and_due_at_once(claimed):
    Delivery.objects.filter(pk=claimed[0].pk).update(lease_until=Now(), attempts_made=2)
    Delivery.objects.filter(pk=claimed[0].pk).update(lease_until=F("lease_until") - timedelta(1))
    assert reclaim_lost() == 1
    assert reclaim_lost() == 0
    delivery = Delivery.objects.get(pk=claimed[0].pk)
    assert (delivery.state, delivery.attempts_made, delivery.last_error) == ("pending", 3, "interrupted")
    assert Delivery.objects.in_hand().filter(pk=delivery.pk).exists()
    attempt = Attempt.objects.get(delivery=delivery)
    assert (attempt.number, attempt.error, attempt.started_at) == (3, "interrupted", delivery.claimed_at)


@pytest.mark.django_db
def test_a_delivery_that_was_interrupted_at_its_last_attempt_is_dead(claimed):
    yesterday = Now() - timedelta(1)
    Delivery.objects.filter(pk=claimed[0].pk).update(lease_until=yesterday, attempts_made=9)
    reclaim_lost()
    assert Delivery.objects.get(pk=claimed[0].pk).state == "dead"


@pytest.mark.django_db
def test_results_for_an_endpoint_that_was_paused_meanwhile_are_held(claimed):
    Endpoint.objects.update(status="paused")
    record_results([result(claimed[0], state="pending", status=500, wait=5.0), result(claimed[1])])
    assert Delivery.objects.get(pk=claimed[0].pk).state == "held"
    assert Delivery.objects.get(pk=claimed[1].pk).state == "delivered"


@pytest.mark.django_db(transaction=True)
def test_a_row_that_contradicts_itself_stops_no_other(claimed):
    """Attempt 1 of a delivery that says it has made none: somebody has changed it by hand."""
    record_results([result(claimed[0])])
    Delivery.objects.filter(pk=claimed[0].pk).update(
        state="sending", claim_token=uuid7(), lease_until=Now() - timedelta(1), attempts_made=0
    )
    Delivery.objects.filter(pk=claimed[1].pk).update(lease_until=Now() - timedelta(1))
    assert reclaim_lost() == 2
    assert Delivery.objects.get(pk=claimed[0].pk).state == "dead"
    assert Delivery.objects.get(pk=claimed[1].pk).state == "pending"
    assert Attempt.objects.filter(delivery=claimed[0]).count() == 1
