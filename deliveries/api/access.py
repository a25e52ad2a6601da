"""Who calls: every resource but the replay resource is a tenant's, the replay resource is one endpoint's receiver's."""

import functools
import uuid
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db import models
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.views import APIView

from deliveries.intake import key_of
from endpoints.models import ApiKey, AuditEvent
from endpoints.services import Actor
from webhookhub.api import Problem
from webhookhub.ids import parse_typeid

Row = TypeVar("Row", bound=models.Model)


class KeyView(APIView):
    """A view for who shows an API key, which is in `key` from then on."""

    key: ApiKey

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Authenticates. Raises Problem 401, or 403 for a key of another kind."""
        super().initial(request, *args, **kwargs)
        self.key = key_of(request.headers.get("authorization"), of_endpoint=self.of_endpoint)

    of_endpoint = False

    @functools.cached_property
    def actor(self) -> Actor:
        """The key, as the audit names it."""
        return Actor(AuditEvent.Actor.API_KEY, self.key.typeid, self.request.META.get("REMOTE_ADDR"))

    @property
    def tenant_id(self) -> uuid.UUID:
        """Whose key it is."""
        return self.key.tenant_id


def find(rows: models.QuerySet[Row], prefix: str, text: str) -> Row:
    """The row of these that an id names. Raises Problem 404, the same for one that is another tenant's."""
    try:
        found = rows.filter(pk=parse_typeid(prefix, text)).first()
    except ValueError:
        found = None
    if found is None:
        raise not_found(prefix)
    return found


def not_found(prefix: str) -> Problem:
    """There is no such thing, or not for this caller."""
    return Problem(404, "not_found", f"There is nothing with this id; it must be one of yours, like {prefix}_...")


def read_body(request: Request, serializer: type[serializers.Serializer[Any]], **options: Any) -> dict[str, Any]:
    """The members of a body. Raises DRF's ValidationError, also for members that there are not."""
    data = request.data
    if not isinstance(data, dict):
        raise Problem(400, "body_not_object", "Send a JSON object")
    reader = serializer(data=data, **options)
    unknown = sorted(set(data) - {name for name, one in reader.fields.items() if not one.read_only})
    if unknown:
        known = ", ".join(name for name, one in reader.fields.items() if not one.read_only)
        raise serializers.ValidationError({unknown[0]: f"There is no such member here; there are {known}."})
    reader.is_valid(raise_exception=True)
    return dict(reader.validated_data)


def check(obj: models.Model) -> None:
    """Checks a model's own rules. Raises DRF's ValidationError."""
    try:
        obj.full_clean()
    except ValidationError as error:
        raise serializers.ValidationError(error.message_dict) from error
