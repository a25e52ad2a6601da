"""Rules of conditional destinations, and the credits that they have cost."""

from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from deliveries import payloads
from deliveries.api.access import KeyView, check, find, read_body
from deliveries.api.endpoints import endpoints_of
from deliveries.models import Credit, Delivery, Event
from deliveries.routing import try_rules, view
from endpoints.conditions import read_data
from endpoints.models import Endpoint, Rule
from endpoints.services import record_audit
from webhookhub.api import IdField, page_of, read_query
from webhookhub.ids import uuid7


class RuleSerializer(serializers.ModelSerializer[Rule]):
    """A rule."""

    id = IdField(Rule.prefix, read_only=True)
    endpoint = IdField(Endpoint.prefix, source="endpoint_id")

    class Meta:
        model = Rule
        fields = ["id", "name", "event_type", "condition", "endpoint", "position", "enabled", "created_at"]
        read_only_fields = ["created_at"]


class _RulesOfTenant(KeyView):
    """What both addresses of rules share."""

    def _rules(self) -> Any:
        return Rule.objects.filter(tenant=self.tenant_id)

    def _save(self, rule: Rule, fields: dict[str, Any], verb: str) -> None:
        if "endpoint_id" in fields and not endpoints_of(self).filter(pk=fields["endpoint_id"]).exists():
            raise serializers.ValidationError({"endpoint": "There is no endpoint of yours with this id."})
        for name, value in fields.items():
            setattr(rule, name, value)
        check(rule)
        rule.save()
        record_audit(actor=self.actor, action=f"rule.{verb}", of=rule, tenant=self.key.tenant)


class RulesView(_RulesOfTenant):
    """`/v1/rules`."""

    def get(self, request: Request) -> Response:
        """A tenant's rules."""
        query = read_query(request.query_params, [])
        return Response(page_of(self._rules(), query, show=lambda one: RuleSerializer(one).data))

    def post(self, request: Request) -> Response:
        """Makes one."""
        rule = Rule(tenant=self.key.tenant)
        self._save(rule, read_body(request, RuleSerializer), "create")
        return Response(RuleSerializer(self._rules().get(pk=rule.pk)).data, status=201)


class RuleView(_RulesOfTenant):
    """`/v1/rules/<id>`."""

    def get(self, request: Request, rule_id: str) -> Response:
        """A rule."""
        return Response(RuleSerializer(find(self._rules(), Rule.prefix, rule_id)).data)

    def patch(self, request: Request, rule_id: str) -> Response:
        """Changes what is given."""
        rule = find(self._rules(), Rule.prefix, rule_id)
        self._save(rule, read_body(request, RuleSerializer, partial=True), "change")
        return Response(RuleSerializer(rule).data)

    def delete(self, request: Request, rule_id: str) -> Response:
        """Removes it; what it has chosen stays."""
        rule = find(self._rules(), Rule.prefix, rule_id)
        record_audit(actor=self.actor, action="rule.delete", of=rule, tenant=self.key.tenant)
        rule.delete()
        return Response(status=204)


class _Trial(serializers.Serializer[Any]):
    type = serializers.CharField(max_length=200)
    data = serializers.JSONField()  # type: ignore[assignment]  # the member's name, not the serializer's data


class DryRunView(KeyView):
    """`/v1/rules/dry-run`."""

    def post(self, request: Request) -> Response:
        """Which endpoint an event would be sent to, and why; nothing is stored, sent or charged."""
        raw = request.body  # before it is parsed: integers beyond 64 bits are for the rules to see as they are
        event = read_body(request, _Trial)
        data = read_data(payloads.slice_members(raw)["data"])
        found = list(try_rules(self.tenant_id, event["type"], view(uuid7(), event["type"], data)))
        chosen = next((one.rule for one in found if one.matches), None)
        show = IdField(Endpoint.prefix).to_representation
        return Response(
            {
                "endpoint": show(chosen.endpoint_id) if chosen else None,
                "rule": chosen.typeid if chosen else None,
                "rules": [
                    {"id": one.rule.typeid, "name": one.rule.name, "matches": one.matches, "reason": one.reason}
                    for one in found
                ],
            }
        )


class CreditSerializer(serializers.ModelSerializer[Credit]):
    """A charge."""

    id = IdField(Credit.prefix)
    event = IdField(Event.prefix, source="event_id")
    endpoint = IdField(Endpoint.prefix, source="endpoint_id")
    delivery = IdField(Delivery.prefix, source="delivery_id")

    class Meta:
        model = Credit
        fields = ["id", "event", "endpoint", "delivery", "amount", "created_at"]


class CreditsView(KeyView):
    """`/v1/credits`."""

    def get(self, request: Request) -> Response:
        """What was charged, newest first."""
        query = read_query(request.query_params, [])
        rows = Credit.objects.filter(tenant=self.tenant_id)
        return Response(page_of(rows, query, show=lambda one: CreditSerializer(one).data))
