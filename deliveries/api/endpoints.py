"""Endpoints (`/v1/endpoints`, and the same under `/v1/webhooks`): making, changing, verifying and testing them."""

from typing import Any

from django.db import transaction
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from deliveries.api.access import KeyView, check, find, read_body
from deliveries.api.deliveries import DeliverySerializer
from deliveries.control import NotDone, confirm_verification, send_test, start_verification, test_types
from deliveries.models import Delivery, Verification
from deliveries.services import delete_endpoint, pause_endpoints, resume_endpoints
from endpoints.contracts import CONTRACTS
from endpoints.models import Endpoint, all_event_types
from endpoints.services import create_endpoint, update_endpoint
from endpoints.signing import SecretError
from webhookhub.api import IdField, Problem, page_of, read_query


class EndpointSerializer(serializers.ModelSerializer[Endpoint]):
    """An endpoint. Its signing secret is in the answer to its making and nowhere else."""

    id = IdField(Endpoint.prefix, read_only=True)
    is_active = serializers.SerializerMethodField()
    contract = serializers.CharField(default="standard")
    event_types = serializers.ListField(child=serializers.CharField(max_length=202), default=all_event_types)

    class Meta:
        model = Endpoint
        read_only_fields = [
            "health",
            "status",
            "status_reason",
            "status_at",
            "verified_at",
            "dead_in_a_row",
            "created_at",
        ]
        fields = [
            "id",
            "name",
            "url",
            "contract",
            "event_types",
            "rate_limit",
            "max_in_flight",
            "ordered",
            "is_active",
            *read_only_fields,
        ]

    def get_is_active(self, endpoint: Endpoint) -> bool:
        """Whether it is sent events."""
        return endpoint.status == Endpoint.Status.ACTIVE

    def validate_contract(self, name: str) -> str:
        """One that this hub knows."""
        if name not in CONTRACTS:
            raise serializers.ValidationError(f"contract must be one of {', '.join(CONTRACTS)}")
        return name


class NewEndpoint(EndpointSerializer):
    """What a new endpoint is made of; `secret` is one of the caller's own."""

    secret = serializers.CharField(max_length=500, required=False, trim_whitespace=False)

    class Meta(EndpointSerializer.Meta):
        fields = [*EndpointSerializer.Meta.fields, "secret"]


class ChangedEndpoint(EndpointSerializer):
    """What can be changed."""

    is_active = serializers.BooleanField(required=False)  # type: ignore[assignment]


class EndpointsView(KeyView):
    """`/v1/endpoints`."""

    def get(self, request: Request) -> Response:
        """A tenant's endpoints, newest first."""
        query = read_query(request.query_params, [])
        return Response(page_of(endpoints_of(self), query, show=lambda one: EndpointSerializer(one).data))

    def post(self, request: Request) -> Response:
        """Makes one, and shows its signing secret, this once."""
        fields = read_body(request, NewEndpoint)
        secret = fields.pop("secret", None)
        endpoint = Endpoint(tenant=self.key.tenant, **fields)
        check(endpoint)
        try:
            secret = create_endpoint(endpoint=endpoint, actor=self.actor, secret=secret)
        except SecretError as error:
            raise Problem(400, error.code, str(error), "/secret") from error
        stored = endpoints_of(self).get(pk=endpoint.pk)
        return Response({**EndpointSerializer(stored).data, "secret": secret}, status=201)


class EndpointView(KeyView):
    """`/v1/endpoints/<id>`."""

    def get(self, request: Request, endpoint_id: str) -> Response:
        """An endpoint."""
        return Response(EndpointSerializer(self._find(endpoint_id)).data)

    def patch(self, request: Request, endpoint_id: str) -> Response:
        """Changes what is given; `is_active` pauses it, or makes it active again."""
        endpoint = self._find(endpoint_id)
        fields = read_body(request, ChangedEndpoint, partial=True)
        is_active = fields.pop("is_active", None)
        if is_active and endpoint.status == Endpoint.Status.UNVERIFIED and endpoint.needs_challenge:
            detail = f"Verify it first: POST /v1/endpoints/{endpoint.typeid}/verification"
            raise Problem(409, "not_verified", detail, "/is_active")
        for name, value in fields.items():
            setattr(endpoint, name, value)
        check(endpoint)
        this = Endpoint.objects.filter(pk=endpoint.pk)
        with transaction.atomic():
            update_endpoint(endpoint=endpoint, fields=list(fields), actor=self.actor)
            if fields.get("ordered"):
                Delivery.objects.all().put_in_order(endpoint.pk)
            if is_active is not None:
                change = resume_endpoints if is_active else pause_endpoints
                change(this, actor=self.actor, reason="by API")
        return Response(EndpointSerializer(self._find(endpoint_id)).data)

    def delete(self, request: Request, endpoint_id: str) -> Response:
        """Deletes it: nothing is sent to it any more, and what waits for it is dead. Its history stays."""
        delete_endpoint(endpoint=self._find(endpoint_id), actor=self.actor)
        return Response(status=204)

    def _find(self, endpoint_id: str) -> Endpoint:
        endpoint: Endpoint = find(endpoints_of(self), Endpoint.prefix, endpoint_id)
        return endpoint


class VerificationSerializer(serializers.ModelSerializer[Verification]):
    """How far a verification is."""

    id = IdField(Verification.prefix)
    state = serializers.SerializerMethodField()
    last_error = serializers.CharField(source="delivery.last_error")
    last_status = serializers.IntegerField(source="delivery.last_status")

    class Meta:
        model = Verification
        fields = ["id", "state", "last_status", "last_error", "wrong_answers", "created_at", "expires_at"]

    def get_state(self, verification: Verification) -> str:
        """`confirmed` or `void`; else how the challenge fares: pending, sending, delivered or dead."""
        if verification.confirmed_at:
            return "confirmed"
        return "void" if verification.voided_at else verification.delivery.state


class VerificationView(KeyView):
    """`/v1/endpoints/<id>/verification`."""

    def get(self, request: Request, endpoint_id: str) -> Response:
        """The last challenge."""
        endpoint = find(endpoints_of(self), Endpoint.prefix, endpoint_id)
        last = endpoint.verifications.select_related("delivery").order_by("-id").first()
        if last is None:
            raise Problem(404, "not_found", "No challenge has been sent to this endpoint; POST here sends one")
        return Response(VerificationSerializer(last).data)

    def post(self, request: Request, endpoint_id: str) -> Response:
        """Sends a challenge; an earlier one is void then."""
        endpoint = find(endpoints_of(self), Endpoint.prefix, endpoint_id)
        try:
            verification = start_verification(endpoint=endpoint, actor=self.actor)
        except NotDone as error:
            raise Problem(409, "not_to_be_verified", str(error)) from error
        return Response(VerificationSerializer(verification).data, status=202)


class _Answer(serializers.Serializer[Any]):
    challenge = serializers.CharField(max_length=1_000)


class ConfirmView(KeyView):
    """`/v1/endpoints/<id>/verification/confirm`."""

    def post(self, request: Request, endpoint_id: str) -> Response:
        """Takes the challenge that the receiver saw; the endpoint is active if it is right."""
        endpoint = find(endpoints_of(self), Endpoint.prefix, endpoint_id)
        try:
            confirm_verification(endpoint=endpoint, answer=read_body(request, _Answer)["challenge"], actor=self.actor)
        except NotDone as error:
            raise Problem(409, "not_verified", str(error), "/challenge") from error
        return Response(EndpointSerializer(endpoints_of(self).get(pk=endpoint.pk)).data)


class _Test(serializers.Serializer[Any]):
    type = serializers.CharField(max_length=200, required=False)


class TestView(KeyView):
    """`/v1/endpoints/<id>/test`."""

    __test__ = False

    def post(self, request: Request, endpoint_id: str) -> Response:
        """Sends synthetic data of a type, the first that there is unless given."""
        endpoint = find(endpoints_of(self), Endpoint.prefix, endpoint_id)
        event_type = read_body(request, _Test).get("type") if request.body else None
        try:
            delivery = send_test(endpoint=endpoint, event_type=event_type or test_types(endpoint)[0], actor=self.actor)
        except NotDone as error:
            raise Problem(409, "not_sent", str(error)) from error
        return Response(DeliverySerializer(delivery).data, status=202)


def endpoints_of(view: KeyView) -> Any:
    """The endpoints of whose key it is, without those that were deleted."""
    return Endpoint.objects.filter(tenant=view.tenant_id).exclude(status=Endpoint.Status.DELETED)
