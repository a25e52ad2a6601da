"""Screens for tenants, keys, endpoints, event types and the audit."""

import json
import re
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import JSONField, QuerySet
from django.forms.fields import InvalidJSONInput
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.safestring import SafeString
from django.utils.timezone import now

from endpoints.models import ApiKey, AuditEvent, Endpoint, EventType, Tenant
from endpoints.services import Actor, create_api_key, create_endpoint, record_audit, revoke_api_key, rotate_secret
from webhookhub.admin import HubModelAdmin, ObjectAction, ReadOnlyAdmin, ReasonForm, Refused, pretty_json, show_once


class AuditedAdmin(HubModelAdmin):
    """What is done to these goes into the audit, and a change writes only what it changed."""

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Saves, and adds to the audit."""
        changes = {name: [_plain(form.initial.get(name)), _plain(getattr(obj, name))] for name in form.changed_data}
        if not change:
            obj.save(force_insert=True)
            self._record(request, "create", obj)
        elif changes:
            obj.save(update_fields=form.changed_data)
            self._record(request, "change", obj, changes)

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Adds to the audit, and deletes."""
        self._record(request, "delete", obj)
        obj.delete()

    def _record(self, request: HttpRequest, verb: str, obj: Any, changes: dict[str, Any] | None = None) -> None:
        action = f"{str(self.opts.verbose_name).lower().replace(' ', '_')}.{verb}"
        tenant = None if isinstance(obj, Tenant) else obj.tenant
        record_audit(actor=Actor.of_request(request), action=action, of=obj, tenant=tenant, changes=changes)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    return value if isinstance(value, str | list | None) else str(value)


class TenantAdmin(AuditedAdmin):
    """Tenants. `deliveries.admin` adds the switch of their webhooks, and registers it."""

    list_display = ["name", "typeid", "created_at"]
    search_fields = ["name"]
    search_ids = {"ten": "id"}
    fields = ["typeid", "name", "created_at"]
    readonly_fields = ["typeid", "created_at"]
    ordering = ["name"]


def revoke(request: HttpRequest, key: ApiKey, answers: dict[str, Any]) -> str:
    """The button that makes a key useless."""
    if not revoke_api_key(key=key, actor=Actor.of_request(request), reason=answers["reason"]):
        raise Refused("The key had been revoked before.")
    return f"Revoked {key}. Requests with it are refused within 2 seconds."


@admin.register(ApiKey)
class ApiKeyAdmin(AuditedAdmin):
    """API keys. The key's text is shown once, in the answer to its creation."""

    list_display = ["name", "tenant", "typeid", "created_at", "expires_at", "revoked_at"]
    list_select_related = ["tenant"]
    search_fields = ["name"]
    search_ids = {"whk": "id", "ten": "tenant_id"}
    fields = ["typeid", "tenant", "endpoint", "name", "expires_at", "revoked_at", "created_at"]
    autocomplete_fields = ["tenant", "endpoint"]
    readonly_fields = ["typeid", "created_at", "revoked_at"]
    fixed_fields = ["tenant", "endpoint"]
    object_actions = [
        ObjectAction(
            "revoke",
            "Revoke…",
            "endpoints.change_apikey",
            lambda key: (
                f"Revoke the key “{key}”? Programs that use it are refused within 2 seconds, and it cannot be undone."
            ),
            revoke,
            why_not=lambda key: "The key has been revoked." if key.revoked_at else "",
        )
    ]

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


class SchemaField(forms.JSONField):
    """JSON that the database can hold: neither too deep nor with numbers or characters that it does not know."""

    def to_python(self, value: Any) -> Any:
        """The value."""
        if value and not _is_sound(value):
            raise forms.ValidationError(
                "This is no JSON that can be kept: too deep, or with NaN, NUL or half characters."
            )
        return super().to_python(value)

    def bound_data(self, data: Any, initial: Any) -> Any:
        """What the form shows again."""
        sound = isinstance(data, str) and _is_sound(data)
        return super().bound_data(data, initial) if sound else InvalidJSONInput(data or "")


def _is_sound(text: str) -> bool:
    try:
        kept = json.dumps(json.loads(text), allow_nan=False, ensure_ascii=False)
        kept.encode()
    except (ValueError, RecursionError):
        return False
    return "\\u0000" not in kept


@admin.register(EventType)
class EventTypeAdmin(AuditedAdmin):
    """A tenant's catalogue of event types."""

    formfield_overrides = {JSONField: {"form_class": SchemaField}}

    list_display = ["name", "tenant", "mode", "description", "created_at"]
    list_select_related = ["tenant"]
    list_filter = ["mode"]
    search_fields = ["name"]
    search_ids = {"ety": "id", "ten": "tenant_id"}
    fields = ["tenant", "name", "description", "mode", "lifecycle_sequence", "schema", "schema_at", "created_at"]
    autocomplete_fields = ["tenant"]
    readonly_fields = ["lifecycle_sequence", "schema_at", "created_at"]
    fixed_fields = ["tenant", "name", "mode"]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Not what a contract or a rule goes by: its events would be sent to everybody."""
        return super().has_delete_permission(request, obj) and (obj is None or obj.is_plain)

    def save_model(self, request: HttpRequest, obj: EventType, form: Any, change: bool) -> None:
        """Notes when the schema changes: events that did not fit it are tried again then."""
        if change and "schema" in form.changed_data:
            form.changed_data.append("schema_at")
            obj.schema_at = now()
        super().save_model(request, obj, form, change)


class RuleAdmin(AuditedAdmin):
    """Rules of conditional destinations. `deliveries.admin` adds the dry run, and registers it."""

    list_display = ["name", "tenant", "event_type", "position", "endpoint", "enabled"]
    list_select_related = ["tenant", "endpoint"]
    list_filter = ["enabled"]
    search_fields = ["name"]
    search_ids = {"rul": "id", "ten": "tenant_id", "ep": "endpoint_id"}
    ordering = ["tenant", "event_type", "position", "id"]
    fields = ["typeid", "tenant", "name", "event_type", "condition", "endpoint", "position", "enabled", "created_at"]
    autocomplete_fields = ["tenant", "endpoint"]
    readonly_fields = ["typeid", "created_at"]
    fixed_fields = ["tenant"]


class RotateForm(ReasonForm):
    """How long the secrets before go on signing."""

    field_order = ["overlap", "reason"]
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


class EndpointAdmin(AuditedAdmin):
    """Endpoints. A signing secret is shown once, in the answer to its making.

    `deliveries.admin` adds what concerns deliveries (pause, resume), and registers it.
    """

    list_display = ["name", "tenant", "status", "health", "contract", "url", "created_at"]
    list_filter = ["status", "contract"]
    ordering = ["name", "id"]
    search_fields = ["name", "tenant__name"]
    search_help_text = "Name, tenant, ep_… or ten_…"
    search_ids = {"ep": "id", "ten": "tenant_id"}
    autocomplete_fields = ["tenant"]
    fields = [
        "typeid",
        "tenant",
        "name",
        "url",
        "contract",
        "event_types",
        "rate_limit",
        "max_in_flight",
        "ordered",
        "status",
        "status_reason",
        "status_at",
        "shown_health",
        "verified_at",
        "dead_in_a_row",
        "created_at",
    ]
    readonly_fields = [
        "typeid",
        "shown_health",
        "status",
        "status_reason",
        "status_at",
        "verified_at",
        "dead_in_a_row",
        "created_at",
    ]
    fixed_fields = ["tenant"]
    object_actions = [
        ObjectAction(
            "rotate",
            "Rotate secret…",
            "endpoints.rotate_secret",
            lambda endpoint: f"Create a new signing secret for “{endpoint}”? It is shown once.",
            rotate,
            RotateForm,
        )
    ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Endpoint]:
        """An endpoint is named with its tenant."""
        return super().get_queryset(request).select_related("tenant")

    @admin.display(description="health")
    def shown_health(self, endpoint: Endpoint) -> str:
        """How it does, and what comes of it."""
        if endpoint.health == "healthy":
            return "Healthy."
        failing = f"{endpoint.failures_in_a_row} attempts in a row have failed, the first at {endpoint.failing_since}."
        if endpoint.health == "open":
            return f"Open: {failing} What is due waits, and a single request probes it at {endpoint.probe_at}."
        return f"Failing: {failing}" if endpoint.failures_in_a_row else "It has just recovered."

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """What is deleted is found in the list, and is no choice for something new."""
        found, has_duplicates = super().get_search_results(request, queryset, search_term)
        if request.path == reverse("admin:autocomplete"):
            found = found.exclude(status=Endpoint.Status.DELETED)
        return found, has_duplicates

    def choice_label(self, obj: Endpoint) -> str:
        """Name and tenant."""
        return f"{obj.name} of {obj.tenant}"

    def save_model(self, request: HttpRequest, obj: Endpoint, form: Any, change: bool) -> None:
        """Makes a new endpoint by the service, and keeps its secret for the answer."""
        if change:
            super().save_model(request, obj, form, change)
        else:
            request.shown_once = create_endpoint(endpoint=obj, actor=Actor.of_request(request))  # type: ignore[attr-defined]

    def response_add(self, request: HttpRequest, obj: Endpoint, post_url_continue: str | None = None) -> HttpResponse:
        """Shows the signing secret."""
        return show_secret(request, obj, request.shown_once)  # type: ignore[attr-defined]


class ActionFilter(admin.SimpleListFilter):
    """What was acted on. Fixed: asking the table which actions it holds would read all of it for each page."""

    title = "object"
    parameter_name = "on"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """The first words of actions."""
        return [
            ("endpoint", "Endpoints"),
            ("delivery", "Deliveries"),
            ("replay_job", "Replay jobs"),
            ("api_key", "API keys"),
            ("tenant", "Tenants"),
            ("event_type", "Event types"),
            ("event", "Events"),
            ("rule", "Rules"),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[AuditEvent]) -> QuerySet[AuditEvent]:
        """Actions by their first word."""
        return queryset.filter(action__startswith=f"{self.value()}.") if self.value() else queryset


@admin.register(AuditEvent)
class AuditEventAdmin(ReadOnlyAdmin):
    """Who did what. Read-only for everybody."""

    list_display = ["created_at", "actor", "address", "action", "object_name", "tenant", "reason"]
    list_select_related = ["tenant"]
    list_filter = [ActionFilter, "actor_kind"]
    search_fields = ["actor", "object_name"]
    search_help_text = "Actor, name, or id of what it was done to"
    readonly_fields = [
        "created_at",
        "actor_kind",
        "actor",
        "address",
        "action",
        "tenant",
        "object_name",
        "object_id",
        "reason",
        "changed",
    ]
    fields = (*readonly_fields,)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """An id finds what was done to its object, by equality."""
        if re.fullmatch(r"[a-z]+_[0-9a-z]{26}", search_term.strip()):
            return queryset.filter(object_id=search_term.strip()), False
        return super().get_search_results(request, queryset, search_term)

    @admin.display(description="changes")
    def changed(self, event: AuditEvent) -> SafeString:
        """Before and after."""
        return pretty_json(event.changes)
