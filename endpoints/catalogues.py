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


# What a member is by its name, wherever it is in the data: our choice of names. First what Betterstood never sends.
CLASSES_BY_NAME = dict.fromkeys(
    (
        *("transcript", "transcripts", "transcription", "recording", "recordings", "recordingUrl", "recordingUrls"),
        *("sourceQuote", "sourceQuotes", "rawModelOutput", "rawModelOutputs", "modelOutput", "rawOutput"),
        *(
            "providerDetail",
            "providerDetails",
            "rawError",
            "rawErrors",
            "stackTrace",
            "debug",
            "debugData",
            "debugInfo",
        ),
        *("validation", "validationData", "validationErrors", "consentReceipt", "consentReceipts", "rawConsentReceipt"),
        *("rawConsentReceipts", "leadCard", "leadCards", "leadCardData"),
    ),
    "excluded",
) | {
    **dict.fromkeys(("id", "ids", "interactionId", "organizationId", "executionId", "ruleId"), "identifier"),
    **dict.fromkeys(("key", "keys"), "key"),
    **dict.fromkeys(("label", "labels", "tag", "tags"), "label"),
    **dict.fromkeys(("email", "emails", "emailAddress", "emailAddresses"), "email"),
    **dict.fromkeys(("phone", "phones", "phoneNumber", "phoneNumbers"), "phone"),
}


def _schema(required: tuple[str, ...], **classes: str) -> dict[str, Any]:
    """A schema of data with these members, all of text."""
    properties = {name: {"type": "string", "x-class": kind} for name, kind in classes.items()}
    return {"type": "object", "required": list(required), "properties": properties, "x-classes": CLASSES_BY_NAME}


INTERACTION = "interactionId"  # the member of a lifecycle event's data that says which interaction it is about
SEQUENCE = "lifecycleSequence"

_FIXTURE = {"interactionId": "int_test_0000000001", "organizationId": "org_test_0000000001"}

BETTERSTOOD = (
    Kind(
        "com.elicitra.interaction.ended.v1",
        "An interaction has reached its first terminal state.",
        sequence=1,
        schema=_schema((INTERACTION, SEQUENCE), interactionId="identifier", endReason="label"),
        fixture={**_FIXTURE, "lifecycleSequence": 1, "endReason": "COMPLETED"},
    ),
    Kind(
        "com.elicitra.analysis.completed.v1",
        "The extraction of an interaction was committed as valid.",
        sequence=2,
        schema=_schema((INTERACTION, SEQUENCE), interactionId="identifier", summary="text"),
        fixture={**_FIXTURE, "lifecycleSequence": 2, "summary": "A synthetic summary.", "answers": [], "tags": []},
    ),
    Kind(
        "com.elicitra.analysis.failed.v1",
        "The analysis of an interaction has failed for good.",
        sequence=2,
        schema=_schema((INTERACTION, SEQUENCE), interactionId="identifier", reason="label"),
        fixture={**_FIXTURE, "lifecycleSequence": 2, "reason": "SYNTHETIC"},
    ),
    Kind(
        "com.elicitra.automation.triggered.v1",
        "A rule has chosen a destination for an action.",
        mode="conditional_destination",
        schema=_schema(("activation",), summary="text"),
    ),
)

CATALOGUES: dict[str, tuple[Kind, ...]] = {"betterstood": BETTERSTOOD}


def subscriptions(catalogue: str) -> dict[str, Kind]:
    """The types of a catalogue that an endpoint can ask for, by name."""
    return {kind.name: kind for kind in CATALOGUES.get(catalogue, ()) if kind.mode == "subscribed"}
