"""Identifiers as people see them."""

import time
import uuid

import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from webhookhub.ids import created_ms, parse_typeid, typeid, uuid7


@given(st.uuids())
def test_an_id_is_read_back_and_holds_no_dot(key):
    shown = typeid("evt", key)
    assert parse_typeid("evt", shown) == key
    assert "." not in shown
    assert len(shown) == 30


@pytest.mark.parametrize(
    "text",
    [
        "",
        "evt",
        "evt_",
        "dlv_01kb9z3v7ye2sa1r6xq4m5n8pd",
        "evt_01kb9z3v7ye2sa1r6xq4m5n8p",
        "evt_" + "u" * 26,
        "evt_☃",
        "evt_zzzzzzzzzzzzzzzzzzzzzzzzzz",
    ],
)
def test_anything_else_is_refused_with_the_form(text):
    with pytest.raises(ValueError, match="is not an id of the form evt_"):
        parse_typeid("evt", text)


def test_keys_are_in_the_order_of_time():
    keys = [uuid7() for _ in range(1_000)]
    assert keys == sorted(keys)
    assert abs(created_ms(keys[0]) - time.time() * 1000) < 5_000


def test_keys_made_by_the_database_are_alike(db):
    with connection.cursor() as cursor:
        cursor.execute("SELECT hub_uuid7() FROM generate_series(1, 100)")
        keys = [row[0] for row in cursor.fetchall()]
    assert len(set(keys)) == 100
    assert all(isinstance(key, uuid.UUID) and key.version == 7 and key.variant == uuid.RFC_4122 for key in keys)
    assert abs(created_ms(keys[0]) - time.time() * 1000) < 5_000


def test_keys_of_postgresql_before_18_are_alike(db):
    from importlib import import_module

    migration = import_module("deliveries.migrations.0001_initial")
    with connection.cursor() as cursor:
        cursor.execute(migration.UUID7.replace("hub_uuid7", "old_uuid7"))
        cursor.execute("SELECT old_uuid7() FROM generate_series(1, 100)")
        keys = [row[0] for row in cursor.fetchall()]
    assert len(set(keys)) == 100
    assert all(key.version == 7 and key.variant == uuid.RFC_4122 for key in keys)
    assert abs(created_ms(keys[0]) - time.time() * 1000) < 5_000
