"""The pace of an endpoint, as a pure value: rate, cap, order, circuit and recovery."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoints.pace import BURST_SECONDS, FAILURES_TO_OPEN, Pace

T0 = datetime(2026, 12, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def take(pace: Pace, seconds: float, *, wanted: int = 1_000, in_flight: int = 0) -> tuple[Pace, int]:
    """What is taken up of so many that wait."""
    count = min(wanted, pace.allowance(at(seconds), free=1_000, in_flight=in_flight).requests)
    return pace.after_claim(at(seconds), count), count


def open_circuit(patience: float = 60, failures: int = FAILURES_TO_OPEN) -> Pace:
    return Pace(patience=patience).after_results(T0, arrived=False, failed=failures)


# --- Rate


@given(rate=st.floats(0.01, 5_000), steps=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=60))
def test_in_no_stretch_of_time_more_goes_out_than_the_rate_allows(rate, steps):
    pace, now, taken = Pace(rate_limit=rate), 0.0, []
    for step in steps:
        now += step
        pace, count = take(pace, now)
        taken.append((now, count))
    for first in range(len(taken)):
        total = 0
        for moment, count in taken[first:]:
            total += count
            assert total <= (moment - taken[first][0] + BURST_SECONDS) * rate + 1 + 1e-3


@pytest.mark.parametrize(("rate", "seconds"), [(0.5, 20), (1, 20), (50, 4), (400, 4)])
def test_with_enough_waiting_the_rate_is_reached(rate, seconds):
    pace, now, total = Pace(rate_limit=rate), 0.0, 0
    while now < seconds:
        pace, count = take(pace, now)
        total += count
        again = pace.allowance(at(now), free=1_000, in_flight=0).again
        assert again > 0
        now += min(again, 0.25)
    assert seconds * rate * 0.97 <= total <= seconds * rate + 1 + BURST_SECONDS * rate


def test_what_was_not_taken_up_is_not_used_up():
    pace, count = take(Pace(rate_limit=100), 0.0, wanted=0)
    assert (count, pace.next_slot_at) == (0, None)


# --- Cap and order


def test_a_cap_counts_what_is_in_flight_everywhere():
    pace = Pace(max_in_flight=5)
    assert [take(pace, 0, in_flight=busy)[1] for busy in (0, 3, 5, 7)] == [5, 2, 0, 0]


def test_in_order_is_one_at_a_time():
    assert take(Pace(ordered=True), 0)[1] == 1


# --- Circuit


def test_a_circuit_opens_after_a_run_of_failures_and_closes_at_the_first_arrival():
    few = Pace(patience=60).after_results(T0, arrived=False, failed=FAILURES_TO_OPEN - 1)
    assert few.probe_at is None
    assert few.after_results(at(1), arrived=True, failed=3).failures_in_a_row == 0
    pace = few.after_results(at(1), arrived=False, failed=1)
    assert (pace.probe_at, pace.failing_since) == (at(2), T0)
    closed = pace.after_results(at(3), arrived=True, failed=0)
    assert (closed.probe_at, closed.failures_in_a_row, closed.failing_since, closed.probes) == (None, 0, None, 0)
    assert closed.recovered_at == at(3)


def test_probes_come_one_at_a_time_at_growing_intervals_bounded_by_patience():
    pace, now, intervals = open_circuit(patience=10), 0.0, []
    for _ in range(7):
        before = now
        while take(pace, now)[1] != 1 or pace.allowance(at(now), free=9, in_flight=0).overdue:
            now += 0.5
        intervals.append(now - before)
        pace, _ = take(pace, now)
        assert pace.allowance(at(now), free=9, in_flight=1).overdue == 10, "only one, while nothing is heard of it"
        pace = pace.after_results(at(now), arrived=False, failed=1)
    assert intervals == [1, 2, 4, 8, 10, 10, 10]


def test_a_probe_of_which_nothing_is_heard_is_made_again():
    pace, _ = take(open_circuit(), 1)
    assert pace.allowance(at(15), free=9, in_flight=1).overdue
    assert take(pace, 21.5) == (pace.after_claim(at(21.5), 1), 1)


def test_what_has_waited_for_as_long_as_the_contract_allows_goes_out():
    allowed = open_circuit(patience=60).allowance(at(0.5), free=9, in_flight=0)
    assert (allowed.requests, allowed.overdue) == (9, 60)


def test_under_a_contract_without_patience_no_circuit_opens():
    pace = open_circuit(patience=0, failures=500)
    assert (pace.probe_at, pace.failures_in_a_row) == (None, 500)
    assert take(pace, 1)[1] == 1_000


def test_what_has_recovered_gets_more_step_by_step():
    pace = open_circuit().after_results(at(5), arrived=True, failed=0)
    taken = [pace.allowance(at(5 + step), free=100, in_flight=0).requests for step in (0, 0.5, 1, 2, 3, 4)]
    assert taken == [1, 2, 4, 16, 64, 100]
    assert pace.allowance(at(6), free=100, in_flight=3).requests == 1
    assert take(pace, 9)[0].recovered_at is None


def test_what_fails_again_while_it_recovers_is_open_at_once():
    pace = open_circuit().after_results(at(5), arrived=True, failed=0).after_results(at(6), arrived=False, failed=1)
    assert (pace.probe_at, pace.recovered_at) == (at(7), None)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.booleans(), st.integers(0, 20)), max_size=30),
    st.sampled_from([0, 60, 120]),
    st.none() | st.floats(0.01, 100),
    st.integers(0, 200),
)
def test_whatever_happens_nothing_is_owed_for_ever(happenings, patience, rate, busy):
    pace, now = Pace(patience=patience, rate_limit=rate), 0.0
    for step, arrived, failed in happenings:
        now += step
        pace, count = take(pace, now, wanted=5, in_flight=busy)
        assert 0 <= count <= 5
        pace = pace.after_results(at(now), arrived=arrived, failed=failed)
    later = pace.allowance(at(now + max(patience, 20) + 200), free=7, in_flight=0)
    assert later.requests > 0
    assert later.again > 0
