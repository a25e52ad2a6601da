"""Event types that come with a contract: what they are called, what is checked of them, and what a test sends. Pure."""

from dataclasses import dataclass, field
from typing import Any, Literal

Mode = Literal["subscribed", "conditional_destination"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One event type. `sequence` is what a lifecycle event has as `lifecycleSequence`; None for what has none.

    `schema` is the JSON Schema of its data, with the classes of fields that its limits go by (endpoints.projection);
    `fixture` is synthetic data for tests, which names nobody.
    """

    name: str
    description: str
    mode: Mode = "subscribed"
    sequence: int | None = None
    schema: dict[str, Any] = field(default_factory=dict)
    fixture: dict[str, Any] = field(default_factory=dict)


# What Betterstood never sends, under the names that its data would have; our choice of names.
_NEVER_SENT = (
    "transcript",
    "recording",
    "sourceQuotes",
    "rawModelOutput",
    "providerDetails",
    "rawError",
    "debug",
    "validation",
    "consentReceipt",
    "leadCard",
)


def _schema(required: tuple[str, ...], **classes: str) -> dict[str, Any]:
    """A schema whose members have these classes."""
    types = {"collection": "array"}
    properties: dict[str, Any] = {name: {"x-class": "excluded"} for name in _NEVER_SENT}
    properties |= {name: {"type": types.get(kind, "string"), "x-class": kind} for name, kind in classes.items()}
    return {"type": "object", "required": list(required), "properties": properties}


INTERACTION = "interactionId"  # the member of a lifecycle event's data that says which interaction it is about
SEQUENCE = "lifecycleSequence"

_FIXTURE = {"interactionId": "int_test_0000000001", "organizationId": "org_test_0000000001"}

BETTERSTOOD = (
    Kind(
        "com.elicitra.interaction.ended.v1",
        "An interaction has reached its first terminal state.",
        sequence=1,
        schema=_schema(
            (INTERACTION, SEQUENCE), interactionId="identifier", organizationId="identifier", endReason="label"
        ),
        fixture={**_FIXTURE, "lifecycleSequence": 1, "endReason": "COMPLETED"},
    ),
    Kind(
        "com.elicitra.analysis.completed.v1",
        "The extraction of an interaction was committed as valid.",
        sequence=2,
        schema=_schema(
            (INTERACTION, SEQUENCE),
            interactionId="identifier",
            organizationId="identifier",
            summary="text",
            email="email",
            phone="phone",
            answers="collection",
            tags="collection",
        ),
        fixture={**_FIXTURE, "lifecycleSequence": 2, "summary": "A synthetic summary.", "answers": [], "tags": []},
    ),
    Kind(
        "com.elicitra.analysis.failed.v1",
        "The analysis of an interaction has failed for good.",
        sequence=2,
        schema=_schema(
            (INTERACTION, SEQUENCE), interactionId="identifier", organizationId="identifier", reason="label"
        ),
        fixture={**_FIXTURE, "lifecycleSequence": 2, "reason": "SYNTHETIC"},
    ),
    Kind(
        "com.elicitra.automation.triggered.v1",
        "A rule has chosen a destination for an action.",
        mode="conditional_destination",
        schema=_schema(("activation",), summary="text", email="email", phone="phone", tags="collection"),
    ),
)

CATALOGUES: dict[str, tuple[Kind, ...]] = {"betterstood": BETTERSTOOD}


def subscriptions(catalogue: str) -> dict[str, Kind]:
    """The types of a catalogue that an endpoint can ask for, by name."""
    return {kind.name: kind for kind in CATALOGUES.get(catalogue, ()) if kind.mode == "subscribed"}
