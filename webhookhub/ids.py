"""Identifiers: UUIDv7 keys, shown to people as TypeIDs (`evt_01kb9...`). Pure."""

import re
import uuid

import uuid_utils
from typeid.codecs import base32
from uuid_utils import compat

# 26 characters of Crockford base32 in lower case; more than 7 in the first would not fit into 128 bits.
_SUFFIX = re.compile("[0-7][0-9a-hjkmnp-tv-z]{25}")


def uuid7() -> uuid.UUID:
    """A new key: unique, and ordered by the time it was made."""
    return compat.uuid7()


def uuid4_bytes() -> bytes:
    """A random UUID as its 16 bytes: for those made by the thousand."""
    return uuid_utils.uuid4().bytes


def typeid(prefix: str, key: uuid.UUID) -> str:
    """Shows a key: the prefix, `_`, and 26 characters of Crockford base32 (the TypeID convention)."""
    return f"{prefix}_{base32.encode(key.bytes)}"


def parse_typeid(prefix: str, text: str) -> uuid.UUID:
    """Reads what `typeid` showed.

    Raises ValueError, naming the text and the form expected, for anything else.
    """
    head, _, suffix = text.rpartition("_")
    if head != prefix or not _SUFFIX.fullmatch(suffix):
        raise ValueError(f"{text!r} is not an id of the form {prefix}_ and 26 characters")
    return uuid.UUID(bytes=bytes(base32.decode(suffix)))


def created_ms(key: uuid.UUID) -> int:
    """When a UUIDv7 was made, in milliseconds since the Unix epoch."""
    return key.int >> 80
