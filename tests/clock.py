"""A clock that a test sets: the hub's own clocks in Python, and the database's for this connection."""

import time
from datetime import UTC, datetime, timedelta

from django.db import connection

from deliveries import pump, transport

# Found before pg_catalog's functions of the same names, where the search path says so.
_FUNCTIONS = """
CREATE SCHEMA IF NOT EXISTS test_clock;
CREATE TABLE IF NOT EXISTS test_clock.offsets (ahead interval NOT NULL);
DELETE FROM test_clock.offsets;
INSERT INTO test_clock.offsets VALUES ('0');
CREATE OR REPLACE FUNCTION test_clock.now() RETURNS timestamptz LANGUAGE sql STABLE
    AS 'SELECT pg_catalog.now() + ahead FROM test_clock.offsets';
CREATE OR REPLACE FUNCTION test_clock.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
    AS 'SELECT pg_catalog.statement_timestamp() + ahead FROM test_clock.offsets';
CREATE OR REPLACE FUNCTION test_clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
    AS 'SELECT pg_catalog.clock_timestamp() + ahead FROM test_clock.offsets';
SET search_path = public, test_clock, pg_catalog;
"""


class Clock:
    """The time that the hub believes it is: the real one, and what it was advanced by."""

    def __init__(self, monkeypatch) -> None:
        self._ahead = timedelta()
        with connection.cursor() as cursor:
            cursor.execute(_FUNCTIONS)
        really = time.time
        monkeypatch.setattr(time, "time", lambda: really() + self._ahead.total_seconds())
        for module in (pump, transport):
            monkeypatch.setattr(module, "datetime", self._datetime())

    def _datetime(self):
        clock = self

        class Advanced(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) + clock._ahead

        return Advanced

    def now(self) -> datetime:
        """What time it is."""
        return datetime.now(UTC) + self._ahead

    def advance_to(self, moment: datetime) -> None:
        """Sets it, forward."""
        self._ahead = max(moment - datetime.now(UTC), self._ahead)
        with connection.cursor() as cursor:
            cursor.execute("UPDATE test_clock.offsets SET ahead = %s", [self._ahead])

    def close(self) -> None:
        """Gives the connection its own time back."""
        with connection.cursor() as cursor:
            cursor.execute("SET search_path = public; DROP SCHEMA test_clock CASCADE")
