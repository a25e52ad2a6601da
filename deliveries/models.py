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

    class State(models.TextChoices):
        ACCEPTED = "accepted", "Accepted"
        TEST = "test", "Test, not sent on"
        PROJECTION_GAP = "projection_gap", "Projection gap"
        CONTROL = "control", "Made by the hub"

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+", db_index=False)
    type = models.CharField(max_length=200, validators=[event_type_validator])
    payload = models.BinaryField()
    content_type = models.CharField(max_length=100, default="application/json")
    key = models.UUIDField(default=uuid.uuid4, help_text="Idempotency key for contracts that send one.")
    caller_key = models.CharField(max_length=255, null=True, help_text="The Idempotency-Key it was posted with.")
    metadata = models.JSONField(default=dict)
    accepted_at = models.DateTimeField(db_default=Now())
    sequence = models.BigIntegerField(
        db_default=models.Func(models.Value("deliveries_event_sequence"), function="nextval"),
        help_text="Higher for what was accepted later.",
    )
    state = models.CharField(max_length=20, choices=State, default=State.ACCEPTED)
    projection = models.BinaryField(null=True, help_text="The payload within its type's limits.")
    payload_deleted_at = models.DateTimeField(null=True, help_text="Its payload is gone; it cannot be sent again.")

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
            # Of one type (GET /v1/events?type=).
            models.Index(fields=["tenant", "type", "-id"], name="event_log_of_type"),
            # Gaps to repair (publishing.repair_projection_gaps).
            models.Index(fields=["id"], condition=models.Q(state="projection_gap"), name="event_gaps"),
        ]
        permissions = [
            ("view_payload", "Can see payloads and response bodies"),
            ("delete_payload", "Can delete the payload of events"),
        ]


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
        TEST = "test", "Test"
        VERIFICATION = "verification", "Verification"

    class Priority(models.IntegerChoices):
        """Of what is due at once, the lowest goes first."""

        FIRST = 0, "First try"
        AGAIN = 1, "Retry, or replay in bulk"

    # Kept without a constraint in the database: the fan-out has just read or written both, and would pay a sixth of
    # what an event costs the database to look them up again. Neither is removed while the event's tenant is there, to
    # which there is a constraint.
    event = models.ForeignKey(
        Event, on_delete=models.CASCADE, related_name="deliveries", db_index=False, db_constraint=False
    )
    endpoint = models.ForeignKey(
        Endpoint, on_delete=models.PROTECT, related_name="+", db_index=False, db_constraint=False
    )
    state = models.CharField(max_length=10, choices=State, default=State.PENDING)
    contract = models.CharField(max_length=80, help_text="Key of the contract it started with, and keeps to.")
    trigger = models.CharField(max_length=12, choices=Trigger, default=Trigger.AUTOMATIC)
    replay_of = models.ForeignKey("self", on_delete=models.SET_NULL, null=True, related_name="replays", db_index=False)
    replay_job = models.ForeignKey(
        "ReplayJob", on_delete=models.SET_NULL, null=True, related_name="deliveries", db_index=False
    )
    created_at = models.DateTimeField(db_default=Now())
    due_at = models.DateTimeField(db_default=Now())
    priority = models.PositiveSmallIntegerField(
        choices=Priority, default=Priority.FIRST, db_default=Priority.FIRST.value
    )
    turn = models.BigIntegerField(null=True, help_text="Its place in line, at an endpoint that gets events in order.")
    claimed_at = models.DateTimeField(null=True)
    claim_token = models.UUIDField(null=True)
    lease_until = models.DateTimeField(null=True)
    first_attempt_at = models.DateTimeField(null=True, help_text="Some contracts count from it.")
    attempts_made = models.PositiveSmallIntegerField(default=0)
    last_status = models.PositiveSmallIntegerField(null=True)
    last_error = models.CharField(max_length=60, blank=True, default="", help_text="In its contract's words.")
    outcome = models.CharField(
        max_length=20, blank=True, default="", db_default="", help_text="Its contract's word for how it ended."
    )
    credits = models.PositiveSmallIntegerField(
        default=0, db_default=0, help_text="Charged when its event first arrives at its endpoint."
    )
    finished_at = models.DateTimeField(null=True)
    first_finished_at = models.DateTimeField(
        null=True, help_text="When what this replays had ended at first: windows for replays count from there."
    )

    interruptions: int  # of DeliveryQuerySet.lost

    objects = DeliveryQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "deliveries"
        indexes = [
            # The claim from a remembered position (deliveries.querysets.CLAIM).
            models.Index(fields=["priority", "due_at", "id"], condition=PENDING, name="delivery_due_by_priority"),
            # The claim for one endpoint that has more due than it may have in flight (CLAIM_LAGGING).
            models.Index(
                fields=["endpoint", "priority", "due_at", "id"], condition=PENDING, name="delivery_due_at_endpoint"
            ),
            # Whose turn it is at an endpoint that gets events in order (HEADS).
            models.Index(
                fields=["endpoint", "turn", "id"],
                condition=models.Q(turn__isnull=False, state__in=["pending", "sending"]),
                name="delivery_turn",
            ),
            # Leases that ran out (DeliveryQuerySet.lost).
            models.Index(fields=["lease_until"], condition=models.Q(state="sending"), name="delivery_lease"),
            # An endpoint's deliveries, newest first, and all of one state for release and bulk replay.
            models.Index(fields=["endpoint", "state", "-id"], name="delivery_of_endpoint"),
            # The deliveries of an event, and whether one has arrived (EventQuerySet.log).
            models.Index(fields=["event", "endpoint"], name="delivery_of_event"),
            # What a delivery was replayed by.
            models.Index(fields=["replay_of"], condition=models.Q(replay_of__isnull=False), name="delivery_replays"),
            # What an endpoint's receiver has missed, in the order of events (api.replay).
            models.Index(
                fields=["endpoint", "event"], condition=models.Q(state__in=["dead", "held"]), name="delivery_missed"
            ),
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
        permissions = [
            ("replay_delivery", "Can send deliveries again"),
            ("cancel_delivery", "Can give up deliveries that wait"),
        ]


class Attempt(Record):
    """One try of a delivery: what was sent, and what came back. Durations are in microseconds."""

    prefix = "att"

    delivery = models.ForeignKey(  # no constraint: it is written by the statement that has just updated its delivery
        Delivery, on_delete=models.CASCADE, related_name="attempts", db_index=False, db_constraint=False
    )
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


class Reservation(models.Model):
    """A place in the life of an interaction, taken by one event for good."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="+", db_index=False)
    interaction = models.CharField(max_length=256)
    sequence = models.PositiveSmallIntegerField()
    version = models.CharField(max_length=20, help_text="Of the event's schema: v1.")
    event = models.ForeignKey(Event, on_delete=models.CASCADE, related_name="+")

    class Meta:
        constraints = [
            # One event each, whoever posts it how often: completed and failed share their place.
            models.UniqueConstraint(fields=["tenant", "interaction", "sequence", "version"], name="reservation_once"),
        ]

    def __str__(self) -> str:
        return f"{self.interaction} {self.sequence} {self.version}"


class ProjectionGap(Record):
    """An event whose data does not fit its type's limits, not even at its least. Not a failed delivery."""

    prefix = "gap"

    event = models.OneToOneField(Event, on_delete=models.CASCADE, related_name="gap")
    detail = models.CharField(max_length=500, help_text="What does not fit.")
    created_at = models.DateTimeField(db_default=Now())
    tried_at = models.DateTimeField(db_default=Now(), help_text="When it was last projected.")
    schema_at = models.DateTimeField(help_text="Of which time the schema is that it did not fit.")
    repaired_at = models.DateTimeField(null=True)


class Credit(Record):
    """A credit that was charged. Rows are only ever added; a trigger of the database sees to that."""

    prefix = "crd"

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="credits")
    event_id = models.UUIDField()
    endpoint_id = models.UUIDField()
    delivery_id = models.UUIDField()
    amount = models.PositiveSmallIntegerField()
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            # Never twice, whatever is retried, replayed or written again after a crash.
            models.UniqueConstraint(fields=["event_id", "endpoint_id"], name="credit_once"),
        ]


class Verification(Record):
    """A challenge sent to an endpoint, which its owner pastes back."""

    prefix = "ver"

    endpoint = models.ForeignKey(Endpoint, on_delete=models.CASCADE, related_name="verifications")
    delivery = models.OneToOneField(Delivery, on_delete=models.CASCADE, related_name="verification")
    challenge = models.CharField(max_length=32)
    wrong_answers = models.PositiveSmallIntegerField(default=0)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    confirmed_at = models.DateTimeField(null=True)
    voided_at = models.DateTimeField(null=True, help_text="Another took its place, or too many wrong answers came.")

    class Meta:
        constraints = [
            # The one that counts.
            models.UniqueConstraint(
                fields=["endpoint"],
                condition=models.Q(voided_at__isnull=True, confirmed_at__isnull=True),
                name="verification_open_once",
            ),
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
