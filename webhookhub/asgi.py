"""The one web entry: `POST /v1/events` goes to the fast lane, all else to Django's WSGI application in threads."""

import os
from typing import Any, cast

import django
from a2wsgi import WSGIMiddleware

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webhookhub.settings")
django.setup()

from django.conf import settings  # noqa: E402

from deliveries.intake import PATHS, FastLane, Receive, Scope, Send  # noqa: E402
from webhookhub.wsgi import application as django_application  # noqa: E402

_django: Any = WSGIMiddleware(cast(Any, django_application), workers=settings.WEB_THREADS)
_fast_lane: FastLane | None = None


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Serves one connection's event: a request, or the server's start and stop."""
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS and _fast_lane is not None:
        await _fast_lane(scope, receive, send)
    elif scope["type"] == "http":
        await _django(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1000})


async def _lifespan(receive: Receive, send: Send) -> None:
    global _fast_lane
    await receive()
    _fast_lane = FastLane()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    _fast_lane.close()
    await send({"type": "lifespan.shutdown.complete"})
