"""Deliveries: what became of an event at an endpoint, and sending it there again."""

from datetime import datetime
from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from deliveries.api.access import KeyView, find, read_body
from deliveries.models import Attempt, Delivery, Event
from deliveries.replays import NotReplayable, ReplayExpired, is_outcome_unknown, replay_delivery, replay_expires_at
from deliveries.services import cancel_delivery
from endpoints.contracts import STANDARD, last_error
from endpoints.models import Endpoint
from endpoints.services import contract_of, name_in
from webhookhub.api import IdField, Problem, page_of, read_query
from webhookhub.ids import parse_typeid


class AttemptSerializer(serializers.ModelSerializer[Attempt]):
    """One try, in its contract's words. What else the receiver answered, and where it is, the hub's staff may see."""

    id = IdField(Attempt.prefix)
    error = serializers.SerializerMethodField()
    duration_ms = serializers.SerializerMethodField()

    class Meta:
        model = Attempt
        fields = ["id", "number", "started_at", "url", "status", "error", "duration_ms"]

    def get_error(self, attempt: Attempt) -> str:
        """What went wrong, empty for a 2xx."""
        if attempt.status and 200 <= attempt.status <= 299:
            return ""
        contract = contract_of(attempt.delivery.contract) or STANDARD
        return last_error(contract, status=attempt.status, error=attempt.error).rstrip(":")

    def get_duration_ms(self, attempt: Attempt) -> float | None:
        """The whole exchange."""
        return None if attempt.total_us is None else attempt.total_us / 1000


class DeliverySerializer(serializers.ModelSerializer[Delivery]):
    """A delivery. `outcome` and `last_error` are its contract's words; the state is the hub's."""

    id = IdField(Delivery.prefix)
    event = IdField(Event.prefix, source="event_id")
    endpoint = IdField(Endpoint.prefix, source="endpoint_id")
    contract = serializers.SerializerMethodField()
    replay_of = IdField(Delivery.prefix, source="replay_of_id", allow_null=True)
    outcome_unknown = serializers.SerializerMethodField()
    next_attempt_at = serializers.SerializerMethodField()
    replay_expires_at = serializers.SerializerMethodField()

    class Meta:
        model = Delivery
        fields = [
            "id",
            "event",
            "endpoint",
            "contract",
            "state",
            "outcome",
            "outcome_unknown",
            "last_status",
            "last_error",
            "attempts_made",
            "trigger",
            "replay_of",
            "created_at",
            "next_attempt_at",
            "finished_at",
            "replay_expires_at",
        ]

    def get_contract(self, delivery: Delivery) -> str:
        """The contract's name."""
        return name_in(delivery.contract)

    def get_outcome_unknown(self, delivery: Delivery) -> bool:
        """A 409 came after an attempt without an answer: the receiver may have it, and be at work on it."""
        return is_outcome_unknown(delivery)

    def get_next_attempt_at(self, delivery: Delivery) -> datetime | None:
        """When it is sent next."""
        return delivery.due_at if delivery.state == Delivery.State.PENDING else None

    def get_replay_expires_at(self, delivery: Delivery) -> datetime | None:
        """Until when it can be sent again; null without a limit."""
        return replay_expires_at(delivery)


class DeliveriesView(KeyView):
    """`/v1/deliveries`."""

    def get(self, request: Request) -> Response:
        """A tenant's deliveries, newest first; `event`, `endpoint` and `state` narrow them down."""
        query = read_query(request.query_params, ["event", "endpoint", "state"])
        rows = deliveries_of(self.tenant_id)
        for name, prefix in (("event", Event.prefix), ("endpoint", Endpoint.prefix)):
            if name in query:
                try:
                    rows = rows.filter(**{name: parse_typeid(prefix, query[name])})
                except ValueError as error:
                    raise Problem(400, "parameter_invalid", f"{name}: {error}") from error
        if "state" in query:
            if query["state"] not in Delivery.State.values:
                raise Problem(400, "parameter_invalid", f"state must be one of {', '.join(Delivery.State.values)}")
            rows = rows.filter(state=query["state"])
        return Response(page_of(rows, query, show=lambda one: DeliverySerializer(one).data))


class DeliveryView(KeyView):
    """`/v1/deliveries/<id>`."""

    def get(self, request: Request, delivery_id: str) -> Response:
        """A delivery with its attempts."""
        delivery = find(deliveries_of(self.tenant_id), Delivery.prefix, delivery_id)
        attempts = delivery.attempts.select_related("delivery").order_by("number")
        return Response({**DeliverySerializer(delivery).data, "attempts": AttemptSerializer(attempts, many=True).data})


class _Reason(serializers.Serializer[Any]):
    reason = serializers.CharField(max_length=500, required=False, default="")


class ReplayView(KeyView):
    """`/v1/deliveries/<id>/replay`."""

    def post(self, request: Request, delivery_id: str) -> Response:
        """Sends it again, as a new delivery of the same event."""
        delivery = find(deliveries_of(self.tenant_id), Delivery.prefix, delivery_id)
        reason = read_body(request, _Reason)["reason"] if request.body else ""
        return Response(DeliverySerializer(replay(delivery, actor=self.actor, reason=reason)).data, status=202)


class CancelView(KeyView):
    """`/v1/deliveries/<id>/cancel`."""

    def post(self, request: Request, delivery_id: str) -> Response:
        """Gives up a delivery that waits."""
        delivery = find(deliveries_of(self.tenant_id), Delivery.prefix, delivery_id)
        reason = read_body(request, _Reason)["reason"] if request.body else ""
        if not cancel_delivery(delivery=delivery, actor=self.actor, reason=reason):
            raise Problem(409, "not_waiting", f"{delivery.typeid} does not wait; only what waits can be cancelled")
        return Response(DeliverySerializer(deliveries_of(self.tenant_id).get(pk=delivery.pk)).data)


def replay(delivery: Delivery, **options: Any) -> Delivery:
    """The new delivery. Raises Problem 409 or 410."""
    try:
        new = replay_delivery(delivery=delivery, **options)
    except ReplayExpired as error:
        raise Problem(410, "replay_expired", str(error)) from error
    except NotReplayable as error:
        raise Problem(409, "not_replayable", str(error)) from error
    return deliveries_of(new.endpoint.tenant_id).get(pk=new.pk)  # type: ignore[no-any-return]


def deliveries_of(tenant_id: Any) -> Any:
    """A tenant's deliveries, without the challenges that verify its endpoints."""
    rows = Delivery.objects.filter(endpoint__tenant=tenant_id).exclude(trigger=Delivery.Trigger.VERIFICATION)
    return rows.select_related("event", "endpoint").defer("event__payload", "event__projection")
