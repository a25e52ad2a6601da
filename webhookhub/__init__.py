"""WebhookHub: a self-hosted platform that sends webhooks."""

from pathlib import Path

__version__ = "0.1.0"

# Receivers install a package of this name, clients/python. Here its modules (webhookhub.receiver) lie beside ours.
__path__.append(str(Path(__file__).resolve().parent.parent / "clients" / "python" / "webhookhub"))
