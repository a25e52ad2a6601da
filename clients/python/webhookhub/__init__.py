"""The receiver's half of WebhookHub."""
