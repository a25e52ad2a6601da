"""Who calls: every resource but the replay resource is a tenant's, the replay resource is one endpoint's receiver's."""

import functools
import json
import uuid
from typing import Any, TypeVar

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from rest_framework import serializers
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.views import APIView

from deliveries import payloads
from deliveries.intake import key_of, too_large
from deliveries.routing import MAX_DEPTH
from endpoints.models import ApiKey, AuditEvent
from endpoints.services import Actor
from webhookhub.api import Problem
from webhookhub.ids import parse_typeid

Row = TypeVar("Row", bound=models.Model)


class SoundJSONParser(BaseParser):
    """JSON by the same rules as payloads: no name twice, no half of a surrogate pair, and not so deep."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        """The value. Raises Problem 400, 413."""
        body = stream.read()
        if len(body) > settings.INTAKE_BODY_BYTES:
            raise too_large(settings.INTAKE_BODY_BYTES)
        try:
            payloads.check(body, max_bytes=settings.INTAKE_BODY_BYTES, max_depth=MAX_DEPTH)
            return json.loads(body)
        except payloads.PayloadError as error:
            raise Problem(400, error.code, error.detail, error.pointer) from error
        except ValueError as error:  # an integer with more digits than Python reads
            raise Problem(400, "invalid_json", f"The JSON cannot be read: {error}") from error


class KeyView(APIView):
    """A view for who shows an API key, which is in `key` from then on."""

    parser_classes = [SoundJSONParser]
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
