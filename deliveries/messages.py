"""The request that an event becomes under a contract: its header lines and its body. Pure."""

import base64
import functools
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

import msgspec

from endpoints.contracts import Contract
from endpoints.signing import SCHEMES, Key
from webhookhub.ids import typeid

CLOUD_EVENT = "application/cloudevents+json"


class Message(NamedTuple):
    """What is told of one event in one attempt.

    `projection` is the payload as its type's limits leave it, and takes its place in an envelope.
    """

    event_id: uuid.UUID
    delivery_id: uuid.UUID
    tenant_id: uuid.UUID
    type: str
    accepted_at: datetime
    sequence: int
    key: uuid.UUID
    attempt: int
    content_type: str
    payload: bytes
    projection: bytes | None

    @classmethod
    def of(cls, event: Any, *, event_id: uuid.UUID, delivery_id: uuid.UUID, attempt: int) -> Self:
        """What is told in an attempt of a delivery; `event` is the event, or a claimed row with its columns."""
        return cls(
            event_id=event_id,
            delivery_id=delivery_id,
            tenant_id=event.tenant_id,
            type=event.type,
            accepted_at=event.accepted_at,
            sequence=event.sequence,
            key=event.key,
            attempt=attempt,
            content_type=event.content_type,
            payload=bytes(event.payload),
            projection=None if event.projection is None else bytes(event.projection),
        )


def compose(contract: Contract, message: Message, keys: Sequence[Key], timestamp: int) -> tuple[list[str], bytes]:
    """The header lines and the body, signed at `timestamp` (Unix seconds).

    All but the attempt's number, the timestamp and the signature is the same on every attempt and replay. Raises
    ValueError without keys.
    """
    event_id = typeid(contract.event_prefix, message.event_id)
    content_type, body = message.content_type, message.payload
    if contract.envelope:
        content_type, body = CLOUD_EVENT, cloud_event(message, event_id)
    headers = SCHEMES[contract.signature](event_id, timestamp, body, keys)
    if contract.headers:
        template, has_delivery = _template(contract.headers)
        lines = template.format(
            attempt=message.attempt,
            time=rfc3339(message.accepted_at),
            sequence=message.sequence,
            key=message.key,
            event=event_id,
            delivery=typeid("dlv", message.delivery_id) if has_delivery else "",
        )
        headers += lines.split("\n")
    headers.append(f"content-type: {content_type}")
    return headers, body


@functools.lru_cache(maxsize=1_000)
def _template(lines: tuple[str, ...]) -> tuple[str, bool]:
    """The lines as one text to fill in at once, and whether a delivery's id is in it."""
    template = "\n".join(lines)
    return template, "{delivery}" in template


def cloud_event(message: Message, event_id: str) -> bytes:
    """A CloudEvent 1.0 in structured JSON whose `data` is the payload's own bytes (`data_base64` if it is no JSON)."""
    attributes = {
        "specversion": "1.0",
        "id": event_id,
        "source": f"urn:webhookhub:{typeid('ten', message.tenant_id)}",
        "type": message.type,
        "time": rfc3339(message.accepted_at),
        "datacontenttype": message.content_type,
    }
    head = msgspec.json.encode(attributes)[:-1]
    if message.content_type.partition(";")[0] != "application/json":
        return head + b',"data_base64":"' + base64.b64encode(message.payload) + b'"}'
    data = message.payload if message.projection is None else message.projection
    return head + b',"data":' + data + b"}"


def envelope_bytes(event_id: uuid.UUID, tenant_id: uuid.UUID, event_type: str) -> int:
    """How much a CloudEvent around JSON adds to it."""
    key, moment = uuid.UUID(int=0), datetime(1970, 1, 1, tzinfo=UTC)
    bare = Message(event_id, key, tenant_id, event_type, moment, 0, key, 1, "application/json", b"", None)
    return len(cloud_event(bare, typeid("evt", event_id)))


def rfc3339(moment: datetime) -> str:
    """A moment in UTC with six digits of the second, always 27 characters."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"
