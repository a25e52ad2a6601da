"""What we know about destinations, and who may send."""

from typing import ClassVar

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.db.models.functions import Now

from endpoints.contracts import CONTRACTS
from endpoints.querysets import ApiKeyQuerySet, EndpointSecretQuerySet
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
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    def __str__(self) -> str:
        return self.name


class ApiKey(Record):
    """What a tenant's program shows to post events. Only a keyed hash of its secret half is kept."""

    prefix = "whk"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="api_keys")
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


class ContractVersion(models.Model):
    """A contract as deliveries under way follow it, whatever becomes of the one of its name. Rows are only added."""

    key = models.CharField(max_length=70, primary_key=True)
    definition = models.TextField()
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    def __str__(self) -> str:
        return self.key


class EventType(Record):
    """An entry of a tenant's catalogue: what an event of this type means."""

    prefix = "ety"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="event_types")
    name = models.CharField(max_length=200, validators=[event_type_validator])
    description = models.TextField(blank=True)
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        constraints = [
            # One meaning a name.
            models.UniqueConstraint(fields=["tenant", "name"], name="event_type_name_once"),
        ]

    def __str__(self) -> str:
        return self.name


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
        ACTIVE = "active", "Active"
        PAUSED = "paused", "Paused"
        DISABLED = "disabled", "Disabled"

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
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        indexes = [
            # The fan-out: endpoints of a tenant (deliveries.querysets.EVENTS).
            models.Index(fields=["tenant", "status"], name="endpoint_fan_out"),
        ]
        constraints = [
            # An empty list would mean "all" to one reader and "none" to another.
            models.CheckConstraint(condition=models.Q(event_types__len__gt=0), name="endpoint_event_types_not_empty"),
        ]
        permissions = [
            ("pause_endpoint", "Can pause and resume endpoints"),
            ("rotate_secret", "Can make new signing secrets"),
        ]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Checks the URL by the address rule, as far as that goes without looking the name up."""
        try:
            settings.ADDRESS_RULE.check_url(self.url)
        except ValueError as error:
            raise ValidationError({"url": str(error)}) from error
        self.event_types = list(dict.fromkeys(self.event_types))


class EndpointSecret(Record):
    """A signing secret of an endpoint, encrypted. Every one that has not expired signs each request."""

    prefix = "eps"

    endpoint = models.ForeignKey(Endpoint, on_delete=models.CASCADE, related_name="secrets")
    sealed = models.BinaryField(editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    expires_at = models.DateTimeField(null=True, editable=False)

    objects = EndpointSecretQuerySet.as_manager()


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
