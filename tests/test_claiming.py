"""Claims from a remembered position: every due delivery once, in order, fairly over endpoints."""

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from unittest import mock

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models.functions import Now
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from deliveries import claiming
from deliveries.claiming import Busy, Claimer
from deliveries.models import Delivery, Event
from deliveries.querysets import PAGE, Claimed, DeliveryQuerySet
from endpoints.models import Endpoint
from webhookhub.database import settle_planner

pytestmark = pytest.mark.django_db(transaction=True)

LEASE = timedelta(minutes=1)


@pytest.fixture
def add(tenant) -> Callable[..., list[uuid.UUID]]:
    """Adds due deliveries for an endpoint: the first is `ago` seconds overdue, each next one `step` seconds less."""
    event = Event.objects.create(tenant=tenant, type="a", payload=b"{}")

    def insert(endpoint: Endpoint, count: int, *, ago: float = 3_600, step: float = 0, state: str = "pending"):
        with connection.cursor() as cursor:
            cursor.execute(
                """
                INSERT INTO deliveries_delivery
                    (id, event_id, endpoint_id, contract, state, trigger, attempts_made, last_error, due_at)
                SELECT hub_uuid7(), %s, %s, 'standard', %s, 'automatic', 0, '',
                    now() - make_interval(secs => %s - %s * n)
                FROM generate_series(0, %s) n RETURNING id
                """,
                [event.pk, endpoint.pk, state, ago, step, count - 1],
            )
            return [row[0] for row in cursor.fetchall()]

    return insert


@pytest.fixture
def endpoints(tenant) -> list[Endpoint]:
    """Ten endpoints of the tenant."""
    return Endpoint.objects.bulk_create(Endpoint(tenant=tenant, name=str(n), url="http://x") for n in range(10))


def make_claimer(endpoint_limit: int = 10_000, page_rows: int = 250, priority: int = 0) -> Claimer:
    return Claimer(priority=priority, endpoint_limit=endpoint_limit, page_rows=page_rows, lease=LEASE)


def claim(claimer: Claimer, room: int = 500, busy: Counter[uuid.UUID] | None = None) -> list[Claimed]:
    """With so many places that nobody has too many of them."""
    return claimer.claim(room, Busy(Counter(busy)), free=1_000_000)[1]


def claim_all(claimer: Claimer, room: int = 500) -> list[Claimed]:
    """Claims until a claim finds nothing."""
    found: list[Claimed] = []
    while rows := claim(claimer, room):
        found += rows
    return found


def finish(rows: Sequence[Claimed]) -> None:
    Delivery.objects.filter(pk__in=[row.id for row in rows]).update(
        state="delivered", claim_token=None, lease_until=None
    )


def in_order(ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
    return list(Delivery.objects.filter(pk__in=ids).order_by("due_at", "id").values_list("pk", flat=True))


# --- Each once, in order


def test_a_claim_takes_what_is_due_longest_and_marks_it(endpoints, add):
    ids = in_order(add(endpoints[0], 20, step=1) + add(endpoints[1], 20, step=1))

    token, rows = make_claimer().claim(15, Busy(), free=1_000)

    assert {row.id for row in rows} == set(ids[:15])
    sending = Delivery.objects.filter(state="sending", claim_token=token, lease_until__gt=Now(), claimed_at__lte=Now())
    assert {one.pk for one in sending} == set(ids[:15])


def test_one_claim_after_the_other_takes_every_row_once_and_in_order(endpoints, add):
    ids = in_order(add(endpoints[0], 100, step=2) + add(endpoints[1], 100, step=3))
    claimer = make_claimer(page_rows=30)

    batches = [claim(claimer) for _ in range(8)]

    assert [len(batch) for batch in batches] == [30, 30, 30, 30, 30, 30, 20, 0]
    assert [sorted(in_order([row.id for row in batch])) for batch in batches[:-1]] == [
        sorted(ids[start : start + 30]) for start in range(0, 200, 30)
    ]


def test_a_claimed_row_carries_what_a_request_needs(tenant, make_endpoint, add):
    endpoint = make_endpoint()
    [delivery] = add(endpoint, 1)

    [row] = claim(make_claimer())

    assert (row.id, row.endpoint_id, row.attempts_made) == (delivery, endpoint.pk, 0)
    assert (row.payload, row.content_type, row.url) == (b"{}", "application/json", endpoint.url)
    assert (row.contract, row.endpoint_status, len(row.sealed)) == ("standard", "active", 1)


def test_nothing_is_claimed_before_it_is_due(endpoints, add):
    add(endpoints[0], 5, ago=-60)
    due = add(endpoints[0], 2, ago=0)
    claimer = make_claimer()

    first = claim(claimer)
    Delivery.objects.filter(state="pending").update(due_at=Now())
    second = claim(claimer)

    assert {row.id for row in first} == set(due)
    assert len(second) == 5


@pytest.mark.parametrize("state", ["delivered", "dead", "held", "discarded"])
def test_only_what_is_pending_is_claimed(endpoints, add, state):
    add(endpoints[0], 3, state=state)

    assert claim(make_claimer()) == []


def test_five_thousand_rows_of_one_due_time_are_all_claimed(endpoints, add):
    ids = add(endpoints[0], 5_000)

    rows = claim_all(make_claimer())

    assert len(rows) == 5_000
    assert {row.id for row in rows} == set(ids)


def test_rows_of_one_due_time_are_all_claimed_also_past_the_limit_of_their_endpoint(endpoints, add):
    ids = add(endpoints[0], 500) + add(endpoints[1], 500)
    claimer = make_claimer(endpoint_limit=60, page_rows=50)

    rows = []
    while batch := claim(claimer):
        finish(batch)
        rows += batch

    assert sorted(row.id for row in rows) == sorted(ids)


# --- Limits


def test_an_endpoint_gets_no_more_than_its_limit_and_the_others_come_to_their_turn(endpoints, add):
    add(endpoints[0], 300, ago=7_200)
    add(endpoints[1], 5)

    claimer, busy = make_claimer(endpoint_limit=10), Counter[uuid.UUID]()

    for _ in range(5):
        busy.update(row.endpoint_id for row in claim(claimer, 250, busy))

    assert busy == {endpoints[0].pk: 10, endpoints[1].pk: 5}


def test_what_is_in_flight_already_counts_towards_the_limit(endpoints, add):
    add(endpoints[0], 50)

    rows = claim(make_claimer(endpoint_limit=10), busy=Counter({endpoints[0].pk: 7}))

    assert len(rows) == 3


def test_a_lagging_endpoint_goes_on_where_it_was_as_slots_free_up(endpoints, add):
    ids = in_order(add(endpoints[0], 40, step=1))
    claimer = make_claimer(endpoint_limit=10)

    batches = [claim(claimer), claim(claimer, busy=Counter({endpoints[0].pk: 10}))]
    batches += [claim(claimer, busy=Counter({endpoints[0].pk: busy})) for busy in (6, 9, 0, 0, 0, 0)]

    assert [len(batch) for batch in batches] == [10, 0, 4, 1, 10, 10, 5, 0]
    assert in_order([row.id for batch in batches for row in batch]) == ids
    start = 0
    for batch in batches:
        assert {row.id for row in batch} == set(ids[start : start + len(batch)])
        start += len(batch)


def test_lagging_endpoints_take_turns(endpoints, add):
    for endpoint in endpoints[:3]:
        add(endpoint, 100)
    claimer = make_claimer(endpoint_limit=10, page_rows=400)
    finish(claim(claimer))
    for _ in range(30):  # room for one only, each time
        finish(claim(claimer, room=1))

    done = Counter(Delivery.objects.filter(state="delivered").values_list("endpoint", flat=True))

    assert sorted(done.values()) == [20, 20, 20]


def test_backlogs_that_could_fill_all_room_do_not_starve_another_endpoint(endpoints, add, monkeypatch):
    """Six endpoints are known to have more due than there is room for; then a seventh has one delivery."""
    # No sweep of every second, which a slow machine would meet in other steps than a quick one.
    monkeypatch.setattr(claiming, "OVERLAPS", ((0.0, timedelta(milliseconds=100)),))
    for endpoint in endpoints[:6]:
        add(endpoint, 200)
    claimer, busy, in_flight = make_claimer(endpoint_limit=10), Counter(), []
    late: list[uuid.UUID] = []

    for step in range(40):
        rows = claim(claimer, 30 - len(in_flight), busy)
        busy.update(row.endpoint_id for row in rows)
        in_flight += rows
        assert max(busy.values()) <= 10
        if any(row.id in late for row in rows):
            break
        done, in_flight = in_flight[:5], in_flight[5:]
        finish(done)
        busy.subtract(row.endpoint_id for row in done)
        # How soon they are known depends on the order in which claimed rows come back, which is the database's choice.
        if not late and len(claimer.lagging) == 6:
            late, added = add(endpoints[6], 1, ago=0), step

    assert late
    assert step <= added + 3, "the endpoint with one delivery waits for the others' backlogs"


def test_endpoints_with_little_do_not_starve_one_with_a_backlog(endpoints, add):
    add(endpoints[0], 50)
    claimer = make_claimer(endpoint_limit=5, page_rows=20)
    finish(claim(claimer, room=20))
    before = Delivery.objects.filter(endpoint=endpoints[0], state="delivered").count()

    for _ in range(10):  # there is always more to do for others than there is room
        add(endpoints[1], 2, ago=0)
        add(endpoints[2], 2, ago=0)
        finish(claim(claimer, room=4))

    assert Delivery.objects.filter(endpoint=endpoints[0], state="delivered").count() >= before + 10


@hypothesis_settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=10),
    limit=st.integers(1, 12),
    capacity=st.integers(1, 30),
    page=st.integers(1, 30),
    spread=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_whatever_the_limits_every_row_is_claimed_exactly_once(
    endpoints, add, counts, limit, capacity, page, spread, seed
):
    Delivery.objects.all().delete()
    draw = random.Random(seed)
    ids = [
        one
        for endpoint, count in zip(endpoints, counts, strict=False)
        if count
        for one in add(endpoint, count, step=draw.random() if spread else 0)
    ]
    claimer, busy, in_flight, claimed = make_claimer(limit, page), Counter(), [], []

    idle = 0
    while idle < 4:
        rows = claim(claimer, capacity - len(in_flight), busy) if len(in_flight) < capacity else []
        claimed += rows
        in_flight += rows
        busy.update(row.endpoint_id for row in rows)
        assert len(in_flight) <= capacity
        assert max(busy.values(), default=0) <= limit
        idle = 0 if rows or in_flight else idle + 1
        draw.shuffle(in_flight)
        ended = draw.randint(min(1, len(in_flight)), len(in_flight))
        done, in_flight = in_flight[:ended], in_flight[ended:]
        finish(done)
        busy.subtract(row.endpoint_id for row in done)

    assert sorted(row.id for row in claimed) == sorted(ids)


# --- Several claimers


def test_two_claimers_at_once_share_the_rows_and_no_row_goes_to_both(endpoints, add):
    ids = [one for endpoint in endpoints for one in add(endpoint, 300, step=0.01)]
    start, claims, faults = threading.Barrier(2), [[], []], []

    def work(mine: list[Claimed]) -> None:
        try:
            claimer = make_claimer(page_rows=40)
            start.wait()
            mine += claim(claimer, 100)
            start.wait()  # or a quick one could take all before a slow one has begun
            empty = 0
            while empty < 5:
                rows = claim(claimer, 100)
                mine += rows
                empty = 0 if rows else empty + 1
        except Exception as error:
            faults.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=work, args=[mine]) for mine in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert faults == []
    assert all(claims), "one of them got nothing"
    assert sorted(row.id for mine in claims for row in mine) == sorted(ids)


def test_a_row_that_another_has_locked_is_passed_over_and_found_later(endpoints, add, monkeypatch):
    monkeypatch.setattr(claiming, "SWEEPS", ((0.0, timedelta(days=1)),))
    ids = add(endpoints[0], 3)
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                Delivery.objects.select_for_update().get(pk=ids[1])
                locked.set()
                release.wait(10)
        finally:
            connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(5)
    claimer = make_claimer()
    first = claim(claimer)
    release.set()
    holder.join(10)
    second = claim(claimer)

    assert {row.id for row in first} == {ids[0], ids[2]}
    assert [row.id for row in second] == [ids[1]]


def test_a_claim_whose_answer_was_lost_is_given_back_and_costs_no_attempt(endpoints, add, monkeypatch):
    ids = add(endpoints[0], 3)
    claimer, real = make_claimer(), DeliveryQuerySet.claim_these

    def lose(self, *args, **params):
        real(self, *args, **params)
        raise OperationalError("the connection is lost")

    with monkeypatch.context() as away:
        away.setattr(DeliveryQuerySet, "claim_these", lose)
        with pytest.raises(OperationalError):
            claim(claimer)
    assert Delivery.objects.filter(state="sending").count() == 3
    found = claim(claimer)
    assert {row.id for row in found} == set(ids)
    assert {row.attempts_made for row in found} == {0}


def test_after_an_outage_everything_is_looked_at_again(endpoints, add, monkeypatch):
    monkeypatch.setattr(claiming, "SWEEPS", ((600.0, timedelta(days=1)),))
    claimer = make_claimer()
    claim(claimer)
    late = add(endpoints[0], 1, ago=3_600)
    assert claim(claimer) == []
    with monkeypatch.context() as away:
        away.setattr(DeliveryQuerySet, "page", mock.Mock(side_effect=OperationalError))
        with pytest.raises(OperationalError):
            claim(claimer)
    assert [row.id for row in claim(claimer)] == late


# --- The position


@pytest.mark.parametrize(
    ("overlap_seconds", "sweep_seconds", "ago"),
    [pytest.param(0.05, 600.0, 2, id="short"), pytest.param(600.0, 0.05, 60, id="long")],
)
def test_a_row_committed_late_behind_the_position_is_found_by_an_overlap_or_a_sweep(
    endpoints, add, monkeypatch, overlap_seconds, sweep_seconds, ago
):
    monkeypatch.setattr(
        claiming, "OVERLAPS", ((0.0, timedelta(milliseconds=100)), (overlap_seconds, timedelta(seconds=5)))
    )
    monkeypatch.setattr(claiming, "SWEEPS", ((sweep_seconds, timedelta(minutes=10)),))
    now = 100.0
    monkeypatch.setattr(claiming.time, "monotonic", lambda: now)
    add(endpoints[0], 5, ago=0)
    claimer = make_claimer()
    claim(claimer)
    late = add(endpoints[0], 1, ago=ago)

    before = claim(claimer)
    now += 0.06
    after = claim(claimer)

    assert before == []
    assert [row.id for row in after] == late


def test_a_row_committed_a_moment_late_is_found_by_the_next_claim(endpoints, add):
    claimer = make_claimer()
    add(endpoints[0], 5, ago=0)
    claim(claimer)

    late = add(endpoints[0], 1, ago=0.05)

    assert [row.id for row in claim(claimer)] == late


def test_a_row_committed_late_for_a_lagging_endpoint_does_not_wait_for_the_end_of_its_backlog(
    endpoints, add, monkeypatch
):
    monkeypatch.setattr(claiming, "SWEEPS", ((0.0, timedelta(days=1)),))
    add(endpoints[0], 100, step=1)
    claimer = make_claimer(endpoint_limit=5)
    for _ in range(4):
        finish(claim(claimer))
    [late] = add(endpoints[0], 1, ago=7_200)

    found = []
    for _ in range(3):
        found += claim(claimer)
        finish(found)

    assert late in {row.id for row in found}


def test_a_retry_that_becomes_due_is_found_without_a_sweep(endpoints, add, monkeypatch):
    monkeypatch.setattr(claiming, "OVERLAPS", ((0.0, timedelta(milliseconds=100)),))
    claimer = make_claimer()
    add(endpoints[0], 10)
    claim(claimer)

    Delivery.objects.filter(pk__in=list(Delivery.objects.values_list("pk", flat=True)[:3])).update(
        state="pending", claim_token=None, lease_until=None, due_at=Now()
    )

    assert len(claim(claimer)) == 3


@pytest.fixture
def starts(monkeypatch) -> list[dict]:
    """Where each claim of a page started, and how many rows it looked at."""
    seen, real = [], DeliveryQuerySet.page

    def spy(self, **params):
        page = real(self, **params)
        seen.append({**params, "page": len(page)})
        return page

    monkeypatch.setattr(DeliveryQuerySet, "page", spy)
    return seen


def test_a_claim_after_five_thousand_deliveries_does_not_walk_over_them(endpoints, add, starts):
    add(endpoints[0], 5_000, step=0.5)
    claimer = make_claimer()
    finish(claim_all(claimer))
    new = add(endpoints[0], 1, ago=0)

    rows = claim(claimer)

    assert [row.id for row in rows] == new
    last = starts[-1]
    assert last["page"] == 1
    assert last["after"].due_at > datetime.now(UTC) - timedelta(seconds=1_200)  # where the last of them was due
    assert not Delivery.objects.filter(state="delivered", due_at__gt=last["after"].due_at).exists()


def test_a_page_is_read_from_the_index_from_its_position_on(endpoints, add):
    add(endpoints[0], 200)
    settle_planner(look_ups=True)
    with connection.cursor() as cursor:
        at = {"priority": 0, "after": datetime.now(UTC), "after_id": uuid.UUID(int=0), "limit": 250}
        cursor.execute(f"EXPLAIN {PAGE}", at)
        plan = "\n".join(row[0] for row in cursor.fetchall())

    assert "using delivery_due_by_priority on" in plan
    assert "ROW(due_at, id) >" in plan.partition("Index Cond")[2]
    assert "Sort" not in plan


def test_the_position_moves_on_over_the_backlog_of_a_lagging_endpoint(endpoints, add, starts, monkeypatch):
    monkeypatch.setattr(claiming, "SKIMMED_ROWS", 100)
    add(endpoints[0], 1_000, step=1)
    new = add(endpoints[1], 1, ago=0)
    claimer = make_claimer(endpoint_limit=5, page_rows=50)
    busy: Counter[uuid.UUID] = Counter()

    found = []
    for _ in range(15):
        rows = claim(claimer, 100, busy)
        busy.update(row.endpoint_id for row in rows)
        found += [row.id for row in rows]

    assert new[0] in found
    assert busy == {endpoints[0].pk: 5, endpoints[1].pk: 1}
    assert starts[-1]["page"] <= 1, "the backlog is read again by every claim"
