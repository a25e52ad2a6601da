"""The app's name for people."""

from django.apps import AppConfig


class EndpointsConfig(AppConfig):
    """Tenants, keys, endpoints, event types, and the audit."""

    name = "endpoints"
    verbose_name = "Configuration"
