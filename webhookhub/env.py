"""Typed readers of environment variables: a wrong value stops the start and names the variable.

`NAME_FILE` may hold the path of a file with the value (a mounted secret); `NAME` wins when both are set.
"""

import os
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off", ""})


class SettingError(Exception):
    """A setting is missing or wrong; the message names it, the rule and the way out."""


def _read(name: str) -> str | None:
    if name in os.environ:
        return os.environ[name].strip()
    path = os.environ.get(f"{name}_FILE")
    if path is None:
        return None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise SettingError(f"{name}_FILE names {path}, which cannot be read: {error.strerror}") from error


def env_str(name: str, default: str | None = None) -> str:
    """A text. Without a default the variable is required."""
    value = _read(name)
    if value is None:
        if default is None:
            raise SettingError(f"{name} is not set. Set it, or {name}_FILE to a file that holds it")
        return default
    return value


def env_bool(name: str, default: bool) -> bool:
    """A switch: 1/true/yes/on or 0/false/no/off."""
    value = _read(name)
    if value is None:
        return default
    if value.lower() in TRUE:
        return True
    if value.lower() in FALSE:
        return False
    raise SettingError(f"{name} is {value!r}; it must be one of 1, true, yes, on, 0, false, no, off")


def env_int(name: str, default: int, *, minimum: int = 0) -> int:
    """A whole number of at least `minimum`."""
    value = _read(name)
    if value is None:
        return default
    try:
        number = int(value)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise SettingError(f"{name} is {value!r}; it must be a whole number of at least {minimum}")
    return number


def env_list(name: str, default: str = "") -> list[str]:
    """A comma-separated list; spaces around items and empty items do not matter."""
    return [item for item in map(str.strip, env_str(name, default).split(",")) if item]


def env_choice(name: str, default: str, choices: Collection[str]) -> str:
    """One of a few words."""
    value = env_str(name, default)
    if value not in choices:
        raise SettingError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
    return value


def env_file(name: str, default: str) -> str:
    """The path of a file that can be read."""
    path = env_str(name, default)
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise SettingError(f"{name} names {path}, which cannot be read: {error.strerror}") from error
    return path


def env_secret(name: str, generate: Callable[[], str] | None = None, *, folder: Path) -> str:
    """A secret. With `generate` a missing one is made once and kept in `folder` (mode 0600), else it is required."""
    value = _read(name)
    if value:
        return value
    if generate is None:
        raise SettingError(
            f"{name} is not set. Set it or {name}_FILE; every machine of one installation needs the same value"
        )
    path = folder / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(generate())
    except FileExistsError:
        pass
    except OSError as error:
        raise SettingError(f"{name} is not set and cannot be kept in {path}: {error.strerror}") from error
    return path.read_text().strip()


def random_text() -> str:
    """256 bits of randomness as text, for `env_secret`."""
    return secrets.token_urlsafe(32)
