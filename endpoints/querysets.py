"""Queries over endpoints, secrets and keys."""

from typing import TYPE_CHECKING, Self

from django.db import models
from django.db.models.functions import Now

if TYPE_CHECKING:
    from endpoints.models import ApiKey, EndpointSecret
else:
    ApiKey = EndpointSecret = models.Model


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    """API keys."""

    def usable(self) -> Self:
        """Keys that are neither revoked nor expired, by the database's clock."""
        return self.filter(models.Q(expires_at__isnull=True) | models.Q(expires_at__gt=Now()), revoked_at__isnull=True)


class EndpointSecretQuerySet(models.QuerySet["EndpointSecret"]):
    """Signing secrets."""

    def valid(self) -> Self:
        """Secrets that sign now, oldest first, by the database's clock."""
        return self.filter(models.Q(expires_at__isnull=True) | models.Q(expires_at__gt=Now())).order_by("id")
