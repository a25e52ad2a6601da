"""Receive webhooks: verify each request, process each message once, answer a repetition as the first time.

    from webhookhub.receiver import Message, Receiver
    from webhookhub.stores import SqliteStore

    def handle(message: Message) -> None:
        book(json.loads(message.body))

    receiver = Receiver(SECRET, handle, SqliteStore("webhooks.sqlite3"))
    application = receiver.wsgi  # or receiver.receive(body, headers) in a framework's view

Needs the standard library alone. Runs on Python 3.9 and newer.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from webhookhub.signatures import SecretError, VerificationError, Verified, check_secrets, id_header, lower, verify

if TYPE_CHECKING:
    from webhookhub.stores import Store

__all__ = ["Message", "Receiver", "Response", "SecretError", "VerificationError", "Verified", "verify"]

KEEP = 72 * 3600  # seconds: as long as senders may replay
MAX_BODY = 2**20  # bytes
RETRYABLE = frozenset({408, 425, 429})  # and 5xx: the sender tries again after these
POLL = 0.05  # seconds between two looks at a message that another is processing

_NAME = re.compile(r"[ -~]{1,255}")
_BARE = re.compile(r"[!#-+\--:<-~]*")  # visible ASCII without quote, comma and semicolon
_SF_STRING = re.compile(r'"(?:[ !#-\[\]-~]|\\["\\])*"')  # RFC 8941 section 3.3.3


class Message(NamedTuple):
    """A request that verified. `headers` have lower-case names; `body` is what was signed, to the byte.

    `key` is the Idempotency-Key, or the message id where there is none. `message_id` is None when the sender names
    none; `timestamp` (Unix seconds) is None in the schemes that sign none.
    """

    key: str
    message_id: str | None
    timestamp: int | None
    body: bytes
    headers: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """What the message is known by in a store, sorted.

        Both, because Standard Webhooks signs the id and not the key: a captured request sent again with another key
        is known by its id.
        """
        names = [f"key:{self.key}"] if self.key != self.message_id else []
        return names if self.message_id is None else [f"id:{self.message_id}", *names]


class Response(NamedTuple):
    """An answer. `retry_after` (seconds) is for statuses after which the sender tries again, and is not stored.

    `repeated` tells that the message was known, and this is what was answered the first time.
    """

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    retry_after: int | None = None
    repeated: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """The header lines."""
        lines = {"Content-Type": self.content_type, "Content-Length": str(len(self.body))}
        if self.status in (204, 304):  # which have no content
            lines.clear()
        if self.retry_after is not None:
            lines["Retry-After"] = str(self.retry_after)
        return lines


Handle = Callable[[Message], Union[int, Response, None]]


class Receiver:
    """Verifies requests with any of the secrets, and has `handle` process each message once.

    `handle` returns nothing (200), a status, or a Response, which `store` keeps for `keep` seconds and repeats. Nothing
    is kept of an answer after which senders try again (408, 425, 429, 5xx), or when `handle` raises: the next copy is
    processed anew. A copy that comes while the first is being processed waits up to `wait` seconds for its answer, then
    gets 409 with Retry-After. A process that dies holds a message for `lease` seconds from when it began: choose more
    than the longest that `handle` takes, for after them a copy is processed beside it.

    `tolerance` is how many seconds a timestamp may be off, `max_body` (bytes) what is answered 413 beyond it. `now` and
    `sleep` are the clock. Safe to use from several threads, as far as `handle` is.
    """

    def __init__(
        self,
        secrets: str | Iterable[str],
        handle: Handle,
        store: Store,
        *,
        scheme: str = "standard-webhooks",
        tolerance: int = 300,
        wait: float = 10.0,
        lease: float = 60.0,
        keep: float = KEEP,
        max_body: int = MAX_BODY,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._secrets = check_secrets(secrets, scheme)
        self._handle = handle
        self._store = store
        self._scheme = scheme
        self._tolerance = tolerance
        self._wait = wait
        self._lease = lease
        self._keep = keep
        self.max_body = max_body
        self._now = now
        self._sleep = sleep

    def receive(self, body: bytes, headers: Mapping[str, str]) -> Response:
        """The answer to a request. What `handle` raises comes through; answer it with 500."""
        if len(body) > self.max_body:
            return _text(413, f"the body is larger than {self.max_body} bytes")
        try:
            message = self.open(body, headers)
        except VerificationError as error:
            return _text(400, str(error))
        return self.process(message)

    def open(self, body: bytes, headers: Mapping[str, str]) -> Message:
        """The message in a request. Raises VerificationError, also when the request names neither a key nor an id."""
        verified = verify(body, headers, self._secrets, scheme=self._scheme, tolerance=self._tolerance, now=self._now())
        headers = lower(headers)
        message_id = verified.message_id or _event_id(body, headers) or headers.get(id_header(self._scheme))
        key = _parse_key(headers.get("idempotency-key", "")) or message_id
        if not key:
            raise VerificationError("missing_header", "neither Idempotency-Key nor a message id is there")
        if not (_NAME.fullmatch(key) and _NAME.fullmatch(message_id or key)):
            raise VerificationError("malformed_header", "a key or message id is not 1 to 255 printable characters")
        return Message(key, message_id or None, verified.timestamp, bytes(body), headers)

    def process(self, message: Message) -> Response:
        """The answer to a message that verified, by `handle` or by the store."""
        token = uuid.uuid4().hex
        until = self._now() + self._wait
        while (held := self._store.claim(message.names, token, lease=self._lease)) is not None:
            if held.response is not None:
                return held.response._replace(repeated=True)
            if self._now() >= until:
                return _text(409, "this message is being processed", retry_after=5)
            self._sleep(POLL)
        try:
            result = self._handle(message)
            response = result if isinstance(result, Response) else Response(200 if result is None else result)
        except BaseException:
            self._store.release(message.names, token)
            raise
        if response.status in RETRYABLE or response.status >= 500:
            self._store.release(message.names, token)
        else:
            self._store.keep(message.names, response, seconds=self._keep)
        return response

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        """The receiver as a WSGI application, at every path."""
        if environ["REQUEST_METHOD"] != "POST":
            response, more = _text(405, "webhooks are POSTed"), {"Allow": "POST"}
        else:
            # Without a length some servers' streams never end; those that end them say so.
            most = self.max_body + 1
            declared = environ.get("CONTENT_LENGTH") or "0"
            declared = int(declared) if re.fullmatch("[0-9]{1,18}", declared) else 0
            length = most if environ.get("wsgi.input_terminated") else declared
            body = environ["wsgi.input"].read(max(0, min(length, most)))
            headers = {name[5:].replace("_", "-"): value for name, value in environ.items() if name[:5] == "HTTP_"}
            headers["content-type"] = environ.get("CONTENT_TYPE", "")
            response, more = self.receive(body, headers), {}
        status = f"{response.status} {_phrase(response.status)}"
        start_response(status, list({**response.headers, **more}.items()))
        return [response.body]


def _text(status: int, text: str, *, retry_after: int | None = None) -> Response:
    return Response(status, text.encode(), retry_after=retry_after)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def _parse_key(text: str) -> str:
    """An Idempotency-Key, bare or as the IETF's draft has it: a string of RFC 8941, in quotation marks."""
    text = text.strip(" \t")
    if _SF_STRING.fullmatch(text):
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    if not _BARE.fullmatch(text):
        raise VerificationError("malformed_header", "Idempotency-Key is not one key, bare or in quotation marks")
    return text


def _event_id(body: bytes, headers: Mapping[str, str]) -> str | None:
    """The id inside a CloudEvent in structured mode: signed with the body, whatever the scheme."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/cloudevents+json":
        return None
    try:
        event = json.loads(body)
    except (ValueError, RecursionError):
        return None
    found = event.get("id") if isinstance(event, dict) else None
    return found if isinstance(found, str) and _NAME.fullmatch(found) else None
