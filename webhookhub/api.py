"""What every API of ours shares: problem documents (RFC 9457), JSON, and the reading of an Idempotency-Key."""

import logging
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.views import defaults
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions, renderers

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

    def answer(self) -> Answer:
        """As a problem document."""
        document: dict[str, Any] = {
            "type": "about:blank",
            "title": TITLES.get(self.status, "Error"),
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
        }
        if self.pointer:
            document["errors"] = [{"pointer": self.pointer, "code": self.code, "detail": self.detail}]
        return Answer(self.status, msgspec.json.encode(document), PROBLEM, tuple(self.headers.items()))


def exception_handler(error: Exception, context: dict[str, Any]) -> HttpResponse | None:
    """Every error of a DRF view as a problem document."""
    if isinstance(error, Http404):
        error = exceptions.NotFound()
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    if isinstance(error, exceptions.APIException):
        headers = {}
        if isinstance(error, exceptions.MethodNotAllowed):
            headers["Allow"] = ", ".join(context["view"].allowed_methods)
        error = Problem(error.status_code, str(error.default_code), str(error.detail), headers=headers)
    return error.answer().to_django() if isinstance(error, Problem) else None


@csrf_exempt
def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """Any path of the API that leads nowhere."""
    detail = f"{request.path} is no resource of this API; it has /v1/events"
    return Problem(404, "not_found", detail).answer().to_django()


def server_error(request: HttpRequest) -> HttpResponse:
    """An error of ours: for programs as a problem document, for people as Django's page."""
    if request.path.startswith("/v1/"):
        return Problem(500, "internal", "A fault of ours; it has been logged").answer().to_django()
    return defaults.server_error(request)


class JSONRenderer(renderers.JSONRenderer):
    """DRF's JSON, for responses that are not an Answer."""

    def render(self, data: Any, *args: Any, **kwargs: Any) -> bytes:
        """Compact JSON in UTF-8."""
        return msgspec.json.encode(data)


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
    if not key:
        raise Problem(400, "idempotency_key_empty", "Idempotency-Key is empty; leave it out, or send a key of your own")
    if len(key) > MAX_KEY_CHARS:
        raise Problem(400, "idempotency_key_too_long", f"Idempotency-Key is longer than {MAX_KEY_CHARS} characters")
    return key
