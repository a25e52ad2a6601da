"""The replay resource: what a receiver can still get of what it missed. Its key is bound to its endpoint."""

import time
from typing import Any

from django.db.models import Exists, OuterRef, Q
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from deliveries.api.access import KeyView, not_found
from deliveries.api.deliveries import DeliverySerializer, replay
from deliveries.api.events import plain_event_id
from deliveries.messages import Message, compose
from deliveries.models import Delivery, Event
from deliveries.replays import has_expired, replay_expires_at, without_expired
from deliveries.services import is_kept
from endpoints.contracts import Contract
from endpoints.models import Endpoint, EndpointSecret
from endpoints.services import contract_of, signing_keys
from webhookhub.api import IdField, Problem, page_of, read_query
from webhookhub.ids import parse_typeid


class MissedSerializer(DeliverySerializer):
    """An event that did not arrive."""

    event_id = serializers.SerializerMethodField()
    type = serializers.CharField(source="event.type")
    idempotency_key = serializers.CharField(source="event.key")
    state = serializers.SerializerMethodField()

    class Meta:
        model = Delivery
        fields = [
            "event_id",
            "type",
            "idempotency_key",
            "state",
            "last_error",
            "attempts_made",
            "finished_at",
            "replay_expires_at",
        ]

    def get_state(self, delivery: Delivery) -> str:
        """Its contract's word for how it ended."""
        return delivery.outcome or delivery.state

    def get_event_id(self, delivery: Delivery) -> str:
        """The event's id, as the receiver knows it."""
        return IdField(_contract(delivery).event_prefix).to_representation(delivery.event_id)


class ReplaysView(KeyView):
    """`/v1/replay`."""

    of_endpoint = True

    def get(self, request: Request) -> Response:
        """Events that this receiver has not got and can still have, by event id and time, newest last."""
        query = read_query(request.query_params, [])
        assert self.key.endpoint
        rows = without_expired(_missed(self.key.endpoint))
        page = page_of(rows, query, show=lambda one: MissedSerializer(one).data, key="event_id", newest_first=False)
        return Response(page)


class ReplayedView(KeyView):
    """`/v1/replay/<event id>`."""

    of_endpoint = True

    def get(self, request: Request, event_id: str) -> HttpResponse:
        """The event as it would be delivered now: its body to the byte, and its headers, freshly signed."""
        delivery = self._find(event_id)
        if has_expired(delivery):
            expires = replay_expires_at(delivery)
            detail = f"This event could be had until {expires:%Y-%m-%d %H:%M:%S} UTC, no longer"
            raise Problem(410, "replay_expired", detail)
        contract, event = _contract(delivery), delivery.event
        sealed = EndpointSecret.objects.valid().filter(endpoint=delivery.endpoint_id).order_by("-id")
        keys = signing_keys([bytes(one.sealed) for one in sealed], contract.signature)
        if not keys:
            detail = "The endpoint has no signing secret that can be read, and nothing is handed over unsigned"
            raise Problem(503, "webhook_secret_unavailable", detail)
        message = Message.of(event, event_id=event.pk, delivery_id=delivery.pk, attempt=delivery.attempts_made + 1)
        headers, body = compose(contract, message, keys, int(time.time()))
        return HttpResponse(body, headers=dict(line.split(": ", 1) for line in headers))

    def post(self, request: Request, event_id: str) -> Response:
        """Has the hub send it again."""
        new = replay(self._find(event_id), actor=self.actor, reason="asked for by the receiver")
        return Response(DeliverySerializer(new).data, status=202)

    def _find(self, event_id: str) -> Delivery:
        """The last delivery of an event to this endpoint that has ended without arriving. Raises Problem 404, 409."""
        try:
            key = parse_typeid(Event.prefix, plain_event_id(event_id))
        except ValueError:
            raise not_found(Event.prefix) from None
        mine = Delivery.objects.filter(endpoint=self.key.endpoint_id, event=key).exclude(event__state="control")
        latest = mine.select_related("event", "endpoint__tenant").order_by("-id").first()
        if latest is None:
            raise not_found(Event.prefix)
        under_way = (Delivery.State.PENDING, Delivery.State.SENDING, Delivery.State.HELD)
        if latest.state in under_way and not is_kept(latest):
            raise Problem(409, "under_way", "This event is still on its way to you; wait until it has ended")
        if mine.filter(state=Delivery.State.DELIVERED).exists():
            raise Problem(404, "delivered", "This event has arrived; there is nothing of it to reconcile")
        return latest


def _contract(delivery: Delivery) -> Contract:
    contract = contract_of(delivery.contract)
    if contract is None:
        raise Problem(503, "contract_unknown", "The contract of this delivery is not known to this hub")
    return contract


def _missed(endpoint: Endpoint) -> Any:
    """The last delivery of each event to an endpoint, of those that have ended without arriving or are kept."""
    same = Delivery.objects.filter(event=OuterRef("event"), endpoint=OuterRef("endpoint"))
    rows = Delivery.objects.filter(
        ~Exists(same.filter(Q(pk__gt=OuterRef("pk")) | Q(state=Delivery.State.DELIVERED))),
        endpoint=endpoint,
        state__in=[Delivery.State.DEAD, *([Delivery.State.HELD] if endpoint.when_inactive == "skip" else [])],
        event__payload_deleted_at=None,
    ).exclude(event__state=Event.State.CONTROL)
    return rows.select_related("event", "endpoint").defer("event__payload", "event__projection")
