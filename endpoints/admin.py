"""Screens for tenants, keys, endpoints, event types and the audit."""

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from endpoints.models import ApiKey, AuditEvent, Endpoint, EventType, Tenant
from endpoints.services import Actor, create_api_key, create_endpoint, record_audit, revoke_api_key, rotate_secret
from webhookhub.admin import HubModelAdmin, ObjectAction, ReadOnlyAdmin, ReasonForm, Refused, show_once


@admin.register(Tenant)
class TenantAdmin(HubModelAdmin):
    """Tenants."""

    list_display = ["name", "typeid", "created_at"]
    search_fields = ["name"]
    search_ids = {"ten": "id"}
    readonly_fields = ["typeid", "created_at"]
    ordering = ["name"]


def revoke(request: HttpRequest, key: ApiKey, answers: dict[str, Any]) -> str:
    """The button that makes a key useless."""
    if not revoke_api_key(key=key, actor=Actor.of_request(request), reason=answers["reason"]):
        raise Refused("The key had been revoked before.")
    return f"Revoked {key}. Requests with it are refused from now on."


@admin.register(ApiKey)
class ApiKeyAdmin(HubModelAdmin):
    """API keys. The key's text is shown once, in the answer to its creation."""

    list_display = ["name", "tenant", "typeid", "created_at", "expires_at", "revoked_at"]
    list_select_related = ["tenant"]
    search_fields = ["name"]
    search_ids = {"whk": "id", "ten": "tenant_id"}
    autocomplete_fields = ["tenant"]
    readonly_fields = ["typeid", "created_at", "revoked_at"]
    object_actions = [
        ObjectAction(
            "revoke",
            "Revoke…",
            "endpoints.change_apikey",
            "Revoke the key “{object}”? Programs that use it are refused at once, and it cannot be undone.",
            revoke,
        )
    ]

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> list[str]:
        """A key never moves to another tenant."""
        return [*self.readonly_fields, *(["tenant"] if obj else [])]

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """Makes a new key by the service, and keeps its text for the answer."""
        if change:
            super().save_model(request, obj, form, change)
        else:
            request.shown_once = create_api_key(key=obj, actor=Actor.of_request(request))  # type: ignore[attr-defined]

    def response_add(self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None) -> HttpResponse:
        """Shows the key."""
        return show_once(
            request,
            title=f"API key of {obj.tenant}",
            text=request.shown_once,  # type: ignore[attr-defined]
            advice="Copy it now: it is not shown again. Programs send it as Authorization: Bearer <key>.",
            next_url=reverse("admin:endpoints_apikey_change", args=[obj.pk]),
        )


@admin.register(EventType)
class EventTypeAdmin(HubModelAdmin):
    """A tenant's catalogue of event types."""

    list_display = ["name", "tenant", "description", "created_at"]
    list_select_related = ["tenant"]
    search_fields = ["name"]
    search_ids = {"ten": "tenant_id"}
    autocomplete_fields = ["tenant"]
    readonly_fields = ["created_at"]


class RotateForm(ReasonForm):
    """How long the secrets before go on signing."""

    overlap = forms.TypedChoiceField(
        coerce=int,
        choices=[(0, "none: the old secret has leaked"), (3600, "1 hour"), (86_400, "24 hours"), (604_800, "7 days")],
        initial=86_400,
        help_text="Until then both secrets sign every request; after it, receivers that use the old one refuse them.",
    )


def rotate(request: HttpRequest, endpoint: Endpoint, answers: dict[str, Any]) -> HttpResponse:
    """The button that makes a new signing secret, and shows it."""
    secret = rotate_secret(
        endpoint=endpoint,
        actor=Actor.of_request(request),
        overlap=timedelta(seconds=answers["overlap"]),
        reason=answers["reason"],
    )
    return show_secret(request, endpoint, secret)


def show_secret(request: HttpRequest, endpoint: Endpoint, secret: str) -> HttpResponse:
    """The one page that a signing secret is ever on."""
    return show_once(
        request,
        title=f"Signing secret of {endpoint}",
        text=secret,
        advice="Copy it now: it is not shown again. The receiver verifies every request with it.",
        next_url=reverse("admin:endpoints_endpoint_change", args=[endpoint.pk]),
    )


class EndpointAdmin(HubModelAdmin):
    """Endpoints. A signing secret is shown once, in the answer to its making.

    `deliveries.admin` adds what concerns deliveries (pause, resume), and registers it.
    """

    list_display = ["name", "tenant", "status", "contract", "url", "created_at"]
    list_select_related = ["tenant"]
    list_filter = ["status", "contract"]
    search_fields = ["name"]
    search_ids = {"ep": "id", "ten": "tenant_id"}
    autocomplete_fields = ["tenant"]
    fields = [
        "typeid",
        "tenant",
        "name",
        "url",
        "contract",
        "event_types",
        "status",
        "status_reason",
        "status_at",
        "created_at",
    ]
    readonly_fields = ["typeid", "status", "status_reason", "status_at", "created_at"]
    object_actions = [
        ObjectAction(
            "rotate",
            "Rotate secret…",
            "endpoints.rotate_secret",
            "Create a new signing secret for “{object}”? It is shown once.",
            rotate,
            RotateForm,
        )
    ]

    def get_readonly_fields(self, request: HttpRequest, obj: Endpoint | None = None) -> list[str]:
        """An endpoint never moves to another tenant."""
        return [*self.readonly_fields, *(["tenant"] if obj else [])]

    def save_model(self, request: HttpRequest, obj: Endpoint, form: Any, change: bool) -> None:
        """Makes a new endpoint by the service, and keeps its secret for the answer; a change goes into the audit."""
        actor = Actor.of_request(request)
        if not change:
            request.shown_once = create_endpoint(endpoint=obj, actor=actor)  # type: ignore[attr-defined]
        elif form.changed_data:
            obj.save(update_fields=form.changed_data)
            changes = {name: [form.initial.get(name), form.cleaned_data[name]] for name in form.changed_data}
            record_audit(actor=actor, action="endpoint.change", of=obj, tenant=obj.tenant, changes=changes)

    def response_add(self, request: HttpRequest, obj: Endpoint, post_url_continue: str | None = None) -> HttpResponse:
        """Shows the signing secret."""
        return show_secret(request, obj, request.shown_once)  # type: ignore[attr-defined]


@admin.register(AuditEvent)
class AuditEventAdmin(ReadOnlyAdmin):
    """Who did what. Read-only for everybody."""

    list_display = ["created_at", "actor", "address", "action", "object_name", "tenant", "reason"]
    list_select_related = ["tenant"]
    list_filter = ["action", "actor_kind"]
    search_fields = ["object_id", "actor"]
    ordering = ["-id"]
