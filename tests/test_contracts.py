"""Contracts as pure values: the schedule, Retry-After, and a verdict for everything."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoints.contracts import DAY, STANDARD, decide, draw, parse_retry_after
from tests import vectors_loader

NOW = 1_768_478_400  # 2026-01-15T12:00:00Z, the vectors' now
EXACT = dataclasses.replace(STANDARD, jitter=0.0)


def verdict(contract=EXACT, *, attempt=1, status=500, retry_after=None, delivery="d"):
    return decide(contract, delivery=delivery, attempt=attempt, status=status, retry_after=retry_after, now=NOW)


@pytest.mark.vectors
@pytest.mark.parametrize("case", vectors_loader.load("retry_after")["cases"], ids=lambda case: case["id"])
def test_retry_after(case):
    assert parse_retry_after(case["value"], NOW) == case["expected_seconds"]


@pytest.mark.parametrize(
    "draw_case",
    vectors_loader.load("policies")["meta"]["deterministic_jitter"]["draws"],
    ids=lambda case: f"{case['delivery_id']}-{case['n']}",
)
def test_draws_are_the_ones_of_the_vectors(draw_case):
    assert draw(draw_case["delivery_id"], draw_case["n"]) == int(draw_case["h64"]) / 2**64


def test_the_standard_schedule_waits_as_standard_webhooks_says_and_then_gives_up():
    waits = [verdict(attempt=attempt).wait for attempt in range(1, 10)]
    assert waits == [5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400]
    assert verdict(attempt=10).action == "dead"
    assert STANDARD.max_attempts == 10


@pytest.mark.parametrize("status", [200, 201, 202, 204, 226, 299])
def test_any_2xx_delivers(status):
    assert verdict(status=status).action == "delivered"


def test_410_disables_the_endpoint():
    assert verdict(status=410).action == "disable"
    assert verdict(status=410, attempt=10).action == "disable"


@pytest.mark.parametrize(
    "status", [100, 103, 199, 300, 301, 302, 304, 307, 308, 400, 401, 404, 409, 429, 500, 503, 599, None]
)
def test_everything_else_is_tried_again(status):
    assert verdict(status=status).action == "retry"


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_makes_a_wait_longer_and_never_shorter(status):
    assert verdict(status=status, retry_after="120").wait == 120
    assert verdict(status=status, retry_after="1").wait == 5
    assert verdict(status=status, retry_after="9999999999").wait == DAY
    assert verdict(status=status, retry_after="soon").wait == 5


def test_retry_after_counts_on_no_other_status():
    assert verdict(status=500, retry_after="120").wait == 5
    assert verdict(status=301, retry_after="120").wait == 5


def test_a_thousand_retries_after_an_outage_are_spread_and_none_comes_before_retry_after():
    waits = [verdict(STANDARD, status=503, retry_after="600", delivery=f"d{number}").wait for number in range(1_000)]
    assert min(waits) >= 600
    assert max(waits) - min(waits) > 0.1 * 600 * 0.95


@given(
    attempt=st.integers(1, 40),
    status=st.none() | st.integers(100, 599),
    retry_after=st.none() | st.text(max_size=30) | st.integers(0, 10**12).map(str),
    delivery=st.text(max_size=40),
    now=st.floats(0, 4e9),
)
def test_a_verdict_is_total_bounded_and_always_the_same(attempt, status, retry_after, delivery, now):
    def judge():
        return decide(STANDARD, delivery=delivery, attempt=attempt, status=status, retry_after=retry_after, now=now)

    found = judge()
    assert found == judge()
    if found.action == "retry":
        base = STANDARD.waits[attempt - 1]
        assert 0.9 * base <= found.wait <= max(1.1 * base, 1.1 * DAY)
    else:
        assert found.wait == 0
        assert found.action in {"delivered", "dead", "disable"}


@given(delivery=st.text(max_size=40), number=st.integers(0, 100))
def test_a_draw_is_a_share(delivery, number):
    assert 0 <= draw(delivery, number) <= 1
