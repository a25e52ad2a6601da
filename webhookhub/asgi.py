"""The one web entry: posts of events go to the fast lane, all else to Django's WSGI application in threads."""

import os
from typing import Any, cast

import django
from a2wsgi import WSGIMiddleware

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webhookhub.settings")
django.setup()

from django.conf import settings  # noqa: E402

from deliveries.intake import PATHS, FastLane, Receive, Scope, Send, body_limit, read_body, send_answer  # noqa: E402
from webhookhub.api import Problem  # noqa: E402
from webhookhub.limits import raise_descriptor_limit, relieve_collector  # noqa: E402
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
        await _serve_django(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1000})


async def _serve_django(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body whole before a thread is taken: who sends one slowly, or never, holds up nobody else."""
    try:
        body = await read_body(receive, body_limit(scope["path"]))
    except Problem as problem:
        await send_answer(send, problem.answer())
        return
    if body is None:
        return
    whole = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_whole() -> Any:
        return whole.pop() if whole else await receive()

    await _django(scope, receive_whole, send)


async def _lifespan(receive: Receive, send: Send) -> None:
    global _fast_lane
    await receive()
    raise_descriptor_limit()
    relieve_collector()
    _fast_lane = FastLane()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await _fast_lane.close()
    await send({"type": "lifespan.shutdown.complete"})
