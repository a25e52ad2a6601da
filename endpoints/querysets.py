"""Queries over endpoints, secrets and keys."""

import uuid
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Self

from django.db import models
from django.db.models.functions import Now

from endpoints.pace import Pace

if TYPE_CHECKING:
    from endpoints.models import ApiKey, Endpoint, EndpointSecret
else:
    ApiKey = Endpoint = EndpointSecret = models.Model

# Fields of an endpoint that make up its Pace: what is set, and what comes of requests.
PACE_STATE = ["next_slot_at", "failures_in_a_row", "failing_since", "probe_at", "probes", "recovered_at"]
PACE = ["rate_limit", "max_in_flight", "ordered", *PACE_STATE]


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    """API keys."""

    def usable(self) -> Self:
        """Keys that are neither revoked nor expired, by the database's clock."""
        return self.filter(models.Q(expires_at__isnull=True) | models.Q(expires_at__gt=Now()), revoked_at__isnull=True)


class EndpointQuerySet(models.QuerySet["Endpoint"]):
    """Endpoints."""

    def locked_for_pace(self, ids: Collection[uuid.UUID], *, wait: bool = False) -> Self:
        """These with what their pace says, locked until the transaction's end, and its `moment`, the database's time.

        Those that somebody else has locked are waited for or passed over.
        """
        mine = self.filter(pk__in=ids).annotate(moment=Now()).only("contract", *PACE)
        return mine.select_for_update(skip_locked=not wait, no_key=True).order_by("pk")

    def save_paces(self, paces: "Iterable[tuple[Endpoint, Pace]]") -> None:
        """Stores what has changed about the pace of these."""
        changed = []
        for endpoint, pace in paces:
            if pace != endpoint.pace:
                for name in PACE_STATE:
                    setattr(endpoint, name, getattr(pace, name))
                changed.append(endpoint)
        self.bulk_update(changed, PACE_STATE)


class EndpointSecretQuerySet(models.QuerySet["EndpointSecret"]):
    """Signing secrets."""

    def valid(self) -> Self:
        """Secrets that sign now, oldest first, by the database's clock."""
        return self.filter(models.Q(expires_at__isnull=True) | models.Q(expires_at__gt=Now())).order_by("id")
