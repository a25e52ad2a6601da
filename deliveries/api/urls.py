"""Addresses of the API of events and deliveries, each with and without a trailing slash."""

from django.urls import re_path

from deliveries.api.views import EventsView

urlpatterns = [re_path(r"^events/?\Z", EventsView.as_view(), name="events")]
