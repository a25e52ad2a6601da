"""The API of events. `POST /v1/events` comes here only where the fast lane does not serve (plain WSGI, tests)."""

from django.conf import settings
from django.http import HttpResponse
from rest_framework.request import Request
from rest_framework.views import APIView

from deliveries.intake import answer, check_head, read_event, tenant_of, too_large
from deliveries.services import publish_events


class EventsView(APIView):
    """Events of a tenant."""

    def post(self, request: Request) -> HttpResponse:
        """Takes one event in: stored, with its deliveries, before the answer."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        check_head(headers)
        tenant_id = tenant_of(headers.get("authorization"))
        body = request.body
        if len(body) > settings.INTAKE_BODY_BYTES:
            raise too_large()
        event = read_event(tenant_id, headers, body)
        return answer(event, publish_events([event])[0]).to_django()
