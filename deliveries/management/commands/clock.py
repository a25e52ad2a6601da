"""`manage.py clock`: queues the periodic jobs."""

from typing import Any

from django.core.management.base import BaseCommand

from deliveries.jobs import Clock


class Command(BaseCommand):
    """Runs the periodic scheduler until it is stopped. A second one does no harm: every job may run twice."""

    help = "Queues the periodic jobs (replays, housekeeping). Run one of it."

    def handle(self, *args: Any, **options: Any) -> None:
        """Runs it."""
        Clock().run()
