"""Hot statements on Django's connection: prepared by the server, with binary parameters and results."""

from collections.abc import Mapping
from typing import Any

import psycopg
from django.db import connections

# What hot statements need of the planner: all of them go by an index, whatever the statistics say of tables whose
# state changes by the second, and to plan them anew would take longer than to run them.
PLANNER = (
    "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off; SET enable_incremental_sort = off; "
    "SET jit = off; SET plan_cache_mode = force_generic_plan"
)


def settle_planner(using: str = "default") -> None:
    """Prepares this thread's connection for `run`; for a thread that does little else on it."""
    with connections[using].cursor() as cursor:
        cursor.execute(PLANNER)


def run(using: str, sql: str, params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Runs one statement, in the transaction that is open if there is one, and returns its rows.

    Errors are Django's (`django.db.Error` and its kinds).
    """
    connection = connections[using]
    connection.ensure_connection()
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.execute(sql.encode(), params, prepare=True, binary=True)
        return cursor.fetchall() if cursor.description else []
