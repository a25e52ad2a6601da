"""The product's web entry with what intake is compared with beside it, for `uvicorn bench.entry:application`.

`/floor` parses the body and nothing else, and stores events in groups as the fast lane does. `/drf` is a view of Django
REST framework that stores one row. `/nothing` answers at once: what server and client cost. The environment's
BENCH_TENANT and BENCH_ENDPOINT say whose events and deliveries these are.
"""

import asyncio
import os
import queue
import threading
import uuid
from typing import Any

import msgspec
import psycopg
from django.conf import settings
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from webhookhub import asgi, urls
from webhookhub.database import array
from webhookhub.ids import typeid, uuid7

TENANT, ENDPOINT = uuid.UUID(os.environ["BENCH_TENANT"]), uuid.UUID(os.environ["BENCH_ENDPOINT"])

STORE = """
WITH input AS (
    SELECT * FROM unnest(%(id)s::uuid[], %(type)s::text[], %(payload)s::bytea[]) AS input (id, type, payload)
), stored AS (
    INSERT INTO deliveries_event (id, tenant_id, type, payload, content_type, key, metadata, state)
    SELECT id, %(tenant)s, type, payload, 'application/json', gen_random_uuid(), '{}', 'accepted' FROM input
)
INSERT INTO deliveries_delivery (id, event_id, endpoint_id, contract, trigger, attempts_made, state, last_error)
SELECT hub_uuid7(), id, %(endpoint)s, 'standard', 'automatic', 0, 'pending', '' FROM input
"""


class Posted(msgspec.Struct):
    """A body."""

    type: str
    data: msgspec.Raw


_body = msgspec.json.Decoder(Posted)
Waiting = tuple[uuid.UUID, Posted, "asyncio.Future[None]"]


class Floor:
    """The least that stores an event with its delivery and answers after the commit."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._store, daemon=True).start()

    async def __call__(self, receive: Any, send: Any) -> None:
        """Answers one request."""
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        event, event_id, future = _body.decode(body), uuid7(), self._loop.create_future()
        self._waiting.put((event_id, event, future))
        await future
        await answer(send, b'{"id":"%b"}' % typeid("evt", event_id).encode())

    def _store(self) -> None:
        with psycopg.connect(settings.DATABASE_URL, autocommit=True) as connection:
            while True:
                group = [self._waiting.get()]
                while len(group) < settings.INTAKE_GROUP and not self._waiting.empty():
                    group.append(self._waiting.get())
                ids, events, futures = zip(*group, strict=True)
                params = {
                    "id": array("uuid", [one.bytes for one in ids]),
                    "type": array("text", [event.type.encode() for event in events]),
                    "payload": array("bytea", [bytes(event.data) for event in events]),
                    "tenant": TENANT,
                    "endpoint": ENDPOINT,
                }
                connection.execute(STORE, params, prepare=True, binary=True)
                self._loop.call_soon_threadsafe(_wake, futures)


def _wake(futures: "tuple[asyncio.Future[None], ...]") -> None:
    for future in futures:
        future.set_result(None)


async def answer(send: Any, body: bytes) -> None:
    """Sends a 202."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 202, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class LeanView(APIView):
    """One row by Django's ORM, as a lean program has it."""

    def post(self, request: Request) -> Response:
        """Stores an event, without a delivery."""
        from deliveries.models import Event

        posted: Any = request.data
        event = Event.objects.create(tenant_id=TENANT, type=posted["type"], payload=msgspec.json.encode(posted["data"]))
        return Response({"id": event.typeid}, status=202)


urls.urlpatterns.insert(0, path("drf", LeanView.as_view()))
_floor: Floor | None = None


async def application(scope: Any, receive: Any, send: Any) -> None:
    """The product's, but for two paths."""
    global _floor
    if scope["type"] != "http" or scope["path"] not in ("/floor", "/nothing"):
        await asgi.application(scope, receive, send)
    elif scope["path"] == "/floor":
        _floor = _floor or Floor()
        await _floor(receive, send)
    else:
        await receive()
        await answer(send, b"{}")
