"""What every API of ours shares: problem documents (RFC 9457), JSON, ids, pages, the reading of an Idempotency-Key."""

import logging
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.core import signing
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.views import defaults
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions, renderers, serializers

from webhookhub.ids import parse_typeid, typeid

logger = logging.getLogger(__name__)

PROBLEM = "application/problem+json"
TITLES = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Request timeout",
    409: "Conflict",
    410: "Gone",
    413: "Content too large",
    415: "Unsupported media type",
    422: "Unprocessable content",
    429: "Too many requests",
    500: "Internal server error",
    503: "Service unavailable",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A response as status, header fields and body: the same for the fast lane and for Django."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()

    def to_django(self) -> HttpResponse:
        """The same as Django's response."""
        return HttpResponse(self.body, status=self.status, content_type=self.content_type, headers=dict(self.headers))


@dataclass(eq=False)
class Problem(Exception):
    """A refusal that the caller can act on: `code` for programs, `detail` for people, `pointer` to the place."""

    status: int
    code: str
    detail: str
    pointer: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def answer(self, **members: Any) -> Answer:
        """As a problem document, with further members of its own."""
        document = {"type": "about:blank", "title": TITLES.get(self.status, "Error"), **self.members(), **members}
        return Answer(self.status, msgspec.json.encode(document), PROBLEM, tuple(self.headers.items()))

    def members(self) -> dict[str, Any]:
        """What is the refusal's own in a problem document."""
        own: dict[str, Any] = {"status": self.status, "detail": self.detail, "code": self.code}
        if self.pointer:
            own["errors"] = [{"pointer": self.pointer, "code": self.code, "detail": self.detail}]
        return own


def exception_handler(error: Exception, context: dict[str, Any]) -> HttpResponse | None:
    """Every error of a DRF view as a problem document."""
    if isinstance(error, Http404):
        error = exceptions.NotFound()
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    if isinstance(error, exceptions.ValidationError):
        return _invalid(error).to_django()
    if isinstance(error, exceptions.APIException):
        headers = {}
        if isinstance(error, exceptions.MethodNotAllowed):
            headers["Allow"] = ", ".join(context["view"].allowed_methods)
        error = Problem(error.status_code, str(error.default_code), str(error.detail), headers=headers)
    return error.answer().to_django() if isinstance(error, Problem) else None


def _invalid(error: exceptions.ValidationError) -> Answer:
    """What is wrong with the members of a body, each with its place."""
    faults = [(f"/{name}", fault) for name, found in _by_name(error.detail) for fault in found]
    document = {
        "type": "about:blank",
        "title": TITLES[400],
        "status": 400,
        "detail": " ".join(str(fault) for _, fault in faults),
        "code": "invalid",
        "errors": [{"pointer": place, "code": fault.code, "detail": str(fault)} for place, fault in faults],
    }
    return Answer(400, msgspec.json.encode(document), PROBLEM)


def _by_name(detail: Any, name: str = "") -> Iterator[tuple[str, list[exceptions.ErrorDetail]]]:
    if isinstance(detail, dict):
        for key, inner in detail.items():
            yield from _by_name(inner, f"{name}/{key}" if name else str(key))
    elif isinstance(detail, list) and detail and isinstance(detail[0], dict | list):
        for number, inner in enumerate(detail):
            yield from _by_name(inner, f"{name}/{number}")
    elif detail:
        yield name, detail if isinstance(detail, list) else [detail]


class IdField(serializers.Field[uuid.UUID, str, str, Any]):
    """A key, shown as a TypeID of `prefix`."""

    def __init__(self, prefix: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prefix = prefix

    def to_representation(self, value: uuid.UUID) -> str:
        """The TypeID."""
        return typeid(self.prefix, value)

    def to_internal_value(self, data: Any) -> uuid.UUID:
        """The key; anything but a TypeID of the prefix is invalid."""
        try:
            return parse_typeid(self.prefix, str(data))
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from error


MAX_LIMIT = 250  # rows of one page
DEFAULT_LIMIT = 50
_cursors = signing.Signer(salt="webhookhub.api.cursor", sep=".")


def read_query(query: QueryDict, known: Collection[str]) -> dict[str, str]:
    """The parameters of a query, each given once and one of these, or `limit` or `cursor`. Raises Problem 400."""
    for name, values in query.lists():
        if name not in {*known, "limit", "cursor"}:
            detail = f"There is no parameter {name!r} here; there are {', '.join([*known, 'limit', 'cursor'])}"
            raise Problem(400, "unknown_parameter", detail)
        if len(values) > 1 or "\0" in values[0]:
            raise Problem(400, "parameter_invalid", f"Give {name} once, as text without NUL")
    return query.dict()  # type: ignore[return-value]


def page_of(
    rows: QuerySet[Any],
    query: Mapping[str, str],
    *,
    show: Callable[[Any], Any],
    key: str = "id",
    newest_first: bool = True,
) -> dict[str, Any]:
    """A page of rows in the order of a UUIDv7 that each has alone: `data`, and `next_cursor` when the page is full.

    `limit` and `cursor` come from the query. Raises Problem 400 for what they cannot be.
    """
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LIMIT):
        raise Problem(400, "limit_invalid", f"limit must be a number from 1 to {MAX_LIMIT}")
    if "cursor" in query:
        try:
            after = uuid.UUID(_cursors.unsign(query["cursor"]))
        except (signing.BadSignature, ValueError) as error:
            raise Problem(400, "cursor_invalid", "cursor must be a next_cursor of an earlier page") from error
        rows = rows.filter(**{f"{key}__{'lt' if newest_first else 'gt'}": after})
    found = list(rows.order_by(f"-{key}" if newest_first else key)[: int(limit)])
    page: dict[str, Any] = {"data": [show(row) for row in found]}
    if len(found) == int(limit):
        page["next_cursor"] = _cursors.sign(getattr(found[-1], key).hex)
    return page


@csrf_exempt
def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """Any path of the API that leads nowhere."""
    detail = f"{request.path} is no resource of this API; docs/api.md lists them"
    return Problem(404, "not_found", detail).answer().to_django()


def server_error(request: HttpRequest) -> HttpResponse:
    """An error of ours: for programs as a problem document, for people as Django's page."""
    if request.path.startswith("/v1/"):
        return Problem(500, "internal", "A fault of ours; it has been logged").answer().to_django()
    return defaults.server_error(request)


class JSONRenderer(renderers.JSONRenderer):
    """DRF's JSON, for responses that are not an Answer."""

    def render(self, data: Any, *args: Any, **kwargs: Any) -> bytes:
        """Compact JSON in UTF-8; nothing where there is no data, since a 204 has no body."""
        return b"" if data is None else msgspec.json.encode(data)


_SF_STRING = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')  # RFC 8941 section 3.3.3
_BARE = re.compile(r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x7e]+")  # visible ASCII without quote, comma and semicolon
MAX_KEY_CHARS = 255


def parse_idempotency_key(value: str | None) -> str | None:
    """The key in an `Idempotency-Key` field, quoted (the IETF draft) or bare (most clients); None without one.

    Raises Problem 400 for an empty, malformed or overlong one.
    """
    if value is None:
        return None
    value = value.strip(" \t")
    if quoted := _SF_STRING.fullmatch(value):
        key = re.sub(r'\\(["\\])', r"\1", quoted[1])
    elif not value or _BARE.fullmatch(value):
        key = value
    else:
        raise Problem(
            400,
            "idempotency_key_malformed",
            'Idempotency-Key must be one key: visible ASCII, or a quoted string like "8e03978e-40d5"',
        )
    return check_key(key)


def check_key(key: str) -> str:
    """An idempotency key as it was given. Raises Problem 400 for an empty or overlong one."""
    if not key:
        raise Problem(
            400, "idempotency_key_empty", "The idempotency key is empty; leave it out, or give one of your own"
        )
    if len(key) > MAX_KEY_CHARS:
        raise Problem(400, "idempotency_key_too_long", f"The idempotency key is longer than {MAX_KEY_CHARS} characters")
    return key
