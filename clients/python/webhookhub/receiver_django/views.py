"""A receiver as a Django view: `path("webhooks/", webhook_view(receiver))`."""

from __future__ import annotations

from collections.abc import Callable

from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from webhookhub.receiver import Receiver

__all__ = ["webhook_view"]


def webhook_view(receiver: Receiver) -> Callable[[HttpRequest], HttpResponse]:
    """The view. It is exempt from CSRF checks (the signature is the proof), and from ATOMIC_REQUESTS: a claim must be
    seen by other requests at once.
    """

    @csrf_exempt
    @require_POST
    def view(request: HttpRequest) -> HttpResponse:
        response = receiver.receive(request.read(receiver.max_body + 1), request.headers)
        return HttpResponse(response.body, status=response.status, headers=response.headers)

    for alias in connections:
        view = transaction.non_atomic_requests(alias)(view)
    return view
