"""Verify signed webhooks over the raw bytes of a request.

    from webhookhub.receiver import VerificationError, verify

    try:
        message = verify(request.body, request.headers, [NEW_SECRET, OLD_SECRET])
    except VerificationError as error:
        return HttpResponse(str(error), status=400)

Pass the body as it came: JSON that was parsed and written again is other bytes. The standard library is all this needs,
but for `whpk_` keys (Ed25519), which need `cryptography`. Runs on Python 3.9 and newer.
"""

from __future__ import annotations

import base64
import hmac
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

__all__ = ["SecretError", "VerificationError", "Verified", "check_secrets", "id_header", "lower", "verify"]


class Verified(NamedTuple):
    """What the sender signed beside the body: each is None where the scheme leaves it out.

    `message_id` is the same each time a message is sent: keep it, and process no message twice. A scheme without a
    `timestamp` (Unix seconds) sets no limit to how late a request can be sent again.
    """

    message_id: str | None
    timestamp: int | None


class VerificationError(Exception):
    """A request that must not be trusted: answer it with 400, and do nothing else.

    `code` is one of missing_header, malformed_header, malformed_timestamp, timestamp_too_old, timestamp_too_new,
    id_contains_full_stop, no_supported_signature, signature_mismatch.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SecretError(ValueError):
    """A secret of yours that nothing can be verified with. A mistake in your settings, not in the request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def verify(
    body: bytes,
    headers: Mapping[str, str],
    secrets: str | Iterable[str],
    *,
    scheme: str = "standard-webhooks",
    tolerance: int = 300,
    now: float | None = None,
) -> Verified:
    """Returns what was signed beside the body if one of the secrets made one of the signatures in the headers.

    `headers` may be spelled in any case. `tolerance` is how many seconds the timestamp may be off, either way, from
    `now` (Unix seconds; the clock unless given). Schemes: standard-webhooks, svix, stripe-like, kingminos, elicitra,
    elicitra-split, github-like, shopify-like, slack-like. Raises VerificationError; SecretError for an unusable secret.
    """
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise TypeError("body must be the raw bytes of the request, as they came")
    keys = _keys(secrets, scheme)
    claim = _SCHEMES[scheme].read(lower(headers))
    timestamp = _check_time(claim.timestamp, tolerance, time.time() if now is None else now)
    _check_signatures(claim, bytes(body), keys)
    return Verified(claim.message_id, timestamp)


def check_secrets(secrets: str | Iterable[str], scheme: str) -> list[str]:
    """The secrets, when each can verify requests of the scheme. Raises SecretError, or ValueError for the scheme."""
    secrets = [secrets] if isinstance(secrets, str) else list(secrets)
    _keys(secrets, scheme)
    return secrets


def id_header(scheme: str) -> str:
    """The header in which a scheme's senders say the message id; only standard-webhooks and svix sign it."""
    return _SCHEMES[scheme].id_header


def lower(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers by their names in lower case. Raises VerificationError when two spellings of one disagree."""
    lowered: dict[str, str] = {}
    for name, value in headers.items():
        if lowered.setdefault(name.lower(), value) != value:
            raise VerificationError("malformed_header", f"the header {name} is there twice, with different values")
    return lowered


# --- What is checked, whatever the scheme


class _Claim(NamedTuple):
    """What the headers say; nothing in it is to be believed yet. What is signed is `before` and then the body."""

    message_id: str | None
    timestamp: str | None
    before: str
    signatures: list[tuple[str, str]]  # version, text


def _check_time(text: str | None, tolerance: float, now: float) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise VerificationError("malformed_timestamp", "the timestamp is not a whole number of seconds")
    timestamp = int(text)
    if now - timestamp > tolerance:
        raise VerificationError("timestamp_too_old", f"the timestamp is more than {tolerance} s in the past")
    if timestamp - now > tolerance:
        raise VerificationError("timestamp_too_new", f"the timestamp is more than {tolerance} s in the future")
    return timestamp


def _check_signatures(claim: _Claim, body: bytes, keys: list[_Key]) -> None:
    # The version is our key's, never the header's choice: a public key must not be taken for an HMAC key.
    versions = {key.version for key in keys}
    candidates = [(version, text) for version, text in claim.signatures if version in versions]
    if not candidates:
        raise VerificationError("no_supported_signature", "no signature is of a version that the secrets can verify")
    for key in keys:
        if any(not key.is_well_formed(text) for version, text in candidates if version == key.version):
            raise VerificationError("malformed_header", "a signature is cut off, or is not encoded as it should be")
    content = claim.before.encode("utf-8", "surrogatepass") + body
    for key in keys:
        if key.signed(content, [text for version, text in candidates if version == key.version]):
            return
    raise VerificationError("signature_mismatch", "no signature fits: the body was changed, or the secret is another")


# --- Keys


def _keys(secrets: str | Iterable[str], scheme: str) -> list[_Key]:
    if scheme not in _SCHEMES:
        raise ValueError(f"unknown scheme {scheme!r}: it is one of {', '.join(_SCHEMES)}")
    keys = [_SCHEMES[scheme].key(secret) for secret in ([secrets] if isinstance(secrets, str) else secrets)]
    if not keys:
        raise SecretError("secret_missing", "there is no secret to verify with")
    return keys


class _Key(Protocol):
    version: str

    def is_well_formed(self, text: str) -> bool:
        """Whether the text of a signature is encoded as this key's signatures are."""

    def signed(self, content: bytes, texts: list[str]) -> bool:
        """Whether one of these well-formed signatures of the content is this key's."""


class _HmacKey:
    """HMAC-SHA256; signatures in base64 or in hex."""

    def __init__(self, version: str, key: bytes, *, in_hex: bool = False) -> None:
        self.version = version
        self._key = key
        self._in_hex = in_hex

    def is_well_formed(self, text: str) -> bool:
        if self._in_hex:
            return re.fullmatch(r"[0-9A-Fa-f]{64}", text) is not None
        return _decode_base64(text) is not None

    def signed(self, content: bytes, texts: list[str]) -> bool:
        mac = hmac.digest(self._key, content, "sha256")
        right = mac.hex().encode() if self._in_hex else base64.b64encode(mac)
        # As text: capital hex digits are not what the sender wrote.
        return any(hmac.compare_digest(right, text.encode()) for text in texts)


class _Ed25519Key:
    """Standard Webhooks v1a."""

    version = "v1a"

    def __init__(self, public: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        self._key = Ed25519PublicKey.from_public_bytes(public)

    def is_well_formed(self, text: str) -> bool:
        return _decode_base64(text) is not None

    def signed(self, content: bytes, texts: list[str]) -> bool:
        from cryptography.exceptions import InvalidSignature

        for text in texts:
            try:
                self._key.verify(_decode_base64(text) or b"", content)
            except InvalidSignature:
                continue
            return True
        return False


def _standard_key(secret: str) -> _Key:
    if secret.startswith("whsk_"):
        raise SecretError(
            "not_a_verifying_key", "a whsk_ value is the sender's; verify with the whpk_ value of the pair"
        )
    if secret.startswith("whpk_"):
        public = _decode_secret(secret[len("whpk_") :])
        if len(public) != 32:
            raise SecretError("key_length", "a whpk_ value holds 32 bytes")
        return _Ed25519Key(public)
    key = _decode_secret(secret[len("whsec_") :] if secret.startswith("whsec_") else secret)
    if len(key) < 24:
        raise SecretError("secret_too_short", f"the secret holds {len(key)} bytes; at least 24 are needed")
    if len(key) > 64:
        raise SecretError("secret_too_long", f"the secret holds {len(key)} bytes; at most 64 are allowed")
    return _HmacKey("v1", key)


def _text_key(version: str, secret: str, *, in_hex: bool = True) -> _Key:
    if not secret:
        raise SecretError("secret_empty", "the secret is empty")
    return _HmacKey(version, secret.encode(), in_hex=in_hex)


def _decode_secret(text: str) -> bytes:
    try:
        decoded = base64.b64decode(text, validate=True)
    except ValueError:
        raise SecretError("secret_not_base64", "the secret is not standard base64 with padding") from None
    if not decoded:
        raise SecretError("secret_empty", "the secret holds no bytes after its prefix")
    return decoded


def _decode_base64(text: str) -> bytes | None:
    """The bytes, or None unless this is the one way to write them."""
    try:
        decoded = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return decoded if decoded and base64.b64encode(decoded).decode() == text else None


# --- Headers


def _read_standard(headers: dict[str, str], *, prefix: str) -> _Claim:
    """`<prefix>-signature: v1,<base64> v1a,<base64> ...`, with the id and the timestamp in headers of their own."""
    message_id, timestamp, line = (_get(headers, f"{prefix}-{name}") for name in ("id", "timestamp", "signature"))
    if "." in message_id:
        # Its signature fits the id before the full stop just as well.
        raise VerificationError("id_contains_full_stop", f"{prefix}-id holds a full stop")
    members = [member for member in line.split(" ") if member]
    parts = [re.fullmatch(r"(v[0-9]+[a-z]*),(.+)", member) for member in members]
    signatures = [(part[1], part[2]) for part in parts if part]
    if not signatures or len(signatures) < len(members):
        raise VerificationError(
            "malformed_header", f"{prefix}-signature is not a list of <version>,<signature> with spaces between"
        )
    return _Claim(message_id, timestamp, f"{message_id}.{timestamp}.", signatures)


def _read_pairs(headers: dict[str, str], *, name: str) -> _Claim:
    """`<name>: t=<timestamp>,v1=<hex>,v1=<hex>...`."""
    pairs = [member.strip(" ").partition("=") for member in _get(headers, name).split(",")]
    times = [value for key, _, value in pairs if key == "t"]
    if len(times) != 1 or not all(key and value for key, _, value in pairs):
        raise VerificationError("malformed_header", f"{name} is not t=<timestamp>,v1=<signature>")
    return _Claim(None, times[0], f"{times[0]}.", [(key, value) for key, _, value in pairs if key != "t"])


def _read_split(headers: dict[str, str], *, name: str, time_name: str, before: str, labelled: bool) -> _Claim:
    """`<name>: <version>=<hex>` or `<name>: <hex>`, with the timestamp in a header of its own."""
    timestamp = _get(headers, time_name)
    return _read_one(headers, name=name, labelled=labelled)._replace(
        timestamp=timestamp, before=before.format(t=timestamp)
    )


def _read_one(headers: dict[str, str], *, name: str, labelled: bool) -> _Claim:
    """`<name>: <version>=<signature>` or `<name>: <signature>`, over the body alone."""
    line = _get(headers, name)
    version, separator, text = line.partition("=") if labelled else ("", "", line)
    if labelled and not separator:
        raise VerificationError("malformed_header", f"{name} does not say which kind of signature it holds")
    return _Claim(None, None, "", [(version, text)])


def _get(headers: dict[str, str], name: str) -> str:
    value = headers.get(name)
    if not value:
        raise VerificationError("missing_header", f"the header {name} is missing or empty")
    return value


# --- The schemes


class _Scheme(NamedTuple):
    read: Callable[[dict[str, str]], _Claim]
    key: Callable[[str], _Key]
    id_header: str = "webhook-id"


def _standard(prefix: str) -> _Scheme:
    return _Scheme(partial(_read_standard, prefix=prefix), _standard_key, f"{prefix}-id")


def _stripe_like(name: str, id_header: str = "webhook-id") -> _Scheme:
    return _Scheme(partial(_read_pairs, name=name), partial(_text_key, "v1"), id_header)


def _split(name: str, time_name: str, *, before: str, version: str = "") -> _Scheme:
    read = partial(_read_split, name=name, time_name=time_name, before=before, labelled=bool(version))
    return _Scheme(read, partial(_text_key, version))


def _bare(name: str, *, version: str = "", in_hex: bool = True) -> _Scheme:
    return _Scheme(partial(_read_one, name=name, labelled=bool(version)), partial(_text_key, version, in_hex=in_hex))


_SCHEMES = {
    "standard-webhooks": _standard("webhook"),
    "svix": _standard("svix"),
    "stripe-like": _stripe_like("stripe-signature"),
    "kingminos": _stripe_like("kingminos-signature", "kingminos-event-id"),
    "elicitra": _stripe_like("elicitra-signature"),
    "elicitra-split": _split("elicitra-signature", "elicitra-timestamp", before="{t}."),
    "slack-like": _split("x-slack-signature", "x-slack-request-timestamp", before="v0:{t}:", version="v0"),
    "github-like": _bare("x-hub-signature-256", version="sha256"),
    "shopify-like": _bare("x-shopify-hmac-sha256", in_hex=False),
}
