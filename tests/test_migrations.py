"""Upgrading and going back with rows in the database."""

import uuid

import pytest
from django.core.management import call_command
from django.db import connection

from deliveries.control import send_test
from deliveries.models import Delivery, Event
from deliveries.publishing import NewEvent, publish_events
from endpoints.models import ApiKey
from endpoints.services import SYSTEM, create_api_key


def migrate(*names: str) -> None:
    for name in names:
        call_command("migrate", *name.split("."), verbosity=0)


@pytest.mark.django_db(transaction=True)
def test_events_are_numbered_in_their_order_and_the_way_back_gives_no_key_more_rights(tenant, endpoint, receiver, pump):
    ids = [publish_events([NewEvent(tenant.pk, "a", b"{}")])[0].event_id for _ in range(5)]
    send_test(endpoint=endpoint, event_type="webhookhub.test", actor=SYSTEM)
    create_api_key(key=ApiKey(tenant=tenant, endpoint=endpoint, name="receiver"), actor=SYSTEM)
    create_api_key(key=ApiKey(tenant=tenant, name="program"), actor=SYSTEM)
    Delivery.objects.update(last_error="x" * 60)
    try:
        migrate("deliveries.0002", "endpoints.0002")
        with connection.cursor() as cursor:
            cursor.execute("SELECT name FROM endpoints_apikey")
            assert cursor.fetchall() == [("program",)]
            cursor.execute("SELECT count(*) FROM deliveries_delivery")
            assert cursor.fetchone() == (5,)
            # As a table is after rows have come and gone: not in the order of ids.
            cursor.execute("UPDATE deliveries_event SET type = 'b' WHERE id = %s", [ids[0]])
    finally:
        migrate("endpoints", "deliveries")
    found = Event.objects.order_by("sequence").values_list("id", flat=True)
    assert list(found) == ids
    [later] = publish_events([NewEvent(tenant.pk, "a", b"{}")])
    assert isinstance(later.event_id, uuid.UUID)
    assert Event.objects.latest("sequence").pk == later.event_id
    pump()
    assert set(Delivery.objects.values_list("state", flat=True)) == {"delivered"}
    numbers = sorted(int(request.header("webhook-sequence")) for request in receiver.received)
    assert numbers[:5] == [1, 2, 3, 4, 5]
    assert numbers[5] > 5
