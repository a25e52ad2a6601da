"""Response headers that every page carries."""

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

# Scripts, styles, images and fonts only from our own files; nothing inline, nothing framed, nothing posted elsewhere.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)


class ContentSecurityPolicy:
    """Sets one strict Content-Security-Policy on every response: the admin shows bytes that strangers wrote."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answers as the rest of Django does, with the header."""
        response = self.get_response(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response
