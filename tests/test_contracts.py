"""Contracts as pure values: the tables of the three texts, Retry-After, and a verdict for everything."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoints.contracts import (
    BETTERSTOOD,
    BRIEF,
    DAY,
    KINGMINOS,
    STANDARD,
    dead_in_a_row,
    decide,
    draw,
    last_error,
    parse_retry_after,
)
from tests import vectors_loader

VECTORS = vectors_loader.load("policies")
POLICIES = {"brief": BRIEF, "betterstood": BETTERSTOOD, "kingminos": KINGMINOS}
NOW = 1_768_478_400  # 2026-01-15T12:00:00Z, the vectors' now
EXACT = STANDARD.without_spread()

# The vectors' words for what we call otherwise.
ACTIONS = {"success": {"delivered"}, "disable_endpoint": {"disable"}, "dead": {"terminal"}, "dead_letter": {"terminal"}}
ERRORS = {"worker_crashed_mid_attempt": "interrupted", "blocked_by_ssrf_guard": "blocked_address"}


def verdict(contract=EXACT, *, attempt=1, status=500, error="", retry_after=None, delivery="d", first=NOW, ended=NOW):
    return decide(
        contract,
        delivery=delivery,
        attempt=attempt,
        first_started=first * 1000,
        ended=ended * 1000,
        status=status,
        error=error,
        retry_after=retry_after,
    )


def is_action(found, expected):
    return found in ACTIONS.get(expected, {expected})


# --- The tables, one test a case


def schedules():
    """Every contract's times for every delivery of the table: (policy, delivery, times in milliseconds)."""
    for policy, table in VECTORS["policies"].items():
        for case in table["deterministic"]:
            times = case.get("delays_ms") or case.get("waits_ms") or case["offsets_ms"][1:]
            yield pytest.param(policy, case["delivery_id"], times, id=f"schedule-{policy}-{case['delivery_id']}")


def steps():
    """Every step's nominal time and bounds: (policy, number of the attempt, nominal, least, most), in seconds."""
    for policy, table in VECTORS["policies"].items():
        for row in table["schedule"][1:]:
            if policy == "betterstood":
                times = row["offset_s"], row["offset_min_s"], row["offset_max_s"]
            else:
                word = "delay" if policy == "brief" else "wait"
                times = row[f"{word}_s"], row[f"{word}_min_s"], row[f"{word}_max_s"]
            yield pytest.param(policy, row["attempt"], *times, id=f"step-{policy}-{row['attempt']}")


def outcomes():
    """Every status and every error: (policy, status, error, action, the contract's word for the error or None)."""
    for policy, table in VECTORS["classification"].items():
        for status, row in table.items():
            yield pytest.param(policy, int(status), "", row["action"], None, id=f"status-{policy}-{status}")
    for row in VECTORS["errors"]:
        if row["kind"] == "body_error_after_2xx":
            continue  # a status as any other to a contract; the transport says so (test_transport)
        error = ERRORS.get(row["kind"], row["kind"])
        for policy in POLICIES:
            word = row["kingminos_last_error"] if policy == "kingminos" else None
            yield pytest.param(policy, None, error, row[policy], word, id=f"error-{policy}-{row['kind']}")


@pytest.mark.vectors
@pytest.mark.parametrize(("policy", "delivery", "times"), list(schedules()))
def test_policies(policy, delivery, times):
    contract = POLICIES[policy]
    found = [
        step.at(draw(delivery, attempt + contract.draw_offset)) for attempt, step in enumerate(contract.steps, start=1)
    ]
    assert found == times


@pytest.mark.vectors
@pytest.mark.parametrize(("policy", "attempt", "nominal", "least", "most"), list(steps()))
def test_policies_steps(policy, attempt, nominal, least, most):
    step = POLICIES[policy].steps[attempt - 2]
    assert step.nominal == nominal * 1000
    assert step.at(0) == step.least == least * 1000
    assert most * 1000 - 1 <= step.at(2**64 - 1) == step.most <= most * 1000


@pytest.mark.vectors
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_limits(policy):
    table, contract = VECTORS["policies"][policy], POLICIES[policy]
    assert contract.max_attempts == table["max_attempts"]
    assert contract.replay_window == table.get("replay_window_s")
    assert contract.disable_after == table.get("auto_disable_after_consecutive_dead")
    assert contract.deadline == table.get("timeout_s", contract.deadline)
    assert contract.read_bytes == table.get("response_read_limit_bytes", contract.read_bytes)
    assert (contract.keep_bytes > 0) is table.get("persist_response_body", True)


@pytest.mark.vectors
@pytest.mark.parametrize(("policy", "status", "error", "action", "word"), list(outcomes()))
def test_policies_outcomes(policy, status, error, action, word):
    contract = POLICIES[policy]
    assert is_action(verdict(contract, status=status, error=error).action, action)
    if word:
        assert last_error(contract, status=status, error=error, reason="<reason>") == word


@pytest.mark.vectors
@pytest.mark.parametrize("case", VECTORS["scenarios"], ids=lambda case: case["id"])
def test_policies_scenarios(case):
    """The whole life of a delivery, with every draw at the time that the text names."""
    contract = POLICIES[case["policy"]].without_spread()
    expected, responses = case["expect"], case["responses"]
    at, attempts, number = 0, [], 0
    while True:
        number += 1
        response = responses[min(number, len(responses)) - 1]
        status, error = response.get("status"), response.get("error", "")
        unsent = response.get("kind") == "unsent_dead"
        if not unsent:
            attempts.append({"n": number, "at_ms": at} | ({"status": status} if status else {"error": error}))
        ended = at + response.get("duration_ms", 0)
        found = decide(
            contract,
            delivery="dlv",
            attempt=number,
            first_started=NOW * 1000,
            ended=NOW * 1000 + ended,
            status=status,
            error="blocked_address" if error.startswith("blocked") else error,
            retry_after=str(response["retry_after"]) if "retry_after" in response else None,
        )
        if found.action != "retry":
            break
        at = ended + found.wait
    assert attempts == expected["attempts"]
    assert contract.state_after(found.action) == expected["state"]
    assert ended == expected["final_at_ms"]
    assert ("disabled" if found.action == "disable" else "active") == expected["endpoint"]
    word, _, reason = error.partition(":")
    known = {"blocked_endpoint_host": "blocked_address", "timeout": "total_timeout"}
    said = last_error(contract, status=status, error=known.get(word, word), reason=reason)
    assert (None if found.action == "delivered" else said.replace("total_", "")) == expected["last_error"]


@pytest.mark.vectors
@pytest.mark.parametrize("case", VECTORS["replay"], ids=lambda case: f"{case['policy']}-{case['age_s']}")
def test_policies_replay_windows(case):
    assert POLICIES[case["policy"]].may_replay(case["age_s"]) is (case["expect"] == "allow")


@pytest.mark.vectors
@pytest.mark.parametrize("case", VECTORS["policies"]["kingminos"]["auto_disable"], ids=lambda case: case["id"])
def test_policies_auto_disable(case):
    words = {"dead": "exhausted", "success": "delivered", "failed_attempt": "retry", "dead_unsent_inactive": "unsent"}
    run, disabled_at, state = 0, None, "active"
    for number, event in enumerate(case["events"], start=1):
        if event == "reenable":
            run, state = 0, "active"
            continue
        run, disable = dead_in_a_row(KINGMINOS.disable_after, run, words[event])
        if disable:
            disabled_at, state = number, "auto_disabled"
    assert (run, state, disabled_at) == (case["final_count"], case["final_state"], case["disabled_at_event"])


@pytest.mark.vectors
@pytest.mark.parametrize("case", vectors_loader.load("retry_after")["cases"], ids=lambda case: case["id"])
def test_retry_after(case):
    assert parse_retry_after(case["value"], NOW) == case["expected_seconds"]


@pytest.mark.vectors
@pytest.mark.parametrize(
    ("value", "contract", "clamped"),
    [
        pytest.param(case["value"], contract, case["clamped"][name], id=f"{case['id']}-{contract.name}")
        for case in vectors_loader.load("retry_after")["cases"]
        for name, contract in (("betterstood_1min_24h", BETTERSTOOD), ("brief_recommended_1s_24h", BRIEF))
        if case.get("clamped", {}).get(name) is not None
    ],
)
def test_retry_after_is_clamped_by_the_contract(value, contract, clamped):
    found = verdict(contract.without_spread(), status=429, retry_after=value)
    scheduled = contract.steps[0].nominal
    assert found.wait == (clamped * 1000 if contract.retry_after.replaces else max(scheduled, clamped * 1000))


@pytest.mark.vectors
@pytest.mark.parametrize(
    "case", VECTORS["meta"]["deterministic_jitter"]["draws"], ids=lambda case: f"{case['delivery_id']}-{case['n']}"
)
def test_draws(case):
    assert draw(case["delivery_id"], case["n"]) == int(case["h64"])


# --- The contract `standard`, which has no table


def test_the_standard_schedule_waits_as_standard_webhooks_says_and_then_gives_up():
    waits = [verdict(attempt=attempt).wait for attempt in range(1, 10)]
    assert waits == [1000 * s for s in (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)]
    assert verdict(attempt=10).action == "exhausted"
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
    exact = dataclasses.replace(EXACT, retry_after=dataclasses.replace(EXACT.retry_after, late=0))
    assert verdict(exact, status=status, retry_after="120").wait == 120_000
    assert verdict(exact, status=status, retry_after="1").wait == 5_000
    assert verdict(exact, status=status, retry_after="9999999999").wait == DAY * 1000
    assert verdict(exact, status=status, retry_after="soon").wait == 5_000


def test_retry_after_counts_on_no_other_status():
    assert verdict(status=500, retry_after="120").wait == 5_000
    assert verdict(status=301, retry_after="120").wait == 5_000


def test_a_thousand_retries_after_an_outage_are_spread_and_none_comes_before_retry_after():
    waits = [verdict(STANDARD, status=503, retry_after="600", delivery=f"d{number}").wait for number in range(1_000)]
    assert min(waits) >= 600_000
    assert max(waits) - min(waits) > 0.095 * 600_000


def test_resources_that_we_lack_are_no_attempt():
    for contract in (STANDARD, *POLICIES.values()):
        assert verdict(contract, status=None, error="local_resource_exhausted", attempt=99).action == "requeue"


# --- Properties of all of them


@given(
    contract=st.sampled_from([STANDARD, *POLICIES.values()]),
    attempt=st.integers(1, 40),
    status=st.none() | st.integers(100, 599),
    error=st.sampled_from(["total_timeout", "blocked_address", "interrupted", "webhooks_not_enabled"]),
    retry_after=st.none() | st.text(max_size=30) | st.integers(0, 10**12).map(str),
    delivery=st.text(max_size=40),
    lasted=st.integers(0, 400_000),
)
def test_a_verdict_is_total_bounded_and_always_the_same(
    contract, attempt, status, error, retry_after, delivery, lasted
):
    def judge():
        return decide(
            contract,
            delivery=delivery,
            attempt=attempt,
            first_started=NOW * 1000,
            ended=(NOW + lasted) * 1000,
            status=status,
            error=error if status is None else "",
            retry_after=retry_after,
        )

    found = judge()
    assert found == judge()
    assert last_error(contract, status=status, error=error)
    if found.action != "retry":
        assert found.wait == 0
        return
    assert attempt < contract.max_attempts
    step = contract.steps[attempt - 1]
    least = 1 if contract.from_first or (contract.retry_after and contract.retry_after.replaces) else step.least
    assert least <= found.wait <= max(step.most, 1100 * DAY)


@given(contract=st.sampled_from([STANDARD, *POLICIES.values()]), delivery=st.text(max_size=40))
def test_a_schedule_without_retry_after_never_goes_back(contract, delivery):
    at = first = NOW * 1000
    for attempt in range(1, contract.max_attempts):
        found = decide(
            contract, delivery=delivery, attempt=attempt, first_started=first, ended=at, status=500, retry_after=None
        )
        assert found.wait > 0
        at += found.wait


@given(delivery=st.text(max_size=40), number=st.integers(0, 100))
def test_a_draw_is_within_its_range(delivery, number):
    assert 0 <= draw(delivery, number) < 2**64
