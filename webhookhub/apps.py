"""Puts our site in the place of the stock admin site."""

from django.contrib.admin.apps import AdminConfig


class HubAdminConfig(AdminConfig):
    """The Django admin, on `webhookhub.admin.HubAdminSite`."""

    default_site = "webhookhub.admin.HubAdminSite"
