"""The site's addresses."""

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import include, path, re_path

from webhookhub.api import not_found


def home(request: HttpRequest) -> HttpResponse:
    """People who come by the bare address want the admin."""
    return redirect("admin:index")


urlpatterns = [
    path("", home),
    path("admin/", admin.site.urls),
    path("v1/", include("deliveries.api.urls")),
    re_path(r"^v1/", not_found),
]

handler500 = "webhookhub.api.server_error"
