"""Identifiers: UUIDv7 keys, shown to people as TypeIDs (`evt_01kb9...`). Pure."""

import uuid

from typeid.codecs import base32
from uuid_utils import compat


def uuid7() -> uuid.UUID:
    """A new key: unique, and ordered by the time it was made."""
    return compat.uuid7()


def typeid(prefix: str, key: uuid.UUID) -> str:
    """Shows a key: the prefix, `_`, and 26 characters of Crockford base32 (the TypeID convention)."""
    return f"{prefix}_{base32.encode(key.bytes)}"


def parse_typeid(prefix: str, text: str) -> uuid.UUID:
    """Reads what `typeid` showed.

    Raises ValueError, naming the text and the form expected, for anything else.
    """
    head, _, suffix = text.rpartition("_")
    try:
        if head != prefix:
            raise ValueError
        return uuid.UUID(bytes=bytes(base32.decode(suffix)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{text!r} is not an id of the form {prefix}_ and 26 characters") from error


def created_ms(key: uuid.UUID) -> int:
    """When a UUIDv7 was made, in milliseconds since the Unix epoch."""
    return key.int >> 80
