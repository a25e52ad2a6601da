"""Secrets at rest: Fernet with several keys, the first of which encrypts. Pure; settings hold the keys."""

import functools

from cryptography.fernet import Fernet, InvalidToken, MultiFernet


class Unreadable(Exception):
    """A stored secret that none of the ENCRYPTION_KEYS opens."""


@functools.cache
def _box(keys: tuple[str, ...]) -> MultiFernet:
    return MultiFernet([Fernet(key) for key in keys])


def check_keys(keys: list[str]) -> None:
    """Raises ValueError unless there is a key, and each is one."""
    if not keys:
        raise ValueError("there must be at least one key")
    for number, key in enumerate(keys, start=1):
        try:
            Fernet(key)
        except ValueError:
            raise ValueError(f"key {number} is no Fernet key: 32 bytes in URL-safe base64") from None


def seal(text: str, keys: list[str]) -> bytes:
    """Encrypts a secret with the first key."""
    return _box(tuple(keys)).encrypt(text.encode())


def unseal(sealed: bytes, keys: list[str]) -> str:
    """Decrypts what `seal` made, with whichever key fits. Raises Unreadable."""
    try:
        return _box(tuple(keys)).decrypt(sealed).decode()
    except (InvalidToken, UnicodeDecodeError):
        raise Unreadable("no key of ENCRYPTION_KEYS opens this secret") from None
