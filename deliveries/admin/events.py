"""Screens for events and projection gaps."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from deliveries.admin.shared import MOST, link, viewable
from deliveries.control import CHALLENGE_TYPE
from deliveries.models import Event, ProjectionGap
from deliveries.replays import NotReplayable, delete_payload
from endpoints.services import Actor
from webhookhub.admin import (
    ObjectAction,
    ReadOnlyAdmin,
    Refused,
    RequiredReasonForm,
    pretty_bytes,
    pretty_json,
    visible,
)


def remove_payload(request: HttpRequest, event: Event, answers: dict[str, Any]) -> str:
    """The button that deletes a payload."""
    try:
        delete_payload(event=event, actor=Actor.of_request(request), reason=answers["reason"])
    except NotReplayable as error:
        raise Refused(str(error)) from error
    return "Deleted. The event stays in the log and cannot be sent again."


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    """Events as they were posted, with where they went."""

    list_display = ["accepted_at", "event_type", "tenant", "state", "caller_key", "typeid"]
    list_filter = ["state"]
    list_display_links = ["accepted_at", "typeid"]
    list_select_related = ["tenant"]
    search_fields = ["id"]
    search_ids = {"evt": "id", "ten": "tenant_id"}
    search_help_text = "A whole id: evt_… or ten_…"
    readonly_fields = [
        "tenant",
        "event_type",
        "state",
        "gap_detail",
        "accepted_at",
        "sequence",
        "caller_key",
        "key",
        "about",
        "content_type",
        "sent_to",
        "body",
    ]
    fields = (*readonly_fields,)
    object_actions = [
        ObjectAction(
            "delete_payload",
            "Delete payload…",
            "deliveries.delete_payload",
            lambda event: (
                f"Delete the payload of {event} for good? What waits to be sent of it is discarded, and it "
                "cannot be sent again."
            ),
            remove_payload,
            RequiredReasonForm,
            lambda event: "It has been deleted." if event.payload_deleted_at else "",
        )
    ]

    def get_queryset(self, request: HttpRequest) -> Any:
        """Lists do without the payloads."""
        return super().get_queryset(request).defer("payload", "projection")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """The payload is for those who may see it."""
        return viewable(request, self.readonly_fields)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """As above."""
        return self.get_readonly_fields(request, obj)

    @admin.display(description="type", ordering="type")
    def event_type(self, event: Event) -> str:
        """The type; whoever posts chooses it."""
        return visible(event.type)

    @admin.display(description="metadata")
    def about(self, event: Event) -> SafeString:
        """What the caller said about it."""
        return pretty_json(event.metadata)

    @admin.display(description="payload")
    def body(self, event: Event) -> SafeString:
        """The payload, escaped. A challenge is for its receiver alone to know."""
        if event.payload_deleted_at:
            return format_html("Deleted at {}.", event.payload_deleted_at)
        if event.type == CHALLENGE_TYPE and event.state == Event.State.CONTROL:
            return format_html("{}", "A challenge, which only its receiver is shown.")
        return pretty_bytes(event.payload)

    @admin.display(description="projection")
    def gap_detail(self, event: Event) -> str:
        """What does not fit the limits of its type, and whether it was repaired."""
        gap = ProjectionGap.objects.filter(event=event).first()
        if gap is None:
            return "–"
        return visible(f"{gap.detail} " + (f"Repaired at {gap.repaired_at}." if gap.repaired_at else "Not repaired."))

    @admin.display(description="deliveries")
    def sent_to(self, event: Event) -> SafeString | str:
        """A line for each delivery."""
        deliveries = event.deliveries.select_related("endpoint").order_by("-id")[:MOST]
        rows = ((one.get_state_display(), link(one.endpoint, one.endpoint.name), link(one)) for one in deliveries)
        return format_html_join("", "<p>{}: {} {}</p>", rows) or "No endpoint asked for this type when it was posted."


class RepairedFilter(admin.SimpleListFilter):
    """Whether gaps are repaired."""

    title = "repaired"
    parameter_name = "repaired"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Yes and no."""
        return [("no", "Not yet"), ("yes", "Repaired")]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """By the time of repair."""
        return queryset.filter(repaired_at__isnull=self.value() == "no") if self.value() else queryset


@admin.register(ProjectionGap)
class ProjectionGapAdmin(ReadOnlyAdmin):
    """Events that do not fit their type's limits. A change of the type's schema has them tried again."""

    list_display = ["created_at", "event_link", "event_type", "detail", "tried_at", "repaired_at"]
    list_select_related = ["event"]
    list_filter = [RepairedFilter]
    search_fields = ["id"]
    search_ids = {"gap": "id", "evt": "event_id", "ten": "event__tenant_id"}
    search_help_text = "A whole id: gap_…, evt_… or ten_…"
    readonly_fields = ["event_link", "event_type", "detail", "created_at", "tried_at", "repaired_at"]
    fields = (*readonly_fields,)

    def get_queryset(self, request: HttpRequest) -> Any:
        """Without the payloads."""
        return super().get_queryset(request).defer("event__payload", "event__projection")

    @admin.display(description="event")
    def event_link(self, gap: ProjectionGap) -> SafeString:
        """The event."""
        return link(gap.event)

    @admin.display(description="type")
    def event_type(self, gap: ProjectionGap) -> str:
        """The event's type."""
        return visible(gap.event.type)
