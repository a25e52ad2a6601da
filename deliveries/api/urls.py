"""Addresses of the API, each with and without a trailing slash."""

from typing import Any

from django.urls import re_path

from deliveries.api.deliveries import CancelView, DeliveriesView, DeliveryView, ReplayView
from deliveries.api.endpoints import ConfirmView, EndpointsView, EndpointView, TestView, VerificationView
from deliveries.api.events import BatchView, EventsView, EventView
from deliveries.api.replay import ReplayedView, ReplaysView
from deliveries.api.rules import CreditsView, DryRunView, RulesView, RuleView


def resource(path: str, view: Any) -> Any:
    """An address; `<name>` in it takes a segment."""
    pattern = path.replace("<", "(?P<").replace(">", ">[^/]+)")
    return re_path(rf"^{pattern}/?\Z", view.as_view())


urlpatterns = [
    resource("events", EventsView),
    resource("events/batch", BatchView),
    resource("events/<event_id>", EventView),
    resource("deliveries", DeliveriesView),
    resource("deliveries/<delivery_id>", DeliveryView),
    resource("deliveries/<delivery_id>/replay", ReplayView),
    resource("deliveries/<delivery_id>/cancel", CancelView),
    resource("replay", ReplaysView),
    resource("replay/<event_id>", ReplayedView),
    resource("rules", RulesView),
    resource("rules/dry-run", DryRunView),
    resource("rules/<rule_id>", RuleView),
    resource("credits", CreditsView),
    *(
        resource(f"{name}{path}", view)
        for name in ("endpoints", "webhooks")
        for path, view in (
            ("", EndpointsView),
            ("/<endpoint_id>", EndpointView),
            ("/<endpoint_id>/verification", VerificationView),
            ("/<endpoint_id>/verification/confirm", ConfirmView),
            ("/<endpoint_id>/test", TestView),
        )
    ),
]
