"""The admin site, and what its screens share: ids as people see them, bounded counts, buttons that ask first."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from itertools import accumulate
from typing import Any, ClassVar

import msgspec
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.autocomplete import AutocompleteJsonView
from django.contrib.admin.widgets import AdminTextInputWidget, AutocompleteSelect, RelatedFieldWidgetWrapper
from django.core.exceptions import BadRequest, PermissionDenied, ValidationError
from django.core.paginator import Paginator
from django.db.models import PROTECT, Model, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from webhookhub.ids import parse_typeid


class HubAdminSite(admin.AdminSite):
    """The site where ops and support work."""

    site_header = "WebhookHub"
    site_title = "WebhookHub"
    index_title = "Webhooks"
    site_url = None  # there is no other site to view

    def admin_view(self, view: Any, cacheable: bool = False) -> Any:
        """Refuses NUL in a query string: PostgreSQL holds none in a text, and would fail on the comparison."""

        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            if any("\0" in value for values in request.GET.lists() for value in [values[0], *values[1]]):
                raise BadRequest("NUL in the query string")
            return view(request, *args, **kwargs)

        return super().admin_view(update_wrapper(guarded, view), cacheable)

    def autocomplete_view(self, request: HttpRequest) -> Any:
        """What the choice fields search."""
        return Choices.as_view(admin_site=self)(request)


class Choices(AutocompleteJsonView):
    """Choices labelled as their own admin says: two tenants may have endpoints of one name."""

    def serialize_result(self, obj: Any, to_field_name: str) -> dict[str, str]:
        """Id and label."""
        label = getattr(self.model_admin, "choice_label", str)
        return {**super().serialize_result(obj, to_field_name), "text": label(obj)}


class BoundedPaginator(Paginator[Any]):
    """Counts no further than `most`: an exact count of millions of rows takes seconds and tells nobody anything."""

    most = 10_000

    @cached_property
    def count(self) -> int:
        """The number of rows, or `most`."""
        rows: Any = self.object_list
        return int(rows.order_by()[: self.most].count())

    @property
    def is_cut(self) -> bool:
        """There may be more than `count`."""
        return self.count == self.most


class ReasonForm(forms.Form):
    """Why it is done; kept in the audit."""

    reason = forms.CharField(max_length=500, required=False, widget=AdminTextInputWidget)


class RequiredReasonForm(ReasonForm):
    """Why it is done, for what others will ask about."""

    reason = forms.CharField(max_length=500, widget=AdminTextInputWidget)


class Search(AutocompleteSelect):
    """A choice field that searches. What is no id is no choice: the stock one fails on it where ids are UUIDs."""

    def optgroups(self, name: str, value: Sequence[str], attr: Any = None) -> Any:
        """The options that are drawn: the one that is chosen."""
        ids = [one for one in value if one and _is_value_of(self.field.target_field, one)]
        return super().optgroups(name, ids, attr)


def _is_value_of(field: Any, text: str) -> bool:
    try:
        field.to_python(text)
    except ValidationError:
        return False
    return True


@dataclass(frozen=True)
class ObjectAction:
    """A button on an object's page: who may press it, what it asks, and what it does with the answers.

    `run` takes the request, the object and the form's cleaned data, and returns a message of what was done, or a page.
    `form` is a form with a `reason`, or makes one for the object. `why_not` says why it would do nothing to this object
    now; the button is then drawn, but cannot be pressed.
    """

    name: str
    label: str
    permission: str
    question: Callable[[Any], str]
    run: Callable[[HttpRequest, Any, dict[str, Any]], str | HttpResponse]
    form: Callable[[Any], type[forms.Form]] | type[forms.Form] = ReasonForm
    why_not: Callable[[Any], str] = lambda _: ""


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
    ordering = ["-id"]
    change_list_template = "admin/hub_change_list.html"
    change_form_template = "admin/hub_change_form.html"
    # Where a TypeID typed into the search box is looked up: its prefix -> the field.
    search_ids: ClassVar[dict[str, str]] = {}
    object_actions: ClassVar[list[ObjectAction]] = []
    # Set when a record is made, and never after.
    fixed_fields: ClassVar[list[str]] = []

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
        if list(self.search_fields) == ["id"]:  # nothing but ids is searched
            return (queryset.none() if prefix or search_term.strip() else queryset), False
        return super().get_search_results(request, queryset, search_term)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Only what the filters ask for: Django would compare any column, a payload or a digest too, and so tell it."""
        asked = {getattr(one, "parameter_name", one) for one in self.list_filter}
        name, _, kind = lookup.partition("__")
        if name not in asked or kind not in {"", "exact", "isnull"}:
            raise IncorrectLookupParameters(f"{lookup} is no filter")
        return True

    def choice_label(self, obj: Any) -> str:
        """How a choice field shows an object."""
        return str(obj)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """What is read-only has no value before there is a record."""
        names = super().get_fields(request, obj)
        return names if obj else [name for name in names if name not in self.readonly_fields]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """What was set when the record was made stays."""
        return [*self.readonly_fields, *(self.fixed_fields if obj else [])]

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Fields without the pop-ups that edit other records."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field and isinstance(field.widget, RelatedFieldWidgetWrapper):
            field.widget = field.widget.widget
        return field

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Choice fields that search, labelled as the other admin says."""
        if db_field.name not in self.autocomplete_fields:
            return super().formfield_for_foreignkey(db_field, request, **kwargs)
        field: Any = super().formfield_for_foreignkey(
            db_field, request, **kwargs, widget=Search(db_field, self.admin_site, using=kwargs.get("using"))
        )
        other = self.admin_site.get_model_admin(db_field.related_model)
        field.label_from_instance = getattr(other, "choice_label", str)
        return field

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Not what others refer to: Django would load all of them, only to say that they are in the way."""
        return super().has_delete_permission(request, obj) and not (obj and _is_referred_to(obj))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list, under the name of what it lists."""
        title = {"title": capfirst(self.opts.verbose_name_plural)}
        return super().changelist_view(request, {**title, **(extra_context or {})})

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

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """The object's page, with the buttons that this person may use."""
        obj = kwargs.get("obj")
        actions = [action for action in self.object_actions if obj and self._may(request, action, obj)]
        context["object_actions"] = [(action, action.why_not(obj)) for action in actions]
        context.update(show_save_and_add_another=False, show_save_and_continue=False)
        return super().render_change_form(request, context, *args, **kwargs)

    def _may(self, request: HttpRequest, action: ObjectAction, obj: Any) -> bool:
        return self.has_view_permission(request, obj) and request.user.has_perm(action.permission)

    def _action_view(self, action: ObjectAction) -> Callable[..., HttpResponse]:
        """Asks first; the answer to its own question carries `confirmed`, and is done."""

        def view(request: HttpRequest, object_id: str) -> HttpResponse:
            obj = self.get_object(request, object_id)
            if not self._may(request, action, obj):
                raise PermissionDenied
            if obj is None:
                raise Http404(f"no {self.opts.verbose_name} has this id")
            page = HttpResponseRedirect(
                reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_change", args=[obj.pk])
            )
            if why_not := action.why_not(obj):  # the page with the button may be an old one
                messages.error(request, why_not)
                return page
            form_class: Any = action.form if isinstance(action.form, type) else action.form(obj)
            form = form_class(request.POST if "confirmed" in request.POST else None)
            if not form.is_valid():
                return self._ask(request, action, obj, form)
            try:
                done = action.run(request, obj, form.cleaned_data)
            except Refused as refused:
                messages.error(request, str(refused))
                return page
            self.log_change(request, obj, f"{action.label.rstrip('…')}. {form.cleaned_data['reason']}")
            if isinstance(done, HttpResponse):
                return done
            messages.success(request, done)
            return page

        return view

    def _ask(self, request: HttpRequest, action: ObjectAction, obj: Model, form: forms.Form) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": action.label.rstrip("…"),
            "opts": self.opts,
            "object": obj,
            "action": action,
            "question": action.question(obj),
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


def _is_referred_to(obj: Model) -> bool:
    """Whether something that must not be lost refers to the object."""
    relations: list[Any] = [one for one in obj._meta.get_fields(include_hidden=True) if one.auto_created]
    return any(
        one.related_model._base_manager.filter(**{one.field.name: obj}).exists()
        for one in relations
        if getattr(one, "on_delete", None) is PROTECT
    )


def show_once(request: HttpRequest, *, title: str, text: str, advice: str, next_url: str) -> HttpResponse:
    """A page that shows a secret in this one answer, which no cache keeps."""
    context = {**admin.site.each_context(request), "title": title, "text": text, "advice": advice, "next_url": next_url}
    response = TemplateResponse(request, "admin/hub_shown_once.html", context)
    response.headers["Cache-Control"] = "no-store"
    return response


# Characters that show as nothing, or that change how their neighbours show: controls, bidirectional marks, surrogates.
_UNSEEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAX_INDENTED_DEPTH = 32  # deeper JSON would grow by its indentation alone to a hundred times its size


def visible(text: str) -> str:
    """The text of a stranger, with what would not be seen written as an escape."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def pre(text: str) -> SafeString:
    """Lines of a stranger, escaped, as they are."""
    return format_html("<pre>{}</pre>", visible(text))


def pretty_bytes(data: bytes | memoryview | None, limit: int = 262_144) -> SafeString:
    """Bytes of strangers as escaped text: JSON indented and otherwise untouched, anything else as it is.

    `limit` is the most bytes that are shown; more are counted.
    """
    raw = bytes(data or b"")
    if not raw:
        return format_html("{}", "(empty)")
    shown = pre(_indented(raw[:limit]).decode("utf-8", "backslashreplace"))
    return format_html("{}<p>({} more bytes)</p>", shown, len(raw) - limit) if len(raw) > limit else shown


def pretty_json(value: Any) -> SafeString:
    """A value of a JSON column."""
    return pretty_bytes(msgspec.json.encode(value)) if value else format_html("{}", "–")


def _indented(raw: bytes) -> bytes:
    brackets = re.findall(rb"[][{}]", _JSON_STRING.sub(b"", raw))
    if max(accumulate(1 if one in b"[{" else -1 for one in brackets), default=0) > _MAX_INDENTED_DEPTH:
        return raw
    try:
        return msgspec.json.format(raw, indent=2)
    except (ValueError, RecursionError):
        return raw
