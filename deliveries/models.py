"""What happened to messages: events taken in, their deliveries, each attempt, and replays in bulk."""

from __future__ import annotations

import uuid

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now

from deliveries.querysets import DeliveryQuerySet, EventQuerySet
from endpoints.models import Endpoint, Record, Tenant, event_type_validator

PENDING = models.Q(state="pending")


class Event(Record):
    """An event as a tenant's program posted it. Its payload's bytes are signed and sent exactly as they came."""

    prefix = "evt"

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+", db_index=False)
    type = models.CharField(max_length=200, validators=[event_type_validator])
    payload = models.BinaryField()
    content_type = models.CharField(max_length=100, default="application/json")
    key = models.UUIDField(default=uuid.uuid4, help_text="Idempotency key for contracts that send one.")
    caller_key = models.CharField(max_length=255, null=True, help_text="The Idempotency-Key it was posted with.")
    metadata = models.JSONField(default=dict)
    accepted_at = models.DateTimeField(db_default=Now())

    objects = EventQuerySet.as_manager()

    class Meta:
        constraints = [
            # Posting again with one key makes no second event (deliveries.querysets.STORE_EVENTS).
            models.UniqueConstraint(
                fields=["tenant", "caller_key"],
                condition=models.Q(caller_key__isnull=False),
                name="event_caller_key_once",
            ),
        ]
        indexes = [
            # A tenant's log, newest first.
            models.Index(fields=["tenant", "-id"], name="event_log"),
        ]
        permissions = [("view_payload", "Can see payloads and response bodies")]


class Delivery(Record):
    """One event on its way to one endpoint."""

    prefix = "dlv"

    class State(models.TextChoices):
        PENDING = "pending", "Pending"
        SENDING = "sending", "Sending"
        DELIVERED = "delivered", "Delivered"
        DEAD = "dead", "Dead letter"
        HELD = "held", "On hold"
        DISCARDED = "discarded", "Discarded"

    class Trigger(models.TextChoices):
        AUTOMATIC = "automatic", "Automatic"
        MANUAL = "manual", "Manual"
        REPLAY = "replay", "Replay job"

    event = models.ForeignKey(Event, on_delete=models.CASCADE, related_name="deliveries")
    endpoint = models.ForeignKey(Endpoint, on_delete=models.PROTECT, related_name="+", db_index=False)
    state = models.CharField(max_length=10, choices=State, default=State.PENDING)
    contract = models.CharField(max_length=70, help_text="Key of the contract it started with, and keeps to.")
    trigger = models.CharField(max_length=10, choices=Trigger, default=Trigger.AUTOMATIC)
    replay_of = models.ForeignKey("self", on_delete=models.SET_NULL, null=True, related_name="replays", db_index=False)
    replay_job = models.ForeignKey(
        "ReplayJob", on_delete=models.SET_NULL, null=True, related_name="deliveries", db_index=False
    )
    created_at = models.DateTimeField(db_default=Now())
    due_at = models.DateTimeField(db_default=Now())
    claimed_at = models.DateTimeField(null=True)
    claim_token = models.UUIDField(null=True)
    lease_until = models.DateTimeField(null=True)
    first_attempt_at = models.DateTimeField(null=True, help_text="Some contracts count from it.")
    attempts_made = models.PositiveSmallIntegerField(default=0)
    last_status = models.PositiveSmallIntegerField(null=True)
    last_error = models.CharField(max_length=40, blank=True, default="")
    finished_at = models.DateTimeField(null=True)

    objects = DeliveryQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "deliveries"
        indexes = [
            # The claim from a remembered position (deliveries.querysets.CLAIM).
            models.Index(fields=["due_at", "id"], condition=PENDING, name="delivery_due"),
            # The claim for one endpoint that has more due than it may have in flight (CLAIM_LAGGING).
            models.Index(fields=["endpoint", "due_at", "id"], condition=PENDING, name="delivery_due_of_endpoint"),
            # Leases that ran out (DeliveryQuerySet.lost).
            models.Index(fields=["lease_until"], condition=models.Q(state="sending"), name="delivery_lease"),
            # An endpoint's deliveries, newest first, and all of one state for release and bulk replay.
            models.Index(fields=["endpoint", "state", "-id"], name="delivery_of_endpoint"),
            # What a delivery was replayed by.
            models.Index(fields=["replay_of"], condition=models.Q(replay_of__isnull=False), name="delivery_replays"),
            # How far a replay job is.
            models.Index(fields=["replay_job"], condition=models.Q(replay_job__isnull=False), name="delivery_of_job"),
        ]
        constraints = [
            # A claim without a lease would never come back; a lease without a claim would be taken back twice.
            models.CheckConstraint(
                condition=models.Q(state="sending", claim_token__isnull=False, lease_until__isnull=False)
                | (~models.Q(state="sending") & models.Q(claim_token__isnull=True, lease_until__isnull=True)),
                name="delivery_lease_while_sending",
            ),
        ]
        permissions = [("replay_delivery", "Can send deliveries again")]


class Attempt(Record):
    """One try of a delivery: what was sent, and what came back. Durations are in microseconds."""

    prefix = "att"

    delivery = models.ForeignKey(Delivery, on_delete=models.CASCADE, related_name="attempts", db_index=False)
    number = models.PositiveSmallIntegerField()
    started_at = models.DateTimeField()
    url = models.CharField(max_length=2048, blank=True)
    address = models.GenericIPAddressField(null=True, help_text="The address that was dialled.")
    status = models.PositiveSmallIntegerField(null=True)
    error = models.CharField(max_length=40, blank=True)
    detail = models.CharField(max_length=300, blank=True)
    lookup_us = models.PositiveIntegerField(null=True, help_text="Name look-up.")
    connect_us = models.PositiveIntegerField(null=True, help_text="TCP connect.")
    tls_us = models.PositiveIntegerField(null=True, help_text="TLS handshake.")
    wait_us = models.PositiveIntegerField(null=True, help_text="From the request to the first byte of the answer.")
    total_us = models.PositiveIntegerField(null=True, help_text="The whole exchange.")
    request_headers = models.JSONField(default=list, help_text="Lines, as sent.")
    response_headers = models.JSONField(default=list, help_text="Lines, as received.")
    response_body = models.BinaryField(null=True, help_text="As much as the contract lets us keep.")
    response_truncated = models.BooleanField(default=False)

    class Meta:
        constraints = [
            # Also the timeline of a delivery, in order.
            models.UniqueConstraint(fields=["delivery", "number"], name="attempt_number_once"),
        ]


class ReplayJob(Record):
    """A replay in bulk: a frozen filter, run in the background at a bounded rate."""

    prefix = "rpl"

    class State(models.TextChoices):
        QUEUED = "queued", "Queued"
        RUNNING = "running", "Running"
        COMPLETED = "completed", "Completed"
        CANCELLED = "cancelled", "Cancelled"

    endpoint = models.ForeignKey(Endpoint, on_delete=models.PROTECT, related_name="replay_jobs")
    states = ArrayField(models.CharField(max_length=10), help_text="States of the deliveries to send again.")
    created_after = models.DateTimeField(null=True, blank=True, help_text="Only deliveries made at or after this time.")
    created_before = models.DateTimeField(null=True, blank=True, help_text="Only deliveries made before this time.")
    until_id = models.UUIDField(editable=False, help_text="Only deliveries that existed when the job was made.")
    position = models.UUIDField(null=True, editable=False, help_text="The last delivery looked at.")
    rate = models.PositiveIntegerField(default=50, help_text="Deliveries queued per second, at most.")
    state = models.CharField(max_length=10, choices=State, default=State.QUEUED, editable=False)
    matched = models.PositiveIntegerField(default=0, editable=False, help_text="How many matched when it was made.")
    queued = models.PositiveIntegerField(default=0, editable=False, help_text="How many it has queued so far.")
    requested_by = models.CharField(max_length=200, editable=False)
    reason = models.CharField(max_length=500)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    finished_at = models.DateTimeField(null=True, editable=False)
