"""The app's name for people."""

from django.apps import AppConfig


class DeliveriesConfig(AppConfig):
    """Events, deliveries, attempts, and replays."""

    name = "deliveries"
    verbose_name = "Delivery"
