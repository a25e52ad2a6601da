"""Where a receiver keeps which messages it knows, and what it answered: in memory, or in a file that processes share.

A store of your own has the three methods of `Store`, on anything with a unique constraint or a compare-and-set.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from webhookhub.receiver import Response

__all__ = ["Held", "MemoryStore", "SqliteStore", "Store"]


class Held(NamedTuple):
    """A message that is known: what was answered, or None while somebody processes it."""

    response: Response | None


class Store(Protocol):
    """Messages by their names, one or two each, sorted. A message is known when any of its names is.

    Names stand until their time has passed: at the second itself they are still known.
    """

    def claim(self, names: Sequence[str], token: str, *, lease: float) -> Held | None:
        """What is known of a message; None if nothing was, and it is the caller's now for `lease` seconds.

        Of several callers at once, in whatever threads and processes, one gets None.
        """

    def keep(self, names: Sequence[str], response: Response, *, seconds: float) -> None:
        """Keeps a response, whoever holds the message: it was processed, even if the lease had run out."""

    def release(self, names: Sequence[str], token: str) -> None:
        """Forgets the claim made with this token, if it still stands."""


class _Entry(NamedTuple):
    until: float
    token: str
    response: Response | None


class MemoryStore:
    """In this process's memory, for tests and for receivers of one process. A restart forgets everything."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._next_prune = 0.0

    def claim(self, names: Sequence[str], token: str, *, lease: float) -> Held | None:
        """See `Store`."""
        now = self._now()
        with self._lock:
            self._prune(now)
            for name in names:
                entry = self._entries.get(name)
                if entry and entry.until >= now:
                    return Held(entry.response)
            self._entries.update(dict.fromkeys(names, _Entry(now + lease, token, None)))
        return None

    def keep(self, names: Sequence[str], response: Response, *, seconds: float) -> None:
        """See `Store`."""
        with self._lock:
            self._entries.update(dict.fromkeys(names, _Entry(self._now() + seconds, "", response)))

    def release(self, names: Sequence[str], token: str) -> None:
        """See `Store`."""
        with self._lock:
            for name in names:
                entry = self._entries.get(name)
                if entry and entry.token == token:
                    del self._entries[name]

    def _prune(self, now: float) -> None:
        """Once a minute, since it looks at every entry."""
        if now >= self._next_prune:
            self._next_prune = now + 60
            self._entries = {name: entry for name, entry in self._entries.items() if entry.until >= now}

    def __len__(self) -> int:
        return len(self._entries)


class SqliteStore:
    """In an SQLite file on a local disk, for several processes on one machine."""

    _TABLE = """
        CREATE TABLE IF NOT EXISTS seen (
            name TEXT PRIMARY KEY, until REAL NOT NULL, token TEXT NOT NULL,
            status INTEGER, body BLOB, content_type TEXT -- NULL while it is being processed
        ) WITHOUT ROWID;
        CREATE INDEX IF NOT EXISTS seen_until ON seen (until);
    """

    def __init__(self, path: str | Path, *, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        with closing(self._connect()) as connection:
            connection.executescript(self._TABLE)

    def claim(self, names: Sequence[str], token: str, *, lease: float) -> Held | None:
        """See `Store`."""
        with self._transaction() as connection:
            now = self._now()  # after the lock was had, which may have taken long
            connection.execute("DELETE FROM seen WHERE until < ?", [now])
            for name in names:
                query = "SELECT status, body, content_type FROM seen WHERE name = ?"
                for status, body, content_type in connection.execute(query, [name]):
                    return Held(None if status is None else Response(status, body, content_type))
            self._put(connection, names, (now + lease, token, None, None, None))
        return None

    def keep(self, names: Sequence[str], response: Response, *, seconds: float) -> None:
        """See `Store`."""
        with self._transaction() as connection:
            until = self._now() + seconds
            self._put(connection, names, (until, "", response.status, response.body, response.content_type))

    def release(self, names: Sequence[str], token: str) -> None:
        """See `Store`."""
        with self._transaction() as connection:
            connection.executemany("DELETE FROM seen WHERE name = ? AND token = ?", [(name, token) for name in names])

    def _connect(self) -> sqlite3.Connection:
        # A connection for each call: none is shared between threads, or carried through a fork.
        return sqlite3.connect(self._path, timeout=30, isolation_level=None)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")  # one that began by reading could not always go on to write
            with connection:  # commits, or rolls back
                yield connection

    @staticmethod
    def _put(connection: sqlite3.Connection, names: Sequence[str], values: tuple[object, ...]) -> None:
        connection.executemany("REPLACE INTO seen VALUES (?, ?, ?, ?, ?, ?)", [(name, *values) for name in names])
