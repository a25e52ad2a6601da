"""The admin site, and what its screens share: ids as people see them, bounded counts, buttons that ask before they act."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from webhookhub.ids import parse_typeid


class HubAdminSite(admin.AdminSite):
    """The site where ops and support work."""

    site_header = "WebhookHub"
    site_title = "WebhookHub"
    index_title = "Webhooks"
    enable_nav_sidebar = True


class BoundedPaginator(Paginator[Any]):
    """Counts no further than `most`: an exact count of millions of rows takes seconds and tells nobody anything."""

    most = 10_000

    @cached_property
    def count(self) -> int:
        """The number of rows, or `most`."""
        return int(self.object_list.order_by()[: self.most].count())  # type: ignore[union-attr]


class ReasonForm(forms.Form):
    """Why it is done; kept in the audit."""

    reason = forms.CharField(max_length=500, required=False)


class RequiredReasonForm(ReasonForm):
    """Why it is done, for what others will ask about."""

    reason = forms.CharField(max_length=500)


@dataclass(frozen=True)
class ObjectAction:
    """A button on an object's page: who may press it, what it asks, and what it does with the answers.

    `run` takes the request, the object and the form's cleaned data, and returns a message of what was done, or a page.
    """

    name: str
    label: str
    permission: str
    question: str
    run: Callable[[HttpRequest, Any, dict[str, Any]], str | HttpResponse]
    form: type[forms.Form] = ReasonForm


class Refused(Exception):
    """An object action that could not be done; the message says why and what to do."""


class HubModelAdmin(admin.ModelAdmin[Any]):
    """What every list and page of ours has in common."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    list_max_show_all = 0
    paginator = BoundedPaginator
    actions = None
    change_form_template = "admin/hub_change_form.html"
    # Where a TypeID typed into the search box is looked up: its prefix -> the field.
    search_ids: ClassVar[dict[str, str]] = {}
    object_actions: ClassVar[list[ObjectAction]] = []

    @admin.display(description="id", ordering="id")
    def typeid(self, obj: Any) -> SafeString:
        """The id as people see it."""
        return format_html("<code>{}</code>", obj.typeid)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """An id finds its row by equality; anything else goes through `search_fields`."""
        prefix, _, _ = search_term.strip().rpartition("_")
        if prefix in self.search_ids:
            try:
                return queryset.filter(**{self.search_ids[prefix]: parse_typeid(prefix, search_term.strip())}), False
            except ValueError:
                return queryset.none(), False
        if self.search_fields == ("id",):
            return (queryset.none() if search_term.strip() else queryset), False
        return super().get_search_results(request, queryset, search_term)

    def get_urls(self) -> list[URLPattern]:
        """Adds an address for each object action."""
        options = self.opts
        own = [
            path(
                f"<path:object_id>/{action.name}/",
                self.admin_site.admin_view(never_cache(require_POST(self._action_view(action)))),
                name=f"{options.app_label}_{options.model_name}_{action.name}",
            )
            for action in self.object_actions
        ]
        return own + super().get_urls()

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The object's page, with the buttons that this person may use."""
        allowed = [action for action in self.object_actions if request.user.has_perm(action.permission)]  # type: ignore[union-attr]
        return super().change_view(request, object_id, form_url, {**(extra_context or {}), "object_actions": allowed})

    def _action_view(self, action: ObjectAction) -> Callable[..., HttpResponse]:
        """Asks first; the answer to its own question carries `confirmed`, and is done."""

        def view(request: HttpRequest, object_id: str) -> HttpResponse:
            obj = self.get_object(request, object_id)
            if obj is None or not request.user.has_perm(action.permission):  # type: ignore[union-attr]
                raise PermissionDenied
            form = action.form(request.POST if "confirmed" in request.POST else None)
            if not form.is_valid():
                return self._ask(request, action, obj, form)
            try:
                done = action.run(request, obj, form.cleaned_data)
            except Refused as refused:
                done = ""
                messages.error(request, str(refused))
            if isinstance(done, HttpResponse):
                return done
            if done:
                messages.success(request, done)
            return HttpResponseRedirect(
                reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_change", args=[obj.pk])
            )

        return view

    def _ask(self, request: HttpRequest, action: ObjectAction, obj: Model, form: forms.Form) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": action.label,
            "opts": self.opts,
            "object": obj,
            "action": action,
            "question": action.question.format(object=obj),
            "form": form,
        }
        return TemplateResponse(request, "admin/hub_confirm.html", context)


class ReadOnlyAdmin(HubModelAdmin):
    """A record of what happened: nobody adds, changes or deletes it here."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No."""
        return False


def show_once(request: HttpRequest, *, title: str, text: str, advice: str, next_url: str) -> HttpResponse:
    """A page that shows a secret in this one answer, which no cache keeps."""
    context = {**admin.site.each_context(request), "title": title, "text": text, "advice": advice, "next_url": next_url}
    response = TemplateResponse(request, "admin/hub_shown_once.html", context)
    response.headers["Cache-Control"] = "no-store"
    return response


def pretty_bytes(data: bytes | memoryview | None, limit: int = 262_144) -> SafeString:
    """Bytes of strangers as escaped text: JSON indented, anything else as it is, at most `limit` of them."""
    raw = bytes(data or b"")[:limit]
    try:
        text = json.dumps(json.loads(raw), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = raw.decode("utf-8", "replace")
    return format_html("<pre>{}</pre>", text)
