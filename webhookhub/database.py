"""Hot statements on Django's connection: prepared by the server, with binary parameters and results."""

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import psycopg
from django.db import connections, transaction
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.pq import Format

# What hot statements need of the planner: all of them go by an index, whatever the statistics say of tables whose
# state changes by the second, and to plan them anew would take longer than to run them.
PLANNER = (
    "SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off; SET plan_cache_mode = force_generic_plan"
)
# What those need that take a few rows out of many: each row of a batch is looked up, and order is an index's.
LOOK_UPS = "SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_sort = off"

_LOOK_UPS_ONCE = f"{PLANNER}; {LOOK_UPS}".replace("SET ", "SET LOCAL ")
PUMP_NAME = "webhookhub pump"  # of a pump's sessions

_SESSIONS = """
SELECT count(*)::int, extract(epoch FROM clock_timestamp() - max(query_start))::float8 FROM pg_stat_activity
WHERE datname = current_database() AND application_name = %(name)s
"""


_length, _head = struct.Struct("!i").pack, struct.Struct("!iiIii").pack
_NULL = _length(-1)
_OIDS = {"bool": 16, "bytea": 17, "int4": 23, "text": 25, "uuid": 2950}  # pg_type


class Array(bytes):
    """An array parameter in PostgreSQL's binary format (array_recv), for a placeholder with a cast.

    psycopg dumps a list item by item, in several times the time that the server needs to store it.
    """


def array(kind: str, items: Iterable[bytes | None]) -> Array:
    """An array of `kind`, a type's name in pg_type, from the binary form of each item; None is NULL."""
    parts = [_NULL if item is None else _length(len(item)) + item for item in items]
    return Array(_head(1, 1, _OIDS[kind], len(parts), 1) + b"".join(parts))


class _ArrayDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Array) -> Array:
        return obj


psycopg.adapters.register_dumper(Array, _ArrayDumper)


def name_session(name: str, using: str = "default") -> None:
    """Says in `pg_stat_activity` what this thread's connection is for."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT set_config('application_name', %s, false)", [name])


def sessions_named(name: str, using: str = "default") -> tuple[int, float | None]:
    """How many sessions of this database have a name, and how long ago (seconds) the last of their statements began.

    Roles see when of their own sessions alone.
    """
    [(count, age)] = run(using, _SESSIONS, {"name": name})
    return count, age


def settle_planner(using: str = "default", *, look_ups: bool = False) -> None:
    """Prepares this thread's connection for `run`; for a thread that does little else on it."""
    with connections[using].cursor() as cursor:
        cursor.execute(f"{PLANNER}; {LOOK_UPS}" if look_ups else PLANNER)


def run_by_index(using: str, statement: str, params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """As `run`, for a thread that does much else on its connection: by an index whatever the statistics say."""
    with transaction.atomic(using):
        with connections[using].cursor() as cursor:
            cursor.execute(_LOOK_UPS_ONCE)
        return run(using, statement, params)


def run(using: str, statement: str, params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Runs one statement, in the transaction that is open if there is one, and returns its rows.

    Errors are Django's (`django.db.Error` and its kinds).
    """
    connection = connections[using]
    connection.ensure_connection()
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.execute(statement.encode(), params, prepare=True, binary=True)
        return cursor.fetchall() if cursor.description else []


class LoopConnection:
    """A connection for one event loop, to `run` statements of its own while the loop does other things: one at a time,
    each a transaction. It is opened when there is something to run, as Django's settings say.
    """

    def __init__(self, using: str = "default") -> None:
        self._django = connections.create_connection(using)  # its settings and its words for errors; never opened
        self._connection: psycopg.AsyncConnection | None = None

    async def run(self, statement: str, params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """As `run`. After an error of the connection, the next one is run on a new connection."""
        with self._django.wrap_database_errors:
            if self._connection is None or self._connection.closed:
                self._connection = await self._connect()
            cursor = await self._connection.execute(statement.encode(), params, prepare=True, binary=True)
            return await cursor.fetchall() if cursor.description else []

    async def _connect(self) -> psycopg.AsyncConnection:
        options = self._django.get_connection_params()
        for of_django in ("cursor_factory", "context"):
            options.pop(of_django)
        connection = await psycopg.AsyncConnection.connect(**options, autocommit=True)
        if role := self._django.settings_dict["OPTIONS"].get("assume_role"):
            await connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
        await connection.execute(PLANNER)
        return connection

    async def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            await self._connection.close()
