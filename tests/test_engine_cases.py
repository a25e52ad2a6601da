"""Cases B01 to B08, B43 to B53 and B60 to B62, each by its id: what a receiver, a crash or a second process does to the
engine. Through pump, database and a real receiver all the way; the transport's part alone is in test_transport.
"""

import resource

import pytest

from deliveries.models import Attempt, Delivery
from endpoints.models import Endpoint
from tests.receiver import Received, answer
from tests.test_api import Api
from tests.test_cases import make_due, publish, states

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


@pytest.mark.xfail(
    strict=True,
    reason="standard's text calls no error final: what the address rule refuses is tried again by its schedule",
)
@pytest.mark.parametrize("url", HOSTS.values(), ids=HOSTS)
def test_b08_such_a_url_is_final_under_standard(tenant, endpoint, pump, url):
    Endpoint.objects.update(url=url)
    publish(tenant)

    pump()

    assert states() == {"dead": 1}


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
