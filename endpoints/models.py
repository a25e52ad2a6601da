"""What we know about destinations, and who may send."""

from datetime import datetime
from typing import ClassVar

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models.functions import Now

from endpoints.catalogues import subscriptions
from endpoints.conditions import ConditionError, compile_condition
from endpoints.contracts import CONTRACTS, Contract, WhenInactive
from endpoints.pace import Pace
from endpoints.projection import check_schema
from endpoints.querysets import PACE, ApiKeyQuerySet, EndpointQuerySet, EndpointSecretQuerySet
from webhookhub.ids import typeid, uuid7

# An event type: dot-separated words of letters, digits, `_` and `-`.
EVENT_TYPE = r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"
# What an endpoint may ask for: a type, a group of types (`invoice.*`), or all of them (`*`).
EVENT_TYPE_PATTERN = rf"(\*|{EVENT_TYPE}(\.\*)?)"

event_type_validator = RegexValidator(
    rf"\A{EVENT_TYPE}\Z", "An event type is words of letters, digits, _ and -, joined by dots: invoice.paid"
)
event_type_pattern_validator = RegexValidator(
    rf"\A{EVENT_TYPE_PATTERN}\Z", "Give an event type (invoice.paid), a group (invoice.*), or * for all types"
)


class Record(models.Model):
    """A row with a UUIDv7 key that people see as a TypeID."""

    prefix: ClassVar[str]

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.typeid

    @property
    def typeid(self) -> str:
        """The key as people see it, `evt_...`."""
        return typeid(self.prefix, self.id)


class Tenant(Record):
    """A customer of this hub: owns endpoints, keys and events, and never sees another's."""

    prefix = "ten"

    name = models.CharField(max_length=200, unique=True)
    webhooks_enabled = models.BooleanField(
        default=True, db_default=True, editable=False, help_text="Whether anything is sent to its endpoints."
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        permissions = [("switch_webhooks", "Can switch a tenant's webhooks off and on")]

    def __str__(self) -> str:
        return self.name


class ApiKey(Record):
    """What a tenant's program shows to post events. Only a keyed hash of its secret half is kept."""

    prefix = "whk"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="api_keys")
    endpoint = models.ForeignKey(
        "Endpoint",
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="api_keys",
        help_text="For this endpoint's receiver: the key opens its replay resource, and nothing else.",
    )
    name = models.CharField(max_length=200, help_text="What uses it: billing service, staging, ...")
    digest = models.BinaryField(max_length=32, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    expires_at = models.DateTimeField(null=True, blank=True, help_text="Refused from then on; empty for never.")
    revoked_at = models.DateTimeField(null=True, editable=False)

    objects = ApiKeyQuerySet.as_manager()

    class Meta:
        verbose_name = "API key"

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """A key of one endpoint is a key of its tenant."""
        if self.endpoint and self.endpoint.tenant_id != self.tenant_id:
            raise ValidationError({"endpoint": "This endpoint belongs to another tenant; choose one of the key's own."})
        if self.endpoint and self._state.adding and self.endpoint.status == Endpoint.Status.DELETED:
            raise ValidationError({"endpoint": "This endpoint has been deleted; choose another one."})


class ContractVersion(models.Model):
    """A contract as deliveries under way follow it, whatever becomes of the one of its name. Rows are only added."""

    key = models.CharField(max_length=80, primary_key=True)
    definition = models.TextField()
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    def __str__(self) -> str:
        return self.key


class EventType(Record):
    """An entry of a tenant's catalogue: what an event of this type means."""

    prefix = "ety"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="event_types")

    class Mode(models.TextChoices):
        SUBSCRIBED = "subscribed", "Subscribed"
        CONDITIONAL = "conditional_destination", "Conditional destination"

    name = models.CharField(max_length=200, validators=[event_type_validator])
    description = models.TextField(blank=True)
    mode = models.CharField(
        max_length=30,
        choices=Mode,
        default=Mode.SUBSCRIBED,
        help_text="Sent to every endpoint that asks for it, or only to the one that a matching rule names.",
    )
    lifecycle_sequence = models.PositiveSmallIntegerField(
        null=True, editable=False, help_text="What data.lifecycleSequence must be."
    )
    schema = models.JSONField(
        default=dict,
        blank=True,
        help_text='JSON Schema of the data. "x-class" gives a field\'s class: identifier, key, label, email, phone, '
        'text, collection, or excluded; "x-classes" that of all fields of a name.',
    )
    schema_at = models.DateTimeField(db_default=Now(), editable=False, help_text="When the schema was last changed.")
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        constraints = [
            # One meaning a name.
            models.UniqueConstraint(fields=["tenant", "name"], name="event_type_name_once"),
        ]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Checks the schema, which is for types that go out within limits."""
        if self.schema and self.is_plain:
            limited = "types with a place in a lifecycle or a conditional destination"
            raise ValidationError({"schema": f"A schema sets the limits of {limited}; leave it empty for others."})
        try:
            check_schema(self.schema)
        except ValueError as error:
            raise ValidationError({"schema": str(error)}) from error

    @property
    def is_plain(self) -> bool:
        """Whether events of this type go to whoever asks for it, as they are."""
        return self.mode == self.Mode.SUBSCRIBED and self.lifecycle_sequence is None


def all_event_types() -> list[str]:
    """What a new endpoint asks for: every type."""
    return ["*"]


def contract_choices() -> list[tuple[str, str]]:
    """The contracts an endpoint may follow, as (name, title)."""
    return [(contract.name, contract.title) for contract in CONTRACTS.values()]


class Endpoint(Record):
    """A URL of a tenant to which events are delivered, under a contract."""

    prefix = "ep"

    class Status(models.TextChoices):
        UNVERIFIED = "unverified", "Not verified"
        ACTIVE = "active", "Active"
        PAUSED = "paused", "Paused"
        DISABLED = "disabled", "Disabled"
        DELETED = "deleted", "Deleted"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="endpoints")
    name = models.CharField(max_length=200)
    url = models.CharField("URL", max_length=2048)
    contract = models.CharField(max_length=50, choices=contract_choices, default="standard")
    event_types = ArrayField(
        models.CharField(max_length=202, validators=[event_type_pattern_validator]),
        default=all_event_types,
        help_text="Types it receives, separated by commas: invoice.paid, invoice.* or * for all.",
    )
    status = models.CharField(max_length=10, choices=Status, default=Status.ACTIVE, editable=False)
    status_reason = models.CharField(max_length=200, blank=True, editable=False)
    status_at = models.DateTimeField(db_default=Now(), editable=False)
    verified_at = models.DateTimeField(null=True, editable=False)
    dead_in_a_row = models.PositiveIntegerField(
        default=0, db_default=0, editable=False, help_text="Deliveries that died since the last one that arrived."
    )
    rate_limit = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0.01), MaxValueValidator(10_000)],
        help_text="Requests per second at most, over all workers; empty for no limit.",
    )
    max_in_flight = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(10_000)],
        help_text="Requests at one time at most, over all workers; empty for as many as the workers allow.",
    )
    ordered = models.BooleanField(
        default=False,
        db_default=False,
        help_text="One event at a time, in the order of acceptance: each waits until the one before has ended.",
    )
    # How it does, and what that means for its pace (endpoints.pace).
    next_slot_at = models.DateTimeField(null=True, editable=False, help_text="When the rate allows the next request.")
    failures_in_a_row = models.PositiveIntegerField(
        default=0, db_default=0, editable=False, help_text="Attempts that failed since the last one that arrived."
    )
    failing_since = models.DateTimeField(null=True, editable=False)
    probe_at = models.DateTimeField(
        null=True, editable=False, help_text="Its circuit is open: when it is probed next with a single request."
    )
    probes = models.PositiveSmallIntegerField(default=0, db_default=0, editable=False)
    recovered_at = models.DateTimeField(
        null=True, editable=False, help_text="When a request arrived while its circuit was open."
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    moment: datetime  # of EndpointQuerySet.locked_for_pace

    objects = EndpointQuerySet.as_manager()

    class Meta:
        indexes = [
            # The fan-out: endpoints of a tenant (deliveries.querysets.STORE_EVENTS).
            models.Index(fields=["tenant", "status"], name="endpoint_fan_out"),
        ]
        constraints = [
            # An empty list would mean "all" to one reader and "none" to another.
            models.CheckConstraint(condition=models.Q(event_types__len__gt=0), name="endpoint_event_types_not_empty"),
        ]
        permissions = [
            ("pause_endpoint", "Can pause and resume endpoints"),
            ("verify_endpoint", "Can send and confirm challenges"),
            ("test_endpoint", "Can send tests"),
            ("rotate_secret", "Can make new signing secrets"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def when_inactive(self) -> WhenInactive:
        """What becomes of deliveries while it is not active. Under a contract that nobody knows they wait."""
        contract = CONTRACTS.get(self.contract)
        return contract.when_inactive if contract else "hold"

    @property
    def needs_challenge(self) -> bool:
        """Whether its contract sends nothing before a challenge has been confirmed."""
        contract = CONTRACTS.get(self.contract)
        return contract is not None and contract.challenge

    @property
    def pace(self) -> Pace:
        """At which pace it gets requests."""
        contract = CONTRACTS.get(self.contract)
        fields = {name: getattr(self, name) for name in PACE}
        return Pace(patience=contract.patience if contract else 0, **fields)

    @property
    def is_paced(self) -> bool:
        """Whether a claim has to ask for its pace, as deliveries.querysets.PAGE has it."""
        limited = self.rate_limit is not None or self.max_in_flight is not None or self.ordered
        return limited or self.probe_at is not None or self.recovered_at is not None

    @property
    def health(self) -> str:
        """How it does: `healthy`, `failing` since the last arrival, or `open`: it only fails, and is probed."""
        if self.probe_at:
            return "open"
        return "failing" if self.failures_in_a_row or self.recovered_at else "healthy"

    def clean(self) -> None:
        """Checks the URL by the address rule, as far as that goes without looking the name up, and by the contract."""
        errors: dict[str, str] = {}
        contract = CONTRACTS.get(self.contract)
        try:
            target = settings.ADDRESS_RULE.check_url(self.url)
            if contract and contract.https_443 and (target.scheme, target.port) != ("https", 443):
                errors["url"] = f"The contract {contract.name} needs an https URL on port 443."
        except ValueError as error:
            errors["url"] = str(error)
        self.event_types = list(dict.fromkeys(self.event_types))
        if contract and contract.catalogue:
            errors |= self._check_subscriptions(contract)
        if contract and not self._state.adding:
            errors |= self._check_changes(contract)
        if errors:
            raise ValidationError(errors)

    def _check_subscriptions(self, contract: Contract) -> dict[str, str]:
        """An endpoint asks for the types of its contract's catalogue, one by one; `*` is all of them."""
        names = list(subscriptions(contract.catalogue))
        if self.event_types == ["*"]:
            self.event_types = names
        if set(self.event_types) <= set(names):
            return {}
        return {"event_types": f"The contract {contract.name} has these types to ask for: {', '.join(names)}."}

    def _check_changes(self, contract: Contract) -> dict[str, str]:
        """What cannot change any more."""
        before = Endpoint.objects.get(pk=self.pk)
        old = CONTRACTS.get(before.contract)
        errors = {}
        if (contract.fixed_url or contract.challenge) and before.url != self.url:
            errors["url"] = f"Under the contract {contract.name} the URL stays; make a new endpoint for another one."
        if old and self.contract != before.contract and not contract.can_follow(old):
            errors["contract"] = (
                f"{before.contract} and {contract.name} differ in signature or verification; make a new endpoint."
            )
        return errors


MAX_RULES = 50  # that an event is tried against


class Rule(Record):
    """Sends events of a conditional type to one endpoint. Of a tenant's rules, the first that matches counts."""

    prefix = "rul"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="rules")
    name = models.CharField(max_length=200)
    event_type = models.CharField(max_length=200, validators=[event_type_validator])
    condition = models.TextField(
        help_text="In Common Expression Language, over event.id, event.type, event.time and event.data: "
        "event.data.score > 80"
    )
    endpoint = models.ForeignKey(Endpoint, on_delete=models.CASCADE, related_name="rules")
    position = models.PositiveIntegerField(default=100, help_text="Rules are tried from the lowest to the highest.")
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        indexes = [
            # The rules that an event is tried against (routing.try_rules).
            models.Index(fields=["tenant", "event_type", "position", "id"], name="rule_order"),
        ]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Checks the condition, and that type and endpoint are the tenant's."""
        errors: dict[str, str] = {}
        try:
            compile_condition(self.condition)
        except ConditionError as error:
            errors["condition"] = str(error)
        if self.endpoint.tenant_id != self.tenant_id:
            errors["endpoint"] = "This endpoint belongs to another tenant; choose one of the rule's own."
        elif self.endpoint.status == Endpoint.Status.DELETED:
            errors["endpoint"] = "This endpoint has been deleted; choose another one."
        elif (contract := CONTRACTS.get(self.endpoint.contract)) is None or not contract.catalogue:
            able = ", ".join(name for name, contract in CONTRACTS.items() if contract.catalogue)
            errors["endpoint"] = (
                f"This endpoint follows the contract {self.endpoint.contract}, which has no conditional destinations; "
                f"choose one under {able}."
            )
        conditional = EventType.objects.filter(
            tenant_id=self.tenant_id, name=self.event_type, mode=EventType.Mode.CONDITIONAL
        )
        if not conditional.exists():
            errors["event_type"] = (
                f"{self.event_type!r} is no type of this tenant with the delivery mode “conditional destination”."
            )
        others = Rule.objects.filter(tenant_id=self.tenant_id, event_type=self.event_type).exclude(pk=self.pk)
        if others.count() >= MAX_RULES:
            errors["event_type"] = f"There are {MAX_RULES} rules for this type already; remove one, or join two."
        if errors:
            raise ValidationError(errors)


class EndpointSecret(Record):
    """A signing secret of an endpoint, encrypted. Every one that has not expired signs each request."""

    prefix = "eps"

    endpoint = models.ForeignKey(Endpoint, on_delete=models.CASCADE, related_name="secrets", db_index=False)
    sealed = models.BinaryField(editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    expires_at = models.DateTimeField(null=True, editable=False)

    objects = EndpointSecretQuerySet.as_manager()

    class Meta:
        indexes = [
            # Those that sign a request, the newest first (deliveries.querysets.CLAIM_THESE).
            models.Index(fields=["endpoint", "id"], name="secret_of_endpoint"),
        ]


class AuditEvent(Record):
    """Who did what to which object, when and why. Rows are only ever added."""

    prefix = "aud"

    class Actor(models.TextChoices):
        USER = "user", "User"
        API_KEY = "api_key", "API key"
        SYSTEM = "system", "System"

    created_at = models.DateTimeField(db_default=Now(), editable=False)
    actor_kind = models.CharField(max_length=10, choices=Actor)
    actor = models.CharField(max_length=200, help_text="User name, key id, or the part of the system.")
    address = models.GenericIPAddressField(null=True)
    action = models.CharField(max_length=50)
    tenant = models.ForeignKey(Tenant, on_delete=models.SET_NULL, null=True, related_name="+")
    object_id = models.CharField(max_length=50, blank=True, help_text="TypeID of what it was done to.")
    object_name = models.CharField(max_length=200, blank=True)
    reason = models.CharField(max_length=500, blank=True)
    changes = models.JSONField(default=dict, blank=True)

    class Meta:
        indexes = [
            # The activity of one object, newest first.
            models.Index(fields=["object_id", "-id"], name="audit_of_object"),
        ]

    def __str__(self) -> str:
        return f"{self.action} {self.object_name}"
