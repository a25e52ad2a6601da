"""Events: taking one in, and the log. `POST` comes here only where the fast lane does not serve (plain WSGI, tests)."""

import uuid
from collections.abc import Callable
from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from deliveries.api.access import KeyView, find
from deliveries.api.deliveries import DeliverySerializer
from deliveries.intake import (
    answer,
    answer_batch,
    body_limit,
    check_head,
    key_of,
    read_batch,
    read_event,
    too_large,
)
from deliveries.models import Event
from deliveries.publishing import NewEvent, publish_events
from endpoints.contracts import CONTRACTS
from endpoints.models import Endpoint
from webhookhub.api import IdField, Problem, page_of, read_query
from webhookhub.ids import typeid


class EventSerializer(serializers.ModelSerializer[Event]):
    """An event, without its payload."""

    id = IdField(Event.prefix)
    receiver_ids = serializers.SerializerMethodField()
    idempotency_key = serializers.CharField(source="caller_key")
    delivered = serializers.BooleanField()

    class Meta:
        model = Event
        fields = [
            "id",
            "receiver_ids",
            "type",
            "accepted_at",
            "sequence",
            "state",
            "delivered",
            "idempotency_key",
            "metadata",
            "payload_deleted_at",
        ]

    def get_receiver_ids(self, event: Event) -> dict[str, str]:
        """The id as receivers know it, by contract, where it has another form."""
        return {name: typeid(prefix, event.pk) for name, prefix in self.context["prefixes"].items()}


def show_events(tenant_id: uuid.UUID) -> Callable[[Event], dict[str, Any]]:
    """How a tenant's events are shown: with the ids that the contracts of its endpoints give them."""
    followed = set(Endpoint.objects.filter(tenant=tenant_id).values_list("contract", flat=True).distinct())
    prefixes = {
        name: contract.event_prefix
        for name, contract in CONTRACTS.items()
        if name in followed and contract.event_prefix != Event.prefix
    }
    return lambda event: EventSerializer(event, context={"prefixes": prefixes}).data


class EventsView(APIView):
    """`/v1/events`."""

    def get(self, request: Request) -> Response:
        """The log: every event that was accepted, newest first, with or without an endpoint that asked for it.

        `type`: of one type. `delivered`: `true` for those of which a delivery has arrived, `false` for the others.
        """
        tenant_id = key_of(request.headers.get("authorization")).tenant_id
        query = read_query(request.query_params, ["type", "delivered"])
        events: Any = Event.objects.log().filter(tenant=tenant_id)
        if "type" in query:
            events = events.filter(type=query["type"])
        if "delivered" in query:
            if query["delivered"] not in ("true", "false"):
                raise Problem(400, "parameter_invalid", "delivered must be true or false")
            events = events.filter(delivered=query["delivered"] == "true")
        return Response(page_of(events, query, show=show_events(tenant_id)))

    def post(self, request: Request) -> HttpResponse:
        """Takes one event in: stored, with its deliveries, before the answer."""
        event = read_event(*_read(request))
        return answer(event, publish_events([event])[0]).to_django()


class BatchView(APIView):
    """`/v1/events/batch`."""

    def post(self, request: Request) -> HttpResponse:
        """Takes events in, each for itself."""
        items = read_batch(*_read(request))
        return answer_batch(items, publish_events([item for item in items if isinstance(item, NewEvent)])).to_django()


def _read(request: Request) -> tuple[uuid.UUID, dict[str, str], bytes]:
    """Tenant, headers and body of a post. Raises Problem."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    limit = body_limit(request.path)
    check_head(headers, limit)
    tenant_id = key_of(headers.get("authorization")).tenant_id
    body = request.body
    if len(body) > limit:
        raise too_large(limit)
    return tenant_id, headers, body


class EventView(KeyView):
    """`/v1/events/<id>`."""

    def get(self, request: Request, event_id: str) -> Response:
        """An event with its deliveries."""
        event = find(Event.objects.log().filter(tenant=self.tenant_id), Event.prefix, plain_event_id(event_id))
        deliveries = event.deliveries.select_related("endpoint").order_by("-id")[:250]
        for delivery in deliveries:
            delivery.event = event
        return Response(
            {**show_events(self.tenant_id)(event), "deliveries": DeliverySerializer(deliveries, many=True).data}
        )


def plain_event_id(text: str) -> str:
    """An event's id as this API has it; a contract may show it with a prefix of its own."""
    prefix, _, suffix = text.rpartition("_")
    own = {contract.event_prefix for contract in CONTRACTS.values()}
    return f"{Event.prefix}_{suffix}" if prefix in own else text
