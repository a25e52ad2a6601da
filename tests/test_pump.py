"""The way of an event from the database to the receiver and back, with a real receiver on loopback."""

import pytest
from standardwebhooks import Webhook

from deliveries.models import Delivery
from deliveries.services import NewEvent, publish_events

pytestmark = pytest.mark.django_db(transaction=True)


def test_an_event_arrives_signed_byte_for_byte(tenant, endpoint, receiver, pump):
    payload = b'{ "amount": 1.10, "name": "Zo\xc3\xab",  "n": 12345678901234567890123 }'
    [published] = publish_events([NewEvent(tenant.pk, "invoice.paid", payload)])

    pump()

    [request] = receiver.received
    assert request.body == payload
    Webhook(endpoint.secret).verify(request.body, dict(request.headers))
    delivery = Delivery.objects.get(event=published.event_id)
    assert (delivery.state, delivery.attempts_made, delivery.last_status) == ("delivered", 1, 200)
