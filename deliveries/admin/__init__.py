"""Screens for events, deliveries, attempts and replays, and the buttons of an endpoint that concern deliveries."""

from deliveries.admin import deliveries, endpoints, events

__all__ = ["deliveries", "endpoints", "events"]
