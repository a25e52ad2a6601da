"""WebhookHub: a self-hosted platform that sends webhooks."""

__version__ = "0.1.0"
