"""Signatures over (id, timestamp, bytes, keys), by scheme. Pure: no Django, no clock, no I/O.

A key is bytes (HMAC-SHA256) or an Ed25519Key, so a secret is parsed by the scheme that will sign with it: Standard
Webhooks decodes the base64 of a secret, the other schemes take its whole text. `SCHEMES` names them all.
"""

import base64
import hmac
import secrets
from binascii import b2a_base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX, ED25519_PREFIX, PUBLIC_PREFIX = "whsec_", "whsk_", "whpk_"
MIN_KEY_BYTES, MAX_KEY_BYTES = 24, 64  # Standard Webhooks: between 192 and 512 bits
SEED_BYTES = 32  # RFC 8032: an Ed25519 seed, and a public key, are 32 bytes

NO_KEY = "there is no key to sign with, and nothing is sent unsigned"


class SecretError(ValueError):
    """A signing secret that cannot be used; `code` says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# --- Keys and the secrets that hold them


@dataclass(frozen=True, slots=True)
class Ed25519Key:
    """A signing key of Standard Webhooks v1a. Equal when the public halves (32 bytes) are."""

    public: bytes
    private: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """The key that grows from 32 bytes."""
        private = Ed25519PrivateKey.from_private_bytes(seed)
        return cls(private.public_key().public_bytes_raw(), private)

    @property
    def public_secret(self) -> str:
        """What its receivers verify with: `whpk_` and the public half in base64. Not a secret."""
        return PUBLIC_PREFIX + base64.b64encode(self.public).decode()


Key = bytes | Ed25519Key


def generate_secret() -> str:
    """A new Standard Webhooks secret: `whsec_` and 32 random bytes in base64."""
    return encode_key(secrets.token_bytes(32))


def generate_ed25519_secret() -> str:
    """A new Standard Webhooks v1a secret: `whsk_` and, in base64, 32 random bytes and the public key that they make."""
    return encode_key(Ed25519Key.from_seed(secrets.token_bytes(SEED_BYTES)))


def encode_key(key: Key) -> str:
    """A key as a `whsec_` or `whsk_` secret."""
    if isinstance(key, Ed25519Key):
        return ED25519_PREFIX + base64.b64encode(key.private.private_bytes_raw() + key.public).decode()
    return PREFIX + base64.b64encode(key).decode()


def parse_secret(secret: str) -> Key:
    """The key of a Standard Webhooks secret: `whsec_` (or no prefix) and 24 to 64 bytes in base64, or a `whsk_` pair.

    Raises SecretError, which never repeats the secret.
    """
    if secret.startswith(PUBLIC_PREFIX):
        raise SecretError("not_a_signing_key", "a whpk_ value is a public key; a signing secret starts with whsec_")
    if secret.startswith(ED25519_PREFIX):
        return _parse_pair(_decode(secret.removeprefix(ED25519_PREFIX)))
    key = _decode(secret.removeprefix(PREFIX))
    if len(key) < MIN_KEY_BYTES:
        raise SecretError("secret_too_short", f"the secret holds {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
    if len(key) > MAX_KEY_BYTES:
        raise SecretError("secret_too_long", f"the secret holds {len(key)} bytes; at most {MAX_KEY_BYTES} are allowed")
    return key


def parse_text_secret(secret: str) -> bytes:
    """The key of the schemes that key HMAC with a secret's text, its prefix included.

    Any text will do, since a receiver may bring one along; only a public key, nothing, or white space around it (a slip
    of the clipboard) is refused. Raises SecretError, which never repeats the secret.
    """
    if secret.startswith(PUBLIC_PREFIX):
        raise SecretError("not_a_signing_key", "a whpk_ value is a public key, which signs nothing")
    if not secret:
        raise SecretError("secret_empty", "the secret is empty")
    if secret != secret.strip():
        raise SecretError("secret_has_spaces", "the secret has white space before or after it; remove that")
    return secret.encode()


def _decode(text: str) -> bytes:
    try:
        decoded = base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is one, and so is what text beyond ASCII raises
        raise SecretError("secret_not_base64", "a signing secret is whsec_ and standard base64 with padding") from None
    if not decoded:
        raise SecretError("secret_empty", "the secret holds no bytes after its prefix")
    return decoded


def _parse_pair(pair: bytes) -> Ed25519Key:
    if len(pair) != 2 * SEED_BYTES:
        raise SecretError("key_length", f"a whsk_ secret holds {2 * SEED_BYTES} bytes: the seed and the public key")
    key = Ed25519Key.from_seed(pair[:SEED_BYTES])
    if key.public != pair[SEED_BYTES:]:
        raise SecretError("key_pair_mismatch", "the public key in the whsk_ secret is not the one that its seed makes")
    return key


# --- Schemes


class Scheme(Protocol):
    """How a request is signed: called with message id, Unix seconds, body and keys, it gives lower-case header lines.

    Message ids are ours: letters, digits, `_` and `-`. Raises ValueError when there is no key.
    """

    def __call__(self, message_id: str, timestamp: int, body: bytes, keys: Sequence[Key], /) -> list[str]:
        """The header lines."""

    def parse_secret(self, secret: str, /) -> Key:
        """The key that a secret of this scheme holds. Raises SecretError."""

    def generate_secret(self) -> str:
        """A new secret for this scheme."""


class StandardWebhooks:
    """One signature for each key, separated by spaces: `v1` of an HMAC key, `v1a` of an Ed25519 key."""

    def __call__(self, message_id: str, timestamp: int, body: bytes, keys: Sequence[Key], /) -> list[str]:
        """The three headers."""
        if "." in message_id:  # `a` with the body `1.x`, and `a.1` with the body `x`, would have one signature
            raise ValueError(
                f"message id {message_id!r} has a full stop in it; a signature could be moved to another id"
            )
        if not keys:
            raise ValueError(NO_KEY)
        seconds = str(timestamp)
        signed = f"{message_id}.{seconds}.".encode() + body
        signatures = "webhook-signature:"
        for key in keys:
            if isinstance(key, bytes):
                signatures += " v1," + b2a_base64(hmac.digest(key, signed, "sha256"), newline=False).decode()
            else:
                signatures += " v1a," + b2a_base64(key.private.sign(signed), newline=False).decode()
        return ["webhook-id: " + message_id, "webhook-timestamp: " + seconds, signatures]

    def parse_secret(self, secret: str, /) -> Key:
        """See `parse_secret`."""
        return parse_secret(secret)

    def generate_secret(self) -> str:
        """See `generate_secret`; `generate_ed25519_secret` makes the other kind."""
        return generate_secret()


@dataclass(frozen=True, slots=True)
class TextKeyed:
    """HMAC-SHA256 keyed with a secret's text.

    `signed` stands before the body in what is signed; `{t}` is the timestamp in Unix seconds. `lines` are the headers,
    `{signatures}` in them is `signature` for each key, with commas between. A scheme without `several` has room for one
    signature, which the first key makes: put the one first that receivers have had longest. The message id is not
    signed; it goes along under `id_header` for receivers to recognise repetitions by.
    """

    signed: str
    lines: tuple[str, ...]
    signature: str = "{}"
    several: bool = False
    encode: Callable[[bytes], str] = bytes.hex
    id_header: str = "webhook-id"
    prefix: str = PREFIX

    def __call__(self, message_id: str, timestamp: int, body: bytes, keys: Sequence[Key], /) -> list[str]:
        """The header lines."""
        if not keys:
            raise ValueError(NO_KEY)
        signed = self.signed.format(t=timestamp).encode() + body
        signatures = ",".join([self._sign(key, signed) for key in (keys if self.several else keys[:1])])
        lines = [line.format(t=timestamp, signatures=signatures) for line in self.lines]
        return [f"{self.id_header}: {message_id}", *lines]

    def _sign(self, key: Key, signed: bytes) -> str:
        if isinstance(key, Ed25519Key):
            raise SecretError("not_an_hmac_key", "this scheme signs with HMAC; a whsk_ secret is for Standard Webhooks")
        return self.signature.format(self.encode(hmac.digest(key, signed, "sha256")))

    def parse_secret(self, secret: str, /) -> bytes:
        """See `parse_text_secret`."""
        return parse_text_secret(secret)

    def generate_secret(self) -> str:
        """The scheme's prefix and 32 random bytes in base64."""
        return self.prefix + base64.b64encode(secrets.token_bytes(32)).decode()


def _base64(signature: bytes) -> str:
    return b2a_base64(signature, newline=False).decode()


def _stripe_like(header: str, *, id_header: str = "webhook-id", prefix: str = PREFIX) -> TextKeyed:
    return TextKeyed(
        signed="{t}.",
        lines=(f"{header}: t={{t}},{{signatures}}",),
        signature="v1={}",
        several=True,
        id_header=id_header,
        prefix=prefix,
    )


# By the name a contract gives in `signature`.
SCHEMES: dict[str, Scheme] = {
    "standard-webhooks": StandardWebhooks(),
    "stripe-like": _stripe_like("stripe-signature"),
    "kingminos": _stripe_like("kingminos-signature", id_header="kingminos-event-id", prefix="kmwhsec_"),
    # No public description was found of Elicitra's: this form, and the other one, are assumptions.
    "elicitra": _stripe_like("elicitra-signature", prefix="elsec_"),
    "elicitra-split": TextKeyed(
        signed="{t}.", lines=("elicitra-timestamp: {t}", "elicitra-signature: {signatures}"), prefix="elsec_"
    ),
    "github-like": TextKeyed(signed="", lines=("x-hub-signature-256: {signatures}",), signature="sha256={}"),
    "shopify-like": TextKeyed(signed="", lines=("x-shopify-hmac-sha256: {signatures}",), encode=_base64),
    "slack-like": TextKeyed(
        signed="v0:{t}:",
        lines=("x-slack-request-timestamp: {t}", "x-slack-signature: {signatures}"),
        signature="v0={}",
    ),
}
