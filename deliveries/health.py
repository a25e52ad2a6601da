"""Whether the hub is well, for load balancers and monitoring: `GET /healthz` and `GET /readyz`."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import redis
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.http import HttpRequest, HttpResponse

from deliveries.models import Delivery
from webhookhub.database import PUMP_NAME, sessions_named

logger = logging.getLogger(__name__)

REDIS_SECONDS = 0.5  # for which Redis is waited for
PUMP_SECONDS = 60.0  # a pump asks the database four times a second; one that has not for so long is stuck


class Health:
    """Answers the two questions ahead of all else: who asks by an address, without https and a key, is answered too."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answers them, and lets all else pass."""
        if request.method in ("GET", "HEAD"):
            if request.path == "/healthz":
                return _answer({"status": "ok"})
            if request.path == "/readyz":
                return _answer(readiness())
        return self.get_response(request)


def _answer(document: dict[str, Any]) -> HttpResponse:
    status = 503 if document["status"] == "unavailable" else 200
    body = msgspec.json.encode(document)
    return HttpResponse(body, status=status, content_type="application/json", headers={"Cache-Control": "no-store"})


def readiness() -> dict[str, Any]:
    """How each part is, and `status`: `ok`, `degraded` (deliveries are late or will be), or `unavailable`.

    It is unavailable without its database, and when deliveries are late by more than READY_MAX_LATE_SECONDS.
    """
    found: dict[str, Any] = {"status": "unavailable", "database": "away", "redis": _redis()}
    try:
        if unapplied := _unapplied():
            logger.error("migrations are not applied: %s. Run manage.py migrate", ", ".join(unapplied))
            return found | {"database": "migrations are not applied"}
        late = Delivery.objects.all().lateness()
        count, age = sessions_named(PUMP_NAME)
    except (DatabaseError, InterfaceError) as error:
        logger.error("the database is away: %s", error)
        connection.close()
        return found
    pumps = {"count": count, "last_seconds": None if age is None else round(age, 1)}
    found |= {"database": "ok", "oldest_due_seconds": round(late, 1), "pumps": pumps}
    if late <= settings.READY_MAX_LATE_SECONDS:
        is_well = found["redis"] == "ok" and age is not None and age <= PUMP_SECONDS
        found["status"] = "ok" if is_well else "degraded"
    return found


def _redis() -> str:
    try:
        with redis.Redis.from_url(
            settings.REDIS_URL, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS, retry=None
        ) as client:
            memory: Any = client.info("memory")
    except redis.RedisError:
        return "away"
    if memory.get("maxmemory_policy", "noeviction") != "noeviction":
        return "maxmemory-policy is not noeviction"
    if 0 < memory.get("maxmemory", 0) <= memory["used_memory"]:
        return "full"
    return "ok"


@functools.cache
def _newest_migrations() -> list[tuple[str, str]]:
    """The last one of each app, as this release has them."""
    found: list[tuple[str, str]] = MigrationLoader(None, ignore_no_migrations=True).graph.leaf_nodes()
    return found


def _unapplied() -> list[str]:
    applied = MigrationRecorder(connection).applied_migrations()
    return [f"{app}.{name}" for app, name in _newest_migrations() if (app, name) not in applied]
