"""`INSTALLED_APPS = [..., "webhookhub.receiver_django"]`, then `manage.py migrate`."""

from django.apps import AppConfig


class ReceiverConfig(AppConfig):
    """The table of messages that were received."""

    name = "webhookhub.receiver_django"
    label = "webhookhub_receiver"
    verbose_name = "Received webhooks"
