"""What the screens of deliveries share."""

from collections.abc import Iterable
from typing import Any

from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

# A page lists so many deliveries of an event, and replays of a delivery.
MOST = 100


def link(obj: Any, text: str = "") -> SafeString:
    """A link to an object's page, by its id unless a text is given."""
    options = obj._meta
    url = reverse(f"admin:{options.app_label}_{options.model_name}_change", args=[obj.pk])
    return format_html('<a href="{}">{}</a>', url, text or obj.typeid)


def viewable(request: HttpRequest, names: Iterable[str]) -> list[str]:
    """The fields without `body`, the bytes of a payload or an answer, for those who may not see them."""
    may = request.user.has_perm("deliveries.view_payload")
    return [name for name in names if may or name != "body"]


def found_by(obj: Any) -> SafeString:
    """A link to the deliveries that the search finds by an object's id."""
    return format_html('<a href="{}?q={}">Show them</a>', reverse("admin:deliveries_delivery_changelist"), obj.typeid)
