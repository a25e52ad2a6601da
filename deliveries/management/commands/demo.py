"""`manage.py demo`: a tenant, a key, an endpoint and an ops user to try the product with."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandParser

from endpoints.models import ApiKey, Endpoint, Tenant
from endpoints.services import SYSTEM, create_api_key, create_endpoint


class Command(BaseCommand):
    """Makes them the first time; later finds them as they were. What it says is kept in var/demo.json (mode 0600)."""

    help = "Makes a demo tenant with an API key and an endpoint, and an ops user; prints how to use them."

    def add_arguments(self, parser: CommandParser) -> None:
        """Where things listen."""
        parser.add_argument("--web-port", type=int, default=8000)
        parser.add_argument("--receiver-port", type=int, default=8001)

    def handle(self, *args: Any, **options: Any) -> None:
        """Makes what is missing, and prints."""
        path: Path = settings.VAR_DIR / "demo.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        url = f"http://127.0.0.1:{options['receiver_port']}/"
        known = _make(found, url)
        if known != found:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
                json.dump(known, file)
        site = f"http://127.0.0.1:{options['web_port']}"
        self.stdout.write(
            f"\n  Admin     {site}/admin/   user {known['user']}   password {known['password']}\n"
            f"  Send one  curl -s {site}/v1/events -H 'Authorization: Bearer {known['api_key']}' "
            "-H 'Content-Type: application/json' -d '"
            '{"type":"invoice.paid","data":{"amount":19.90}}'
            "'\n"
            "  Stop      Ctrl-C\n"
        )


def _make(found: dict[str, str], url: str) -> dict[str, str]:
    """What of the demo is missing is made; the rest, and what people have changed of it, stays."""
    known = dict(found)
    tenant, _ = Tenant.objects.get_or_create(name="Demo")
    if not ApiKey.objects.usable().filter(tenant=tenant, name="demo").exists() or "api_key" not in known:
        known["api_key"] = create_api_key(key=ApiKey(tenant=tenant, name="demo"), actor=SYSTEM)
    endpoint = Endpoint.objects.filter(tenant=tenant, name="Demo receiver").first()
    if endpoint is None:
        create_endpoint(endpoint=Endpoint(tenant=tenant, name="Demo receiver", url=url), actor=SYSTEM)
    elif endpoint.url != url:
        endpoint.url = url  # the receiver listens elsewhere this time
        endpoint.save(update_fields=["url"])
    users = get_user_model().objects
    if not users.filter(username="ops").exists() or "password" not in known:
        users.filter(username="ops").delete()
        known["user"], known["password"] = "ops", secrets.token_urlsafe(12)
        users.create_superuser(username="ops", password=known["password"])
    return known
