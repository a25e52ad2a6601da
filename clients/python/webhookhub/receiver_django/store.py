"""A dedupe store in a table of your Django project's database."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from django.db import DEFAULT_DB_ALIAS, IntegrityError, transaction

from webhookhub.receiver import Response
from webhookhub.receiver_django.models import Seen
from webhookhub.stores import Held

__all__ = ["DjangoStore"]

PRUNED_AT_ONCE = 10  # rows; each claim adds two at most


class DjangoStore:
    """In the database `using`, for any number of processes and machines, whose clocks must agree.

    Must be called outside of transactions (`webhook_view` takes care of ATOMIC_REQUESTS): inside one nobody else would
    see a claim, and a copy would hang in its INSERT until the end. It raises RuntimeError then. `handle` may open
    transactions of its own.
    """

    def __init__(self, *, using: str = DEFAULT_DB_ALIAS, now: Callable[[], float] = time.time) -> None:
        self._using = using
        self._now = now
        self._rows = Seen.objects.using(using)

    def claim(self, names: Sequence[str], token: str, *, lease: float) -> Held | None:
        """See `webhookhub.stores.Store`."""
        now = self._now()
        if held := self._look_up(names, now):
            return held
        self._prune(now)
        claims = [Seen(name=name, until=now + lease, token=token) for name in names]
        try:
            with transaction.atomic(self._using, durable=True):
                self._rows.filter(name__in=names, until__lt=now).delete()
                self._rows.bulk_create(claims)
        except IntegrityError:
            return self._look_up(names, now) or Held(None)  # released meanwhile: the next claim will do
        return None

    def keep(self, names: Sequence[str], response: Response, *, seconds: float) -> None:
        """See `webhookhub.stores.Store`."""
        values = {
            "until": self._now() + seconds,
            "token": "",
            "status": response.status,
            "body": response.body,
            "content_type": response.content_type,
        }
        with transaction.atomic(self._using, durable=True):
            self._rows.bulk_create(
                [Seen(name=name, **values) for name in names],
                update_conflicts=True,
                unique_fields=["name"],
                update_fields=list(values),
            )

    def release(self, names: Sequence[str], token: str) -> None:
        """See `webhookhub.stores.Store`."""
        self._rows.filter(name__in=names, token=token).delete()

    def _look_up(self, names: Sequence[str], now: float) -> Held | None:
        for row in self._rows.filter(name__in=names, until__gte=now).order_by("name"):
            return Held(None if row.status is None else Response(row.status, bytes(row.body), row.content_type))
        return None

    def _prune(self, now: float) -> None:
        # One row a statement: two statements that delete the same rows in two orders would deadlock.
        for name in list(self._rows.filter(until__lt=now).values_list("name", flat=True)[:PRUNED_AT_ONCE]):
            self._rows.filter(name=name, until__lt=now).delete()
