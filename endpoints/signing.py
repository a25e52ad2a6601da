"""Signatures over (id, timestamp, bytes, secrets), by scheme. Pure: no Django, no clock, no I/O."""

import base64
import binascii
import hmac
import secrets
from collections.abc import Callable, Sequence

PREFIX = "whsec_"
MIN_KEY_BYTES, MAX_KEY_BYTES = 24, 64  # Standard Webhooks: between 192 and 512 bits


class SecretError(ValueError):
    """A signing secret that cannot be used; `code` says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def generate_secret() -> str:
    """A new Standard Webhooks secret: `whsec_` and 32 random bytes in base64."""
    return encode_key(secrets.token_bytes(32))


def encode_key(key: bytes) -> str:
    """Key bytes as a `whsec_` secret."""
    return PREFIX + base64.b64encode(key).decode()


def parse_secret(secret: str) -> bytes:
    """The key bytes of a secret: 24 to 64 bytes in base64, with `whsec_` before it or without.

    Raises SecretError, which never repeats the secret.
    """
    if secret.startswith("whpk_"):
        raise SecretError("not_a_signing_key", "a whpk_ value is a public key; a signing secret starts with whsec_")
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise SecretError("secret_not_base64", "a signing secret is whsec_ and standard base64 with padding") from None
    if not key:
        raise SecretError("secret_empty", "the secret holds no bytes after whsec_")
    if len(key) < MIN_KEY_BYTES:
        raise SecretError("secret_too_short", f"the secret holds {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
    if len(key) > MAX_KEY_BYTES:
        raise SecretError("secret_too_long", f"the secret holds {len(key)} bytes; at most {MAX_KEY_BYTES} are allowed")
    return key


def standard_webhooks(message_id: str, timestamp: int, body: bytes, keys: Sequence[bytes]) -> list[str]:
    """The three headers of Standard Webhooks: one `v1` signature for each key, separated by spaces."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    signatures = " ".join(
        ["v1," + binascii.b2a_base64(hmac.digest(key, signed, "sha256"), newline=False).decode() for key in keys]
    )
    return [f"webhook-id: {message_id}", f"webhook-timestamp: {timestamp}", f"webhook-signature: {signatures}"]


# By the name a contract gives in `signature`: (message id, Unix seconds, body, keys) -> header lines.
SCHEMES: dict[str, Callable[[str, int, bytes, Sequence[bytes]], list[str]]] = {"standard-webhooks": standard_webhooks}
