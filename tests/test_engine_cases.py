"""Cases B01 to B08, B43 to B53 and B60 to B62, each by its id: what a receiver, a crash or a second process does to the
engine. Through pump, database and a real receiver all the way; the transport's part alone is in test_transport.
"""

import bisect
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import django_rq
import psutil
import pytest
import redis
import requests
from django.conf import settings
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test import Client, override_settings
from rq.registry import FailedJobRegistry, ScheduledJobRegistry
from rq.timeouts import JobTimeoutException, UnixSignalDeathPenalty

from deliveries import pump as pump_module
from deliveries import replays, results, services, transport
from deliveries.jobs import Clock, PumpWorker, run_replay_jobs
from deliveries.models import Attempt, Delivery, Event, ReplayJob
from deliveries.publishing import Published
from deliveries.pump import Pump
from deliveries.replays import create_replay_job
from endpoints.contract_file import ContractFileError, read_contracts
from endpoints.contracts import CONTRACTS, STANDARD, Step
from endpoints.models import Endpoint, Rule, Tenant
from endpoints.services import SYSTEM
from tests.product import wait_until
from tests.receiver import Received, Receiver, answer
from tests.test_api import Api
from tests.test_betterstood import automation, rule
from tests.test_cases import in_threads, make_due, publish, publish_lifecycle, states
from tests.test_pump import run_until
from tests.test_scheduling import run_pumps
from webhookhub import embedded
from webhookhub.database import PUMP_NAME, sessions_named

pytestmark = pytest.mark.django_db(transaction=True)

OK = b"HTTP/1.1 200 OK\r\n"


# --- What the cases share


def make_endpoints(make_endpoint, receiver, replies: dict[str, object]) -> None:
    """An endpoint for each path, at which the receiver gives the path's reply."""
    for path in replies:
        make_endpoint(url=f"http://127.0.0.1:{receiver.port}/{path}", name=path)
    receiver.respond = lambda request: replies[path_of(request)]


def path_of(request: Received) -> str:
    return request.line.split()[1].strip("/")


def attempts() -> dict[str, Attempt]:
    """The only attempt at each endpoint, by the endpoint's name."""
    found = {one.delivery.endpoint.name: one for one in Attempt.objects.select_related("delivery__endpoint")}
    assert len(found) == Attempt.objects.count()
    return found


# --- B01


def test_b01_a_body_or_a_head_that_drips_ends_at_the_total_budget_and_is_tried_again(
    tenant, make_endpoint, receiver, pump, contract
):
    contract(deadline=3.0)
    body = [OK + b"Content-Length: 12\r\n\r\n", *[0.7, b"x"] * 12]
    head = [OK, *[0.9, b"X-Slow: 1\r\n"] * 10, b"Content-Length: 0\r\n\r\n"]
    make_endpoints(make_endpoint, receiver, {"body": body, "head": head})
    publish(tenant)

    pump()

    for attempt in attempts().values():
        assert 2.9 < attempt.total_us / 1e6 < 4
        assert (attempt.status, attempt.error) == (None, "total_timeout")
    assert states() == {"pending": 2}

    receiver.respond = answer()
    make_due()
    pump()

    assert states() == {"delivered": 2}
    assert set(Delivery.objects.values_list("attempts_made", flat=True)) == {2}


# --- B02


def test_b02_a_redirect_is_one_request_that_failed_and_says_where_to_set_the_url(
    tenant, make_endpoint, receiver, pump, admin_client
):
    statuses = [300, 301, 302, 303, 304, 307, 308]
    replies = {str(status): answer(status, "Location: /end") for status in statuses}
    make_endpoints(make_endpoint, receiver, {**replies, "end": answer()})
    Endpoint.objects.filter(name="end").update(status="paused")
    publish(tenant)

    pump()

    assert sorted(request.line for request in receiver.received) == [f"POST /{one} HTTP/1.1" for one in statuses]
    assert {name: attempt.status for name, attempt in attempts().items()} == {str(one): one for one in statuses}
    assert states() == {"pending": 7, "held": 1}
    told = f"Redirects are not followed. Set the URL to http://127.0.0.1:{receiver.port}/end"
    assert {attempt.detail for attempt in attempts().values()} == {told}
    page = admin_client.get(f"/admin/deliveries/delivery/{attempts()['301'].delivery_id}/change/").text
    assert told in page


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("https://other.example/x?a=b", "Redirects are not followed. Set the URL to https://other.example/x?a=b"),
        ("http://[", "Redirects are not followed. Set the URL to http://["),
        ("", ""),
    ],
    ids=["elsewhere", "nonsense", "nowhere"],
)
def test_b02_where_a_redirect_leads_is_told_as_far_as_it_can_be_read(tenant, endpoint, receiver, pump, location, told):
    receiver.respond = answer(302, f"Location: {location}") if location else answer(302)
    publish(tenant)

    pump()

    assert (Attempt.objects.get().detail, len(receiver.received)) == (told, 1)


# --- B03


def test_b03_what_was_answered_2xx_is_delivered_once_however_broken_the_body_is(tenant, make_endpoint, receiver, pump):
    replies = {
        "short": OK + b"Content-Length: 100\r\n\r\nhello",
        "truncated-chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n20\r\nhello",
        "chunk-size-ZZ": OK + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nhello",
        "no-gzip": answer(200, "Content-Encoding: gzip", body=b"hello"),
        "two-lengths": OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        "length-abc": OK + b"Content-Length: abc\r\n\r\nabcd",
        "length-negative": OK + b"Content-Length: -5\r\n\r\nabcd",
    }
    make_endpoints(make_endpoint, receiver, replies)
    receiver.close_after = True
    publish(tenant)

    pump()
    make_due()
    pump()

    assert states() == {"delivered": 7}
    assert sorted(map(path_of, receiver.received)) == sorted(replies)
    assert {attempt.status for attempt in attempts().values()} == {200}
    unreadable = {name for name, one in attempts().items() if one.detail.startswith("response body unreadable: ")}
    assert unreadable == replies.keys() - {"no-gzip"}  # nothing is decompressed: its bytes are kept as they came
    assert bytes(attempts()["no-gzip"].response_body) == b"hello"


# --- B05


@pytest.mark.parametrize("head", [b"", b"Content-Length: 200000000\r\n"], ids=["without-length", "with-length"])
def test_b05_of_an_endless_body_no_more_is_read_than_the_cap_and_memory_stays_flat(
    tenant, endpoint, receiver, pump, head
):
    publish(tenant)
    pump()  # what the first request of a process allocates
    sent = 0

    def flood(_: Received):
        nonlocal sent
        yield OK + head + b"\r\n"
        for _ in range(3_200):
            sent += 62_500
            yield b"x" * 62_500

    receiver.respond = flood
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    publish(tenant)

    pump()

    attempt = Attempt.objects.order_by("started_at").last()
    assert states() == {"delivered": 2}
    assert (attempt.status, attempt.error, attempt.response_truncated) == (200, "", True)
    assert len(attempt.response_body) == 4_096
    assert sent < 40_000_000, "the connection was drained"  # the rest is the sockets' buffers
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KB


# --- B06


def test_b06_an_interim_response_is_read_over_to_the_final_status(tenant, make_endpoint, receiver, pump):
    interim = {str(status): f"HTTP/1.1 {status} X\r\nLink: </a.css>\r\n\r\n".encode() for status in (100, 102, 103)}
    make_endpoints(make_endpoint, receiver, {name: head + answer() for name, head in interim.items()})
    publish(tenant)

    pump()

    assert states() == {"delivered": 3}
    assert {attempt.status for attempt in attempts().values()} == {200}
    assert len(receiver.received) == 3


def test_b06_an_interim_response_alone_is_never_delivered_and_is_tried_again(tenant, make_endpoint, receiver, pump):
    replies = {str(status): f"HTTP/1.1 {status} X\r\n\r\n".encode() for status in (100, 101, 102, 103)}
    make_endpoints(make_endpoint, receiver, replies)
    receiver.close_after = True
    publish(tenant)

    pump()

    assert states() == {"pending": 4}
    assert {(one.status, one.error) for one in attempts().values()} == {(None, "closed_before_response")}
    assert set(Delivery.objects.values_list("attempts_made", flat=True)) == {1}


# --- B07


MALFORMED = {
    "status-abc": b"HTTP/1.1 abc OK\r\n\r\n",
    "status-099": b"HTTP/1.1 099 OK\r\n\r\n",
    "status-2000": b"HTTP/1.1 2000 OK\r\n\r\n",
    "status-999": b"HTTP/1.1 999 OK\r\n\r\n",
    "http-0.9": b"hello, world\r\n",
    "tls": b"\x15\x03\x03\x00\x02\x02\x46",
    "nothing": b"",
    "head-of-megabytes": OK + b"X: y\r\n" * 60_000 + b"\r\n",
}


def test_b07_a_malformed_head_is_a_failed_attempt_with_a_reason_of_its_own(
    tenant, make_endpoint, receiver, pump, admin_client
):
    make_endpoints(make_endpoint, receiver, MALFORMED)
    receiver.close_after = True
    publish(tenant)

    pump()

    assert states() == {"pending": len(MALFORMED)}
    found = attempts()
    assert {attempt.status for attempt in found.values()} == {None}
    errors = {name: attempt.error for name, attempt in found.items()}
    others = {"nothing": "closed_before_response", "head-of-megabytes": "headers_too_large"}
    assert errors == {name: others.get(name, "malformed_response") for name in MALFORMED}
    assert all(attempt.detail for attempt in found.values())
    assert len({attempt.detail for attempt in found.values()}) == len(MALFORMED)
    assert found["status-999"].detail == "'HTTP/1.1 999 OK' is no status from 100 to 599"
    assert found["http-0.9"].detail == r"The answer is not HTTP; it begins with b'hello, world\r\n'"
    assert found["tls"].detail == "The receiver speaks TLS on this port. Set the URL to https"
    for attempt in found.values():
        page = admin_client.get(f"/admin/deliveries/delivery/{attempt.delivery_id}/change/")
        assert page.status_code == 200
    assert admin_client.get("/admin/deliveries/delivery/").status_code == 200


def test_b07_a_large_head_is_an_answer_like_others_and_its_status_counts(tenant, make_endpoint, receiver, pump):
    """To send again what the receiver has acknowledged would be worse than to read a long head (as in B03)."""
    lines = {"101-headers": [f"X-{number}: 1" for number in range(101)], "line-of-70-KB": ["X: " + "x" * 70_000]}
    replies = {f"{name}-{status}": answer(status, *lines[name]) for name in lines for status in (200, 500)}
    make_endpoints(make_endpoint, receiver, replies)
    publish(tenant)

    pump()

    assert {name: attempt.status for name, attempt in attempts().items()} == {name: int(name[-3:]) for name in replies}
    assert states() == {"delivered": 2, "pending": 2}
    assert len(receiver.received) == 4


# --- B08


HOSTS = {"label-of-64": f"http://{'a' * 64}.test/", "empty-label": "http://exa..mple.test/"}


def test_b08_what_got_past_the_checks_of_a_url_fails_by_itself_and_is_no_storm(tenant, make_endpoint, receiver, pump):
    make_endpoint(name="good")
    for name, url in HOSTS.items():
        Endpoint.objects.filter(pk=make_endpoint(name=name).pk).update(url=url)
    publish(tenant)

    pump()
    pump()  # nothing is due again at once

    found = attempts()
    assert states() == {"delivered": 1, "pending": 2}
    assert (found["good"].status, len(receiver.received)) == (200, 1)
    for name in HOSTS:
        delivery = found[name].delivery
        assert (found[name].error, found[name].status, found[name].address) == ("blocked_address", None, None)
        assert "invalid_host" in found[name].detail
        assert (delivery.attempts_made, delivery.claim_token) == (1, None)
        assert (delivery.due_at - found[name].started_at).total_seconds() >= 4.5


@pytest.mark.parametrize("name", ["brief", "kingminos"])
@pytest.mark.parametrize("url", HOSTS.values(), ids=HOSTS)
def test_b08_such_a_url_is_final_where_the_contract_says_so(tenant, endpoint_under, pump, url, name):
    endpoint_under(name)
    Endpoint.objects.update(url=url)
    publish(tenant)

    pump()

    assert states() == {"dead": 1}


@pytest.mark.parametrize("content_type", ["text/\N{SNOWMAN}", "a\r\nX-Evil: 1"], ids=["snowman", "line-end"])
def test_b08_a_header_that_cannot_be_sent_fails_by_itself_and_says_so(
    tenant, make_endpoint, receiver, pump, content_type
):
    """Of one batch: a result that the database refused would take the others with it."""
    make_endpoint()
    publish(tenant, content_type=content_type)
    publish(tenant)

    pump()

    failed, delivered = Delivery.objects.order_by("id")
    assert (failed.state, failed.last_error, failed.attempts_made) == ("pending", "invalid_header", 1)
    assert Attempt.objects.get(delivery=failed).detail.startswith("the header content-type cannot be sent: ")
    assert (delivered.state, len(receiver.received)) == ("delivered", 1)


@pytest.mark.parametrize("url", HOSTS.values(), ids=HOSTS)
def test_b08_such_a_url_is_refused_when_it_is_saved(api_key, endpoint, url):
    api = Api(api_key)
    refused = api.call("POST", "endpoints", {"name": "b", "url": url}, 400)
    assert refused["errors"][0]["pointer"] == "/url"
    assert api.call("PATCH", f"endpoints/{endpoint.typeid}", {"url": url}, 400)["errors"][0]["pointer"] == "/url"


# --- B43


def test_b43_an_alarm_of_rq_is_swallowed_by_nobody_and_what_was_in_flight_is_tried_again_once(
    tenant, endpoint, receiver, pump
):
    receiver.respond = lambda _: [OK, *[0.2, b"X-Slow: 1\r\n"] * 100]
    publish(tenant)
    end = time.monotonic() + 10

    with pytest.raises(JobTimeoutException), UnixSignalDeathPenalty(2, JobTimeoutException):
        Pump().run(lambda: time.monotonic() > end)

    assert states() == {"sending": 1}  # until its lease is over
    Delivery.objects.update(lease_until=Now() - timedelta(seconds=1))
    receiver.respond = answer()
    pump()

    assert list(Attempt.objects.order_by("number").values_list("error", "status")) == [("interrupted", None), ("", 200)]
    assert (states(), len(receiver.received)) == ({"delivered": 1}, 2)


def test_b43_a_pump_has_no_alarm_and_every_deadline_is_shorter_than_a_lease_and_a_stop():
    worker = PumpWorker([settings.PUMP_QUEUE], connection=django_rq.get_connection(settings.PUMP_QUEUE))
    django_rq.get_queue(settings.PUMP_QUEUE).empty()
    worker.before_dequeue()

    [job] = django_rq.get_queue(settings.PUMP_QUEUE).jobs
    assert job.timeout == -1
    assert max(contract.deadline for contract in CONTRACTS.values()) < min(20, settings.LEASE_SECONDS)
    with pytest.raises(ContractFileError, match="deadline"):
        read_contracts('[mine]\nextends = "standard"\ndeadline = 16\n', CONTRACTS)


@pytest.mark.live
def test_b43_in_a_worker_what_drips_ends_as_a_timeout_and_is_tried_again_once(
    product, tenant, endpoint, receiver, contract
):
    contract(deadline=1.0)
    receiver.respond = lambda _: [OK, *[0.2, b"X-Slow: 1\r\n"] * 100] if len(receiver.received) == 1 else answer()
    publish(tenant)
    product.start_worker()
    wait_until(lambda: states() == {"pending": 1} and Attempt.objects.exists())
    make_due()
    wait_until(lambda: states() == {"delivered": 1})

    found = Attempt.objects.order_by("number").values_list("error", "status")
    assert list(found) == [("total_timeout", None), ("", 200)]
    assert FailedJobRegistry(queue=django_rq.get_queue(settings.PUMP_QUEUE)).count == 0


# --- B44


def pump_of(pool: subprocess.Popen[bytes]) -> psutil.Process:
    """The worker of a pool."""
    [worker] = [one for one in psutil.Process(pool.pid).children() if "resource_tracker" not in " ".join(one.cmdline())]
    return worker


def pumps_present() -> int:
    return sessions_named(PUMP_NAME)[0]


@pytest.mark.live
def test_b44_when_only_the_parent_of_a_worker_is_killed_nothing_is_sent_twice(product, tenant, endpoint, receiver):
    done = threading.Event()
    receiver.respond = lambda _: answer() if done.wait(14) else b""
    publish(tenant)
    pool = product.start_worker()
    wait_until(lambda: len(receiver.received) == 1)
    os.kill(pool.pid, signal.SIGKILL)
    other = product.start_worker()
    wait_until(lambda: pumps_present() == 2)
    done.set()
    wait_until(lambda: states() == {"delivered": 1})

    product.kill(other, signal.SIGTERM)
    assert (len(receiver.received), Attempt.objects.get().status) == (1, 200)


@pytest.mark.live
def test_b44_what_a_killed_worker_had_in_flight_is_sent_again_once_when_its_lease_is_over_and_not_before(
    product, tenant, endpoint, receiver
):
    """First pool and worker are killed, then the worker of another pool alone, which makes a new one."""
    product.environment["LEASE_SECONDS"] = "20"
    seen: Counter[str] = Counter()

    def respond(request: Received):
        seen[request.header("webhook-id")] += 1
        return [20.0] if seen[request.header("webhook-id")] == 1 else answer()

    receiver.respond = respond
    publish(tenant)
    first_pool = product.start_worker()
    wait_until(lambda: len(receiver.received) == 1)
    product.kill(first_pool)
    second_pool = product.start_worker()
    publish(tenant)
    wait_until(lambda: len(receiver.received) == 2)
    pump_of(second_pool).kill()
    leases = {one.event.typeid: one.lease_until.timestamp() for one in Delivery.objects.select_related("event")}
    wait_until(lambda: states() == {"delivered": 2}, seconds=60)

    assert seen == dict.fromkeys(leases, 2)
    for request in receiver.received[2:]:
        after = request.at - leases[request.header("webhook-id")]
        assert 0 <= after < 5 + 5, "not within the lease and one sweep"  # and what a new pump takes to start
    for delivery in Delivery.objects.all():
        first, second = delivery.attempts.order_by("number")
        assert (first.number, first.error, second.number, second.status) == (1, "interrupted", 2, 200)
        assert "may or may not have got it" in first.detail


# --- B45


def test_b45_a_retry_that_nobody_runs_turns_readiness_red_and_is_told_in_the_admin(
    tenant, endpoint, receiver, pump, admin_client
):
    receiver.respond = answer(500)
    publish(tenant)
    pump()
    Delivery.objects.update(due_at=Now() - timedelta(seconds=400))
    redis.Redis.from_url(settings.REDIS_URL).flushall()

    found = Client().get("/readyz")
    assert (found.status_code, found.json()["status"]) == (503, "unavailable")
    assert 400 <= found.json()["oldest_due_seconds"] < 460
    told = re.search(r"The oldest due delivery is (\d+) s late", admin_client.get("/admin/deliveries/delivery/").text)
    assert told
    assert 400 <= int(told[1]) < 460

    receiver.respond = answer()
    pump()  # by the database alone
    assert states() == {"delivered": 1}
    assert Client().get("/readyz").status_code == 200
    assert "s late" not in admin_client.get("/admin/deliveries/delivery/").text


@pytest.mark.live
def test_b45_retries_run_without_any_scheduler(product, tenant, endpoint, receiver, contract):
    contract(steps=(Step.around(1),) * 3)
    receiver.respond = lambda _: answer(200 if len(receiver.received) == 4 else 500)
    publish(tenant)
    pool = product.start_worker()
    wait_until(lambda: states() == {"delivered": 1})

    assert [one.status for one in Attempt.objects.order_by("number")] == [500, 500, 500, 200]
    assert psutil.Process(pool.pid).children(recursive=True) == [pump_of(pool)]  # there is no scheduler to kill
    assert ScheduledJobRegistry(queue=django_rq.get_queue(settings.PUMP_QUEUE)).count == 0


# --- B46


@contextlib.contextmanager
def slow_redis(folder: Path, seconds: float):
    """The URL of a Valkey of our own behind a proxy that delays whatever passes it."""
    opened: list[socket.socket] = []
    with embedded._valkey(folder), socket.create_server(("127.0.0.1", 0)) as server:

        def forward(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65_536):
                    time.sleep(seconds)
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    behind = socket.socket(socket.AF_UNIX)
                    behind.connect(str(folder / "valkey.sock"))
                    opened.extend((client, behind))
                    for pair in ((client, behind), (behind, client)):
                        threading.Thread(target=forward, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        finally:
            for one in [server, *opened]:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()


class Tally(Receiver):
    """Counts (delivery, attempt) of requests with the body `{"n": 1}`, at a fraction of what it takes to read them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[bytes, bytes]] = Counter()
        self._lock = threading.Lock()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            rest = b""
            while piece := connection.recv(65_536):
                *whole, rest = (rest + piece).split(b'{"n": 1}')
                for one in whole:
                    with self._lock:
                        self.seen[re.search(rb"x-delivery: (\S+)", one)[1], re.search(rb"attempt: (\S+)", one)[1]] += 1
                    connection.sendall(answer())


@pytest.mark.live
def test_b46_fifty_thousand_retries_due_at_one_instant_go_out_once_each_from_two_workers(
    product, tenant, make_endpoint, contract, tmp_path
):
    count = 50_000
    contract(headers=("x-delivery: {delivery}", *STANDARD.headers))
    tally = Tally()
    make_endpoint(url=tally.url)
    publish(tenant)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO deliveries_delivery (id, event_id, endpoint_id, contract, state, trigger, priority,
                attempts_made, last_error, first_attempt_at, due_at)
            SELECT hub_uuid7(), event_id, endpoint_id, contract, 'pending', 'automatic', 1, 1, 'http_500', now(), now()
            FROM deliveries_delivery, generate_series(1, %s)
            """,
            [count],
        )
    Delivery.objects.filter(attempts_made=0).delete()
    with tally, slow_redis(tmp_path, 0.05) as url:
        product.environment["REDIS_URL"] = url
        workers = [product.start_worker(), product.start_worker()]
        wait_until(lambda: sum(tally.seen.values()) >= count, seconds=120)
        wait_until(lambda: states() == {"delivered": count})
        for worker in workers:
            product.kill(worker, signal.SIGTERM)

    assert (len(tally.seen), sum(tally.seen.values())) == (count, count)
    assert {number for _, number in tally.seen} == {b"2"}
    assert Attempt.objects.count() == count


# --- B48


def numbers_of(receiver: Receiver) -> Counter[int]:
    """How often each numbered payload arrived."""
    return Counter(json.loads(request.body)["n"] for request in receiver.received)


@pytest.mark.live
def test_b48_emptying_valkey_with_accepted_events_waiting_loses_none(product, api_key, endpoint, receiver):
    product.start_web()
    with requests.Session() as session:
        for number in range(1_000):
            assert product.post(api_key, b'{"type":"a","data":{"n":%d}}' % number, session).status_code == 202
    valkey = redis.Redis.from_url(settings.REDIS_URL)
    valkey.flushall()
    product.start_worker()
    wait_until(lambda: len(receiver.received) > 100)
    valkey.flushall()  # and once more under way
    valkey.close()
    wait_until(lambda: states() == {"delivered": 1_000})
    assert numbers_of(receiver) == Counter(range(1_000))


@pytest.mark.live
def test_b48_what_is_accepted_while_valkey_is_full_is_delivered(product, api_key, endpoint, receiver, tmp_path):
    """By the worker that runs, after its pump's time too, and by one that starts meanwhile."""
    with embedded._valkey(tmp_path) as url, redis.Redis.from_url(url) as valkey:
        product.environment |= {"REDIS_URL": url, "PUMP_SECONDS": "1"}
        product.start_web()
        worker = product.start_worker()
        wait_until(lambda: pumps_present() == 1)
        valkey.config_set("maxmemory", "100kb")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            valkey.set("a", "b")

        for number in range(3):
            if number == 2:
                product.kill(worker)
                product.start_worker()
            assert product.post(api_key, b'{"type":"a","data":{"n":%d}}' % number).status_code == 202
            wait_until(lambda: states() == {"delivered": number + 1})  # noqa: B023
            time.sleep(1.5)  # the pump's time

        assert requests.get(f"{product.url}/readyz", timeout=5).json()["redis"] == "full"
    assert numbers_of(receiver) == Counter(range(3))


def test_b48_redis_forgets_what_is_done_soon_and_what_failed_after_a_day():
    redis.Redis.from_url(settings.REDIS_URL).flushall()
    PumpWorker([settings.PUMP_QUEUE], connection=django_rq.get_connection(settings.PUMP_QUEUE)).before_dequeue()
    Clock().enqueue_jobs()
    for queue in (settings.PUMP_QUEUE, settings.JOBS_QUEUE):
        [job] = django_rq.get_queue(queue).jobs
        assert (job.result_ttl, job.failure_ttl) == (60, 86_400)


def test_b48_delivered_events_leave_nothing_in_redis(tenant, endpoint, pump):
    valkey = redis.Redis.from_url(settings.REDIS_URL)
    valkey.flushall()
    publish(tenant, 200)
    pump()
    assert (states(), valkey.dbsize()) == ({"delivered": 200}, 0)


# --- B49


def test_b49_what_is_rolled_back_is_neither_stored_nor_sent_and_wakes_nobody(
    tenant, endpoint, receiver, pump, monkeypatch
):
    wakes: list[int] = []
    monkeypatch.setattr(services, "announce", lambda: wakes.append(1))
    with pytest.raises(RuntimeError), transaction.atomic():
        publish(tenant)
        raise RuntimeError
    pump(seconds=1)
    assert (Event.objects.count(), Delivery.objects.count(), wakes, receiver.received) == (0, 0, [], [])


def test_b49_a_fan_out_in_one_transaction_sends_each_delivery_once(tenant, make_endpoint, receiver, pump, contract):
    contract(headers=("x-delivery: {delivery}", *STANDARD.headers))
    for number in range(3):
        make_endpoint(url=f"{receiver.url}/{number}")
    with transaction.atomic():
        [event] = publish(tenant)

    pump()

    sent = {one.header("x-delivery"): path_of(one) for one in receiver.received}
    assert sent == {one.typeid: f"hook/{one.endpoint.url[-1]}" for one in event.deliveries.select_related("endpoint")}
    assert (len(sent), len(set(sent.values())), len(receiver.received)) == (3, 3, 3)
    assert {one.header("webhook-id") for one in receiver.received} == {event.typeid}


def test_b49_a_worker_that_is_faster_than_the_commit_finds_it_afterwards(tenant, endpoint, receiver, caplog):
    committed: list[float] = []

    def post() -> None:
        with transaction.atomic():
            publish(tenant)
            time.sleep(1)  # the pump runs meanwhile
            committed.append(time.time())

    in_threads(post, lambda: run_pumps(1, lambda: bool(receiver.received) and states() == {"delivered": 1}))

    [request] = receiver.received
    assert 0 <= request.at - committed[0] < 5
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.live
def test_b49_what_is_posted_while_redis_is_down_is_accepted_and_delivered_when_it_is_back(
    product, api_key, endpoint, receiver, tmp_path
):
    product.environment["REDIS_URL"] = f"unix://{tmp_path}/valkey.sock"
    product.start_web()
    product.start_worker()  # waits for Redis
    for number in range(3):
        assert product.post(api_key, b'{"type":"a","data":{"n":%d}}' % number).status_code == 202
    with embedded._valkey(tmp_path):
        wait_until(lambda: states() == {"delivered": 3})
    assert numbers_of(receiver) == Counter(range(3))


# --- B51


def test_b51_an_endpoint_that_fails_stops_no_other_of_the_same_event(tenant, make_endpoint, receiver, pump, contract):
    contract(deadline=1.0)
    make_endpoints(make_endpoint, receiver, {"a-hangs": [30.0], "b-no-url": answer(), "c-fine": answer()})
    Endpoint.objects.filter(name="b-no-url").update(url="http://exa..mple.test/")
    make_endpoint(name="d-bad-filter")
    Endpoint.objects.filter(name="d-bad-filter").update(event_types=["(", "[*]", "invoice.*.*", "\\", "%"])
    publish(tenant)

    pump()

    found = attempts()
    assert {name: (one.status, one.error) for name, one in found.items()} == {
        "a-hangs": (None, "total_timeout"),
        "b-no-url": (None, "blocked_address"),
        "c-fine": (200, ""),
    }
    fine = Delivery.objects.get(endpoint__name="c-fine")
    assert (fine.finished_at - found["a-hangs"].started_at).total_seconds() < 0.5

    make_due()
    pump()

    assert Counter(map(path_of, receiver.received)) == {"a-hangs": 2, "c-fine": 1}
    assert Counter(Delivery.objects.values_list("endpoint__name", "attempts_made")) == {
        ("a-hangs", 2): 1,
        ("b-no-url", 2): 1,
        ("c-fine", 1): 1,
    }


def test_b51_a_rule_that_cannot_be_read_stops_neither_its_event_nor_the_rules_after_it(
    tenant, endpoint_under, receiver, pump, caplog
):
    """As one that an earlier release took, or that somebody wrote into the table."""
    broken = rule(endpoint_under("betterstood", url=f"{receiver.url}/broken"), "true", position=1)
    Rule.objects.filter(pk=broken.pk).update(condition="event.data.score >> (")
    rule(endpoint_under("betterstood", url=f"{receiver.url}/fine"), "true", position=2)

    assert isinstance(automation(tenant, score=90), Published)
    pump()

    assert [path_of(one) for one in receiver.received] == ["hook/fine"]
    assert f"rule {broken.typeid} cannot be read" in caplog.text


# --- B52


def publish_poison(tenant) -> None:
    """An event that fails for ever, and then ten good ones."""
    publish(tenant, payload=b'{"n": 0}')
    publish(tenant, 10)


def fails_for_poison(request: Received) -> bytes:
    return answer(500 if request.body == b'{"n": 0}' else 200)


def test_b52_without_order_nothing_waits_for_one_that_fails_for_ever(tenant, endpoint, receiver, pump):
    receiver.respond = fails_for_poison
    publish_poison(tenant)

    pump()

    assert (states(), len(receiver.received)) == ({"pending": 1, "delivered": 10}, 11)


def test_b52_in_order_one_that_fails_for_ever_blocks_the_others_for_as_long_as_its_contract_lasts_and_no_longer(
    tenant, make_endpoint, receiver, clock
):
    make_endpoint(ordered=True)
    receiver.respond = fails_for_poison
    publish_poison(tenant)
    poison = Delivery.objects.order_by("turn").first()

    for number in range(1, STANDARD.max_attempts + 1):
        run_until(lambda: Attempt.objects.filter(delivery=poison).count() == number)  # noqa: B023
        poison.refresh_from_db()
        assert states()["delivered"] == 0 or number == STANDARD.max_attempts
        clock.advance_to(poison.due_at)
    run_until(lambda: states() == {"dead": 1, "delivered": 10})

    longest = sum(step.most for step in STANDARD.steps) / 1000
    blocked = (poison.finished_at - poison.first_attempt_at).total_seconds()
    assert blocked < longest + 60
    assert [one.body for one in receiver.received] == [b'{"n": 0}'] * 10 + [b'{"n": 1}'] * 10


def test_b52_in_order_ops_see_what_blocks_and_skip_it(tenant, make_endpoint, receiver, api_key, admin_client):
    endpoint = make_endpoint(ordered=True)
    receiver.respond = fails_for_poison
    publish_poison(tenant)
    poison = Delivery.objects.order_by("turn").first()
    run_until(lambda: Attempt.objects.filter(delivery=poison).exists())

    assert poison.typeid in admin_client.get(f"/admin/endpoints/endpoint/{endpoint.pk}/change/").text
    Api(api_key).call("POST", f"deliveries/{poison.typeid}/cancel")
    run_until(lambda: states() == {"discarded": 1, "delivered": 10})


# --- B53


# That first tries go before retries that are due for longer: test_scheduling.


def most_within(receiver: Receiver, seconds: float) -> int:
    """The most requests that came within so many seconds."""
    times = sorted(one.at for one in receiver.received)
    return max(bisect.bisect_left(times, time + seconds) - place for place, time in enumerate(times))


@override_settings(PUMP_IN_FLIGHT=40, PUMP_ENDPOINT_IN_FLIGHT=40)
def test_b53_a_tenant_whose_receiver_sleeps_and_its_retries_delay_no_other_tenant(
    tenant, make_endpoint, receiver, contract
):
    contract("brief", deadline=2.0)  # which has no circuit: all of its events are tried, and tried again
    other = Tenant.objects.create(name="F")
    make_endpoint(tenant=other)
    published: list[float] = []

    def publish_as_f(retries: bool) -> None:
        if retries:
            make_due()
        published.append(time.time())
        publish(other, 20)

    def is_over() -> bool:
        failed = Attempt.objects.filter(error="total_timeout").count()
        if not published and len(sleeping.received) >= 8:
            publish_as_f(retries=False)
        if len(published) == 1 and len(receiver.received) == 20 and failed >= 30:
            publish_as_f(retries=True)
        return len(receiver.received) == 40

    with Receiver() as sleeping:
        sleeping.respond = [30.0]
        make_endpoint(url=sleeping.url, contract="brief")
        publish(tenant, 500)
        run_pumps(4, is_over, seconds=40)

    for start, begun in zip((0, 20), published, strict=True):
        waits = sorted(one.at - begun for one in receiver.received[start : start + 20])
        assert waits[18] < 5  # the 95th percentile of 20
    # Of each pump's places at most 15 %, and one more where a place became free.
    assert 4 <= most_within(sleeping, 1.5) <= 4 * 7
    assert Delivery.objects.filter(endpoint__tenant=other, attempts_made=1, state="delivered").count() == 40


# --- B60


@pytest.mark.live
def test_b60_a_clock_that_is_started_again_five_times_leaves_one_job_waiting(product, db):
    queue = django_rq.get_queue(settings.JOBS_QUEUE)
    for number in range(5):
        clock = product.start_clock()
        wait_until(lambda: queue.count > 0)
        time.sleep(0.5 if number else 2.5)  # a period
        product.kill(clock)
    assert queue.count == 1


def test_b60_a_clock_whose_job_waits_already_neither_spins_nor_sleeps_for_a_minute():
    queue = django_rq.get_queue(settings.JOBS_QUEUE)
    queue.empty()
    queue.enqueue(run_replay_jobs)
    clock = Clock()
    clock.enqueue_jobs()
    assert 0.5 <= clock.calculate_sleep_interval() <= 2
    for job in clock.get_jobs():
        job.set_enqueue_time(datetime.now(UTC) - timedelta(days=2))
    clock.enqueue_jobs()
    assert 0.5 <= clock.calculate_sleep_interval() <= 2
    assert queue.count == 1
    queue.empty()


def test_b60_sweeps_that_overlap_queue_and_send_nothing_twice(tenant, endpoint, receiver, pump, monkeypatch):
    publish(tenant, 30)
    Delivery.objects.update(state="dead", finished_at=Now())
    create_replay_job(job=ReplayJob(endpoint=endpoint, states=["dead"], reason="x"), actor=SYSTEM)
    began, really = threading.Event(), replays._end_kept

    def slowly(deliveries) -> None:
        began.set()
        time.sleep(1)  # longer than the other one takes
        really(deliveries)

    monkeypatch.setattr(replays, "_end_kept", slowly)

    in_threads(run_replay_jobs, lambda: began.wait(5) and run_replay_jobs())
    pump()

    job = ReplayJob.objects.get()
    assert (job.state, job.queued, Delivery.objects.filter(replay_job=job).count()) == ("completed", 30, 30)
    assert len(receiver.received) == 30


def test_b60_a_second_sweep_for_lost_leases_is_a_no_op_while_the_first_one_runs(
    tenant, endpoint, receiver, pump, monkeypatch
):
    publish(tenant, 5)
    Delivery.objects.update(
        state="sending", claim_token=F("id"), claimed_at=Now(), lease_until=Now() - timedelta(seconds=1)
    )
    began, ended, really, taken = threading.Event(), threading.Event(), results.record_results, []

    def slowly(found) -> None:
        began.set()
        ended.wait(5)
        really(found)

    monkeypatch.setattr(results, "record_results", slowly)

    def second() -> None:
        began.wait(5)
        taken.append(results.reclaim_lost())
        ended.set()

    in_threads(lambda: taken.append(results.reclaim_lost()), second)
    monkeypatch.undo()
    pump()

    assert taken == [0, 5]
    assert (states(), len(receiver.received)) == ({"delivered": 5}, 5)
    assert Attempt.objects.filter(error="interrupted").count() == 5


# --- B61


@pytest.mark.live
def test_b61_jobs_of_another_release_that_no_longer_run_are_made_again_from_the_database(
    product, tenant, endpoint, receiver
):
    for name in (settings.PUMP_QUEUE, settings.JOBS_QUEUE):
        queue = django_rq.get_queue(name)
        queue.enqueue_call("deliveries.jobs.was_renamed")
        queue.enqueue_call("deliveries.jobs.run_pump", args=("an argument of another release",))
    publish(tenant, 3)
    Delivery.objects.filter(pk=Delivery.objects.first().pk).update(state="dead", finished_at=Now())
    create_replay_job(job=ReplayJob(endpoint=endpoint, states=["dead"], reason="x"), actor=SYSTEM)

    for start in (product.start_worker, product.start_jobs_worker, product.start_clock):
        start()
    wait_until(lambda: states() == {"dead": 1, "delivered": 3})

    assert len(receiver.received) == 3
    assert ReplayJob.objects.get().state == "completed"
    for name in (settings.PUMP_QUEUE, settings.JOBS_QUEUE):
        assert FailedJobRegistry(queue=django_rq.get_queue(name)).count == 2


@pytest.mark.live
@pytest.mark.parametrize("redis_is", ["there", "away"])
def test_b61_a_worker_that_is_told_to_stop_waits_for_the_attempt_and_saves_it(
    product, tenant, endpoint, receiver, tmp_path, redis_is
):
    receiver.respond = [3.0, answer()]
    publish(tenant)
    with contextlib.ExitStack() as stack:
        product.environment["REDIS_URL"] = stack.enter_context(embedded._valkey(tmp_path))
        worker = product.start_worker()
        wait_until(lambda: len(receiver.received) == 1)
        if redis_is == "away":
            stack.close()
        product.kill(worker, signal.SIGTERM)

        assert states() == {"delivered": 1}
    attempt = Attempt.objects.get()
    assert (attempt.status, attempt.total_us > 2_900_000, len(receiver.received)) == (200, True, 1)


# --- B62


@pytest.mark.parametrize("minutes", [10, -10])
def test_b62_what_is_due_goes_by_the_database_s_clock_and_a_worker_says_loudly_that_its_own_is_wrong(
    tenant, endpoint_under, receiver, pump, monkeypatch, caplog, minutes
):
    off, really = minutes * 60, time.time

    class Wrong(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(seconds=off)

    monkeypatch.setattr(time, "time", lambda: really() + off)
    for module in (pump_module, transport):
        monkeypatch.setattr(module, "datetime", Wrong)
    waits = {"standard": (4.5, 5.8), "brief": (24, 36.3), "betterstood": (54, 66.3), "kingminos": (60, 360.3)}
    for name in waits:
        endpoint_under(name)
    receiver.respond = lambda _: answer(500 if len(receiver.received) <= 4 else 200)
    publish_lifecycle(tenant)
    publish_later = Delivery.objects.create(**later(tenant))

    pump()

    assert len(receiver.received) == 4
    now = Delivery.objects.all().database_now()
    for delivery in Delivery.objects.exclude(pk=publish_later.pk).select_related("endpoint"):
        low, high = waits[delivery.endpoint.contract]
        assert low - 5 <= (delivery.due_at - now).total_seconds() <= high  # counted at the end of its attempt
        assert delivery.attempts.get().total_us >= 0
    way = "ahead of" if minutes > 0 else "behind"
    [warned] = [one for one in caplog.records if "clock" in one.getMessage()]
    assert warned.levelname == "ERROR"
    assert re.search(rf"clock is (599|600|601) s {way} the database's", warned.getMessage())
    signed = {
        int(one.header("webhook-timestamp")) - really() for one in receiver.received if one.header("webhook-timestamp")
    }
    assert signed
    assert all(abs(one - off) < 20 for one in signed)

    make_due()
    Delivery.objects.filter(pk=publish_later.pk).update(due_at=Now() + timedelta(minutes=5))
    pump()
    assert states() == {"delivered": 4, "pending": 1}


def later(tenant) -> dict:
    """A delivery that is due in five minutes: by no clock that is ten minutes ahead."""
    standard = Endpoint.objects.get(contract="standard")
    event = Event.objects.create(tenant=tenant, type="a", payload=b"{}")
    return {**services.beginning(standard, event), "due_at": Now() + timedelta(minutes=5)}


def test_b62_a_clock_that_is_right_is_not_spoken_of(tenant, endpoint, pump, caplog):
    publish(tenant)
    pump()
    assert "clock" not in caplog.text
