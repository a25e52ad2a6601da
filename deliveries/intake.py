"""Taking events in. `POST /v1/events` and `/v1/events/batch` are answered here, ahead of Django: what waits at the same
moment shares one commit. The API's own views are made of the same functions, for those who serve plain WSGI.
"""

import asyncio
import functools
import itertools
import logging
import re
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from django.conf import settings
from django.db import InterfaceError, OperationalError, close_old_connections, connection

from deliveries import payloads
from deliveries.models import Event
from deliveries.publishing import KeyReused, NewEvent, Published, Publishing, Refused, apublish_plain, publish_events
from deliveries.routing import MAX_BYTES, Rejected
from deliveries.wake import LoopAnnouncer
from endpoints.models import EVENT_TYPE, ApiKey
from endpoints.services import authenticate, contract_keys
from webhookhub.api import Answer, Problem, check_key, parse_idempotency_key
from webhookhub.database import LoopConnection, settle_planner
from webhookhub.ids import typeid

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

logger = logging.getLogger(__name__)

BATCH_PATHS = frozenset({"/v1/events/batch", "/v1/events/batch/"})
PATHS = frozenset({"/v1/events", "/v1/events/"}) | BATCH_PATHS
PATIENCE_SECONDS = 0.05  # with a commit, which may wait for somebody's lock, until the next one no longer waits for it
COMMITS = 3  # at once, each on a connection: a core each for two and the loop, while the third waits for the disk
MAX_TYPE_CHARS = 200  # Event.type
_TYPE = re.compile(EVENT_TYPE)
MEMBERS = ("type", "data", "metadata")
BATCH_MEMBERS = (*MEMBERS, "idempotency_key")
_KEY = re.compile(r"[\x20-\x7e]*")  # what a header can carry

# --- Events, from the request to the answer. Pure but for the key's look-up.


def body_limit(path: str) -> int:
    """How many bytes the body of a request to this path may have."""
    return settings.INTAKE_BATCH_BYTES if path in BATCH_PATHS else settings.INTAKE_BODY_BYTES


def check_head(headers: Mapping[str, str], limit: int) -> None:
    """Refuses by the head alone what need not be read. Header names are in lower case. Raises Problem."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise Problem(415, "not_json", "Send the event as JSON with Content-Type: application/json")
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        raise too_large(limit)


# Refusals are made anew each time: an exception that is raised again keeps the frames of all times before.


def too_large(limit: int) -> Problem:
    """The refusal of a body over the limit, in bytes."""
    detail = f"The body is over {limit:,} bytes, the most that is taken"
    return Problem(413, "body_too_large", detail)


def unauthorized() -> Problem:
    """The refusal of who shows no key that can be used."""
    detail = "Send an API key of yours as Authorization: Bearer whk_...; it may be mistyped, expired or revoked"
    return Problem(401, "unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})


def unavailable() -> Problem:
    """The refusal while the database is away."""
    # A connection may be lost after the commit and before the word of it: nobody knows then.
    detail = "The event may not have been stored. Send it again, with the same idempotency key"
    return Problem(503, "unavailable", detail, headers={"Retry-After": "1"})


def key_of(authorization: str | None, *, of_endpoint: bool = False) -> ApiKey:
    """The key that an `Authorization` header shows: one of a tenant, or one of an endpoint. Raises Problem 401, 403."""
    scheme, _, text = (authorization or "").partition(" ")
    try:
        key = authenticate(text.strip()) if scheme.lower() == "bearer" else None
    except (OperationalError, InterfaceError) as error:
        raise unavailable() from error
    if key is None:
        raise unauthorized()
    if key.endpoint_id and not of_endpoint:
        raise Problem(403, "key_of_an_endpoint", "This key opens its endpoint's replay resource and nothing else")
    if of_endpoint and not key.endpoint_id:
        raise Problem(403, "key_of_a_tenant", "The replay resource is for a receiver: use a key bound to its endpoint")
    return key


def read_event(tenant_id: uuid.UUID, headers: Mapping[str, str], body: bytes) -> NewEvent:
    """The event that a request's body describes, its payload's bytes as they stand at `data`. Raises Problem."""
    key = parse_idempotency_key(headers.get("idempotency-key"))
    try:
        members = payloads.slice_members(body)
    except payloads.PayloadError as error:
        raise Problem(error.status, error.code, error.detail, error.pointer) from error
    return _read_members(tenant_id, members, key, MEMBERS)


def read_batch(tenant_id: uuid.UUID, headers: Mapping[str, str], body: bytes) -> list[NewEvent | Problem]:
    """The events that a batch's body describes, in order, or why one is refused; a pointer leads from the event.

    Raises Problem for a body that is not sound JSON or not a batch.
    """
    if "idempotency-key" in headers:
        detail = "A batch has no Idempotency-Key of its own; give each event one, as its member idempotency_key"
        raise Problem(400, "idempotency_key_of_batch", detail)
    try:
        items = payloads.slice_items(body, "events", settings.INTAKE_BATCH_EVENTS)
    except payloads.PayloadError as error:
        raise Problem(error.status, error.code, error.detail, error.pointer) from error
    if not items:
        raise Problem(400, "events_missing", "There is no event in the body", "/events")
    limit = settings.INTAKE_BODY_BYTES
    return [_read_item(tenant_id, item, f"/events/{number}", limit) for number, item in enumerate(items)]


def _read_item(tenant_id: uuid.UUID, item: bytes, place: str, limit: int) -> NewEvent | Problem:
    """An event of a batch. Raises Problem when the fault is the batch's."""
    if len(item) > limit:
        return Problem(413, "event_too_large", f"The event is over {limit:,} bytes")
    try:
        members = payloads.slice_members(item)
    except payloads.PayloadError as error:
        detail = f"In the text of {place}, positions in which count from its first byte: {error.detail}"
        raise Problem(400, error.code, detail, f"{place}{error.pointer}") from error
    try:
        return _read_members(tenant_id, members, _read_key(members.get("idempotency_key")), BATCH_MEMBERS)
    except Problem as problem:
        return problem.with_traceback(None)


def _read_members(
    tenant_id: uuid.UUID, members: Mapping[str, bytes], key: str | None, known: Sequence[str]
) -> NewEvent:
    """The event of these members, each as its bytes. Raises Problem."""
    if unknown := sorted(members.keys() - set(known)):
        detail = f"An event has {', '.join(known[:-1])} and {known[-1]}, but no {unknown[0]!r}"
        raise Problem(400, "unknown_member", detail, f"/{unknown[0]}")
    event_type = _read_type(members.get("type"))
    data = members.get("data")
    if data is None:
        raise Problem(400, "data_missing", "Give the payload, an object or an array, as data", "/data")
    try:
        payloads.check_kind(data)
        if len(data) > MAX_BYTES:
            payloads.check_size(data)
    except payloads.PayloadError as error:
        raise Problem(error.status, error.code, error.detail, "/data") from None
    return NewEvent(tenant_id, event_type, data, caller_key=key, metadata=_read_metadata(members.get("metadata")))


def _read_key(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        key = msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        key = "\0"
    try:
        if not _KEY.fullmatch(key):
            raise Problem(400, "idempotency_key_malformed", "idempotency_key must be a text in visible ASCII")
        return check_key(key)
    except Problem as problem:
        problem.pointer = "/idempotency_key"
        raise


@functools.lru_cache(maxsize=1_000)  # the same few, again and again
def _read_type(value: bytes | None) -> str:
    try:
        event_type = msgspec.json.decode(value or b"null", type=str)
    except msgspec.DecodeError:
        event_type = ""
    if len(event_type) > MAX_TYPE_CHARS or not _TYPE.fullmatch(event_type):
        raise Problem(
            400,
            "type_invalid",
            "type must be words of letters, digits, _ and -, joined by dots, like invoice.paid; "
            f"{MAX_TYPE_CHARS} characters at most",
            "/type",
        )
    return event_type


def _read_metadata(value: bytes | None) -> dict[str, str]:
    if value is None:
        return {}
    try:
        metadata = msgspec.json.decode(value, type=dict[str, str])
    except msgspec.DecodeError:
        metadata = None
    if metadata is None or any("\0" in text for pair in metadata.items() for text in pair):
        raise Problem(
            400, "metadata_invalid", "metadata must be an object whose values are texts without NUL", "/metadata"
        )
    return metadata


def answer(event: NewEvent, result: Publishing) -> Answer:
    """What the caller is told of an event."""
    if isinstance(result, Published):
        body = msgspec.json.encode({"id": typeid(Event.prefix, result.event_id), "type": event.type})
        return Answer(202, body, headers=(("Idempotent-Replayed", "true"),) if result.repeated else ())
    return _problem_of(result).answer()


def answer_batch(items: Sequence[NewEvent | Problem], results: Iterable[Publishing]) -> Answer:
    """What the caller is told of a batch, event by event in the order sent; `results` are those of its new events.

    202 when at least one was stored. Else the answer is that of the first, and 503 when sending it again may help.
    """
    stored = iter(results)
    data: list[dict[str, Any]] = []
    refusals: list[Problem] = []
    for number, item in enumerate(items):
        result = item if isinstance(item, Problem) else next(stored)
        if isinstance(result, Published) and isinstance(item, NewEvent):
            told = {"id": typeid(Event.prefix, result.event_id), "type": item.type}
            data.append({**told, "repeated": True} if result.repeated else told)
            continue
        problem = result if isinstance(result, Problem) else _problem_of(result)
        if problem.pointer:
            problem.pointer = f"/events/{number}{problem.pointer}"
        refusals.append(problem)
        data.append(problem.members())
    if len(refusals) < len(data):
        return Answer(202, msgspec.json.encode({"data": data}))
    worst = next((one for one in refusals if one.status == 503), refusals[0])
    worst.detail = f"None of the events was stored. {worst.detail}"
    return worst.answer(data=data)


def _problem_of(result: Publishing) -> Problem:
    """Why an event is not stored."""
    match result:
        case KeyReused(event_id):
            first = typeid(Event.prefix, event_id)
            detail = f"This idempotency key belongs to another event, {first}. Use a new key for a new event"
            return Problem(422, "idempotency_key_reused", detail)
        case Rejected(status, code, detail, pointer):
            return Problem(status, code, detail, pointer)
        case Refused(transient=True):
            return unavailable()
        case _:
            return Problem(500, "internal", "The event was not stored, by a fault of ours")


# --- The fast lane


Post = tuple[list[NewEvent], "asyncio.Future[list[Publishing | None]]"]
Waiting = tuple[NewEvent, "asyncio.Future[Publishing]"]


class Turns:
    """A queue in which tenants take turns, one event each: who posts many at once makes no other tenant wait."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[uuid.UUID, deque[Waiting]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, waiting: Waiting) -> None:
        """Adds an event at the end of its tenant's line."""
        with self._changed:
            self._waiting.setdefault(waiting[0].tenant_id, deque()).append(waiting)
            self._changed.notify()

    def close(self) -> None:
        """Lets `get` end when nothing is left."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def get(self) -> Waiting | None:
        """The next event, None when the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            tenant_id, line = self._waiting.popitem(last=False)
            waiting = line.popleft()
            if line:
                self._waiting[tenant_id] = line
            return waiting


class Committer:
    """Publishes events from many requests: whatever waits when a commit is done goes into the next one. More than one
    commit runs at once only when whole groups wait, or when one takes long.

    What a group's statement leaves is published one by one, in a thread beside the commits.
    """

    def __init__(self) -> None:
        self._waiting: deque[Post] = deque()
        self._events = 0  # in what waits
        self._is_scheduled = False
        self._patience_ends = 0.0  # with the newest commit
        self._idle = [LoopConnection() for _ in range(COMMITS)]
        self._commits: set[asyncio.Task[None]] = set()
        self._announcer = LoopAnnouncer(settings.REDIS_URL)
        self._left = Turns()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._publish_left, name="publish", daemon=True)
        self._thread.start()

    async def publish(self, events: list[NewEvent]) -> list[Publishing]:
        """Publishes the events of one request and returns what became of each, after commit."""
        future: asyncio.Future[list[Publishing | None]] = self._loop.create_future()
        self._waiting.append((events, future))
        self._events += len(events)
        if not self._is_scheduled or self._events >= settings.INTAKE_GROUP:
            self._is_scheduled = True
            self._loop.call_soon(self._hand_over)  # together with the posts that are being read at this moment
        first = await future
        later: dict[int, asyncio.Future[Publishing]] = {}
        for number, result in enumerate(first):
            if result is None:
                later[number] = self._loop.create_future()
                self._left.put((events[number], later[number]))
        return [result or await later[number] for number, result in enumerate(first)]

    async def close(self) -> None:
        """Commits what waits, and ends."""
        while self._waiting or self._commits:
            self._hand_over()
            await asyncio.wait(self._commits)
        self._left.close()
        await asyncio.to_thread(self._thread.join)
        await self._announcer.close()
        for database in self._idle:
            await database.close()

    def _hand_over(self) -> None:
        self._is_scheduled = False
        while self._waiting and self._idle:
            if self._commits and self._events < settings.INTAKE_GROUP and self._loop.time() < self._patience_ends:
                self._is_scheduled = True
                self._loop.call_at(self._patience_ends, self._hand_over)
                return
            group = [self._waiting.popleft()]
            count = len(group[0][0])
            while self._waiting and count < settings.INTAKE_GROUP:
                group.append(self._waiting.popleft())
                count += len(group[-1][0])
            self._events -= count
            self._patience_ends = self._loop.time() + PATIENCE_SECONDS
            commit = self._loop.create_task(self._commit(group, self._idle.pop()))
            self._commits.add(commit)

    async def _commit(self, group: list[Post], database: LoopConnection) -> None:
        events = [event for events, _ in group for event in events]
        results: Sequence[Publishing | None]
        try:
            results = await apublish_plain(events, database)
        except Exception:
            logger.exception("%d events refused by a fault of ours", len(events))
            results = [Refused(transient=False)] * len(events)
        self._idle.append(database)
        self._commits.discard(asyncio.current_task())
        if any(isinstance(result, Published) for result in results):
            self._announcer.announce()
        self._hand_over()
        each = iter(results)
        _resolve((future, list(itertools.islice(each, len(events)))) for events, future in group)

    def _publish_left(self) -> None:
        while (waiting := self._left.get()) is not None:
            event, future = waiting
            try:
                if connection.connection is None:
                    settle_planner()
                [result] = publish_events([event])
            except (OperationalError, InterfaceError):
                result = Refused(transient=True)
            except Exception:
                logger.exception("event %s refused by a fault of ours", event.id)
                result = Refused(transient=False)
            if result == Refused(transient=True):
                connection.close()  # the next one finds out whether the database is back
            self._loop.call_soon_threadsafe(_resolve, [(future, result)])
        connection.close()


_HEADERS = {name.encode(): name for name in ("authorization", "content-length", "content-type", "idempotency-key")}


def _resolve(done: "Iterable[tuple[asyncio.Future[Any], Any]]") -> None:
    for future, result in done:
        if not future.done():  # its caller may have gone
            future.set_result(result)


class FastLane:
    """`POST /v1/events` and its batches as an ASGI application. Made inside a running event loop; one a process."""

    def __init__(self) -> None:
        self._committer = Committer()
        self._look_ups = ThreadPoolExecutor(1, thread_name_prefix="api-key")  # one thread, one connection
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._tenants: dict[str, tuple[float, uuid.UUID]] = {}  # Authorization -> (believed until, tenant)

    async def close(self) -> None:
        """Commits what waits, and ends."""
        await self._committer.close()
        self._look_ups.submit(lambda: connection.close())  # that thread's connection, not this one's
        self._look_ups.shutdown()
        self._readers.shutdown()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        headers = {_HEADERS[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        limit = body_limit(scope["path"])
        take = self._take_batch if scope["path"] in BATCH_PATHS else self._take_event
        try:
            check_head(headers, limit)
            tenant_id = await self._tenant_of(headers.get("authorization"))
            body = await read_body(receive, limit)
            if body is None:
                return  # the caller has gone
            result = await take(tenant_id, headers, body)
        except Problem as problem:
            result = problem.answer()
        await send_answer(send, result)

    async def _take_event(self, tenant_id: uuid.UUID, headers: Mapping[str, str], body: bytes) -> Answer:
        event = read_event(tenant_id, headers, body)
        [result] = await self._committer.publish([event])
        return answer(event, result)

    async def _take_batch(self, tenant_id: uuid.UUID, headers: Mapping[str, str], body: bytes) -> Answer:
        if len(body) <= settings.INTAKE_BODY_BYTES:
            items = read_batch(tenant_id, headers, body)
        else:  # in a thread, since the loop has others to serve meanwhile
            loop = asyncio.get_running_loop()
            items = await loop.run_in_executor(self._readers, read_batch, tenant_id, headers, body)
        events = [item for item in items if isinstance(item, NewEvent)]
        return answer_batch(items, await self._committer.publish(events) if events else [])

    async def _tenant_of(self, authorization: str | None) -> uuid.UUID:
        """The tenant of `key_of`, remembered for API_KEY_CACHE_SECONDS."""
        now = time.monotonic()
        until, tenant_id = self._tenants.get(authorization or "", (0.0, None))
        if tenant_id is None or until < now:
            loop = asyncio.get_running_loop()
            tenant_id = await loop.run_in_executor(self._look_ups, _look_up, authorization)
            if len(self._tenants) > 10_000:
                self._tenants.clear()
            self._tenants[authorization or ""] = (now + settings.API_KEY_CACHE_SECONDS, tenant_id)
        return tenant_id


def _look_up(authorization: str | None) -> uuid.UUID:
    close_old_connections()
    key = key_of(authorization)
    try:
        contract_keys()  # kept by a thread that may wait for the database, before the loop needs them
    except (OperationalError, InterfaceError) as error:
        raise unavailable() from error
    return key.tenant_id


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """The request's body of at most `limit` bytes, None when the caller went away.

    Raises Problem: 413 as soon as it is too large, 408 when it has not come within INTAKE_BODY_SECONDS.
    """
    task = asyncio.current_task()
    assert task is not None
    # As asyncio.timeout would, at half its price: most bodies are there already.
    timer = task.get_loop().call_later(settings.INTAKE_BODY_SECONDS, task.cancel, _TOO_LATE)
    try:
        return await _gather_body(receive, limit)
    except asyncio.CancelledError as error:
        if error.args != (_TOO_LATE,):
            raise
        task.uncancel()
        detail = f"The body had not arrived after {settings.INTAKE_BODY_SECONDS} seconds"
        raise Problem(408, "body_timeout", detail, headers={"Connection": "close"}) from None
    finally:
        timer.cancel()


_TOO_LATE = object()


async def _gather_body(receive: Receive, limit: int) -> bytes | None:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise too_large(limit)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def send_answer(send: Send, result: Answer) -> None:
    """Sends an answer as ASGI has it."""
    fields = [("content-type", result.content_type), ("content-length", str(len(result.body))), *result.headers]
    headers = [(name.lower().encode(), value.encode()) for name, value in fields]
    await send({"type": "http.response.start", "status": result.status, "headers": headers})
    await send({"type": "http.response.body", "body": result.body})
