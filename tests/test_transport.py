"""The transport alone, against receivers on loopback that misbehave in every way people have reported."""

import contextlib
import dataclasses
import datetime
import ipaddress
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import certifi
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deliveries import transport as transport_module
from deliveries.pump import NOT_SENT
from deliveries.transport import Outcome, Request, Transport
from endpoints.addresses import AddressRule
from tests.receiver import Received, Receiver, answer
from webhookhub import __version__

LOOPBACK = AddressRule.parse(networks="127.0.0.0/8", allow_http=True)
OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def make_transport(rule: AddressRule = LOOPBACK, ca_bundle: str | None = None) -> Iterator[Transport]:
    transport = Transport(rule=rule, ca_bundle=ca_bundle or certifi.where(), max_connections=2_000)
    try:
        yield transport
    finally:
        transport.close()


@pytest.fixture
def transport() -> Iterator[Transport]:
    with make_transport() as one:
        yield one


def request(url: str, **fields: object) -> Request:
    values: dict[str, object] = {
        "tag": None,
        "url": url,
        "host": "127.0.0.1",
        "headers": ["content-type: application/json", *NOT_SENT],
        "body": b"{}",
        "deadline": 5.0,
        "read_bytes": 65_536,
        "keep_bytes": 4_096,
    }
    return Request(**{**values, **fields})  # type: ignore[arg-type]


def exchange(transport: Transport, *requests: Request) -> list[Outcome]:
    """Sends these side by side, and returns their outcomes in the order they were given in."""
    for number, one in enumerate(requests):
        transport.send(dataclasses.replace(one, tag=number))
    outcomes: dict[int, Outcome] = {}
    end = time.monotonic() + 10
    while len(outcomes) < len(requests):
        assert time.monotonic() < end, f"{len(outcomes)} of {len(requests)} requests have ended"
        for outcome in transport.wait(0.1):
            assert outcome.request.tag not in outcomes, "a request ended twice"
            outcomes[outcome.request.tag] = outcome
    assert transport.in_flight == 0
    return [outcomes[number] for number in range(len(requests))]


def exchange_one(transport: Transport, one: Request) -> Outcome:
    return exchange(transport, one)[0]


@contextlib.contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does as `serve` says with each connection, and its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                serve(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5)


def drip(text: bytes, seconds: float = 0.05) -> Iterator[bytes | float]:
    for byte in text:
        yield bytes([byte])
        yield seconds


def _reset(connection: socket.socket) -> None:
    connection.recv(65_536)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# --- What is sent


def test_the_body_goes_out_byte_for_byte(transport, receiver):
    body = bytes(range(256)) + b'{ "a": 1.10 }\r\n\x00'

    exchange(transport, request(receiver.url, body=body))

    assert receiver.received[0].body == body


def test_a_request_has_our_headers_as_they_are_and_of_libcurls_only_the_needed_ones(transport, receiver):
    lines = ["webhook-id: evt_1", "webhook-signature: v1,a= v1,b=", "content-type: application/json; charset=utf-8"]

    exchange(transport, request(receiver.url, headers=[*lines, *NOT_SENT]))

    assert receiver.received[0].headers == [
        ("Host", f"127.0.0.1:{receiver.port}"),
        ("User-Agent", f"WebhookHub/{__version__}"),
        ("webhook-id", "evt_1"),
        ("webhook-signature", "v1,a= v1,b="),
        ("content-type", "application/json; charset=utf-8"),
        ("Content-Length", "2"),
    ]


def test_a_body_of_megabytes_does_not_wait_for_a_100_continue(transport, receiver):
    body = b"x" * 3_000_000

    outcome = exchange_one(transport, request(receiver.url, body=body))

    [received] = receiver.received
    assert (outcome.status, received.header("expect"), received.body == body) == (200, None, True)
    assert outcome.timings.total < 900_000  # libcurl waits a second for a 100


def test_an_empty_body_is_sent_as_one(transport, receiver):
    exchange(transport, request(receiver.url, body=b""))

    [received] = receiver.received
    assert (received.header("content-length"), received.body) == ("0", b"")


@pytest.mark.parametrize(
    "target",
    ["/a/../b?x=%2f&sig=a%2Fb%3D", "/./a//b/?", "/%7e%7E/~?a=b&&c", "/a{b}|^`[]?q='\"{}", "/?x=1?y=2"],
)
def test_a_url_goes_out_byte_for_byte(transport, receiver, target):
    exchange(transport, request(f"http://127.0.0.1:{receiver.port}{target}"))

    assert receiver.received[0].line == f"POST {target} HTTP/1.1"


def test_a_url_without_a_path_is_asked_for_the_root(transport, receiver):
    exchange(transport, request(f"http://127.0.0.1:{receiver.port}?x=%2f"))

    assert receiver.received[0].line == "POST /?x=%2f HTTP/1.1"


def test_two_requests_one_after_the_other_share_a_connection(transport, receiver):
    exchange(transport, request(receiver.url))
    second = exchange_one(transport, request(receiver.url))

    assert (second.status, len(receiver.received), receiver.connections) == (200, 2, 1)


def test_a_kept_connection_that_the_receiver_closed_meanwhile_is_replaced_silently(transport, receiver):
    receiver.close_after = True
    exchange(transport, request(receiver.url))
    time.sleep(0.05)  # for the receiver's FIN to come: nothing else tells of it

    second = exchange_one(transport, request(receiver.url))

    assert (second.status, len(receiver.received), receiver.connections) == (200, 2, 2)


def test_the_environment_names_no_proxy_and_no_credentials(transport, receiver, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with Receiver() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        plain, secure = exchange(
            transport, request(receiver.url), request(f"https://127.0.0.1:{receiver.port}/", deadline=0.3)
        )

    assert (plain.status, secure.status, proxy.connections) == (200, None, 0)
    assert [one.header("authorization") for one in receiver.received if one.body] == [None]


# --- Statuses


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
def test_a_redirect_is_not_followed(transport, receiver, status):
    receiver.respond = lambda one: answer(200 if one.line.startswith("GET") else status, "Location: /end")

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error, outcome.header("location")) == (status, "", " /end")
    assert len(receiver.received) == 1


@pytest.mark.parametrize("interim", [100, 102, 103])
def test_an_interim_response_is_read_over_to_the_final_one(transport, receiver, interim):
    receiver.respond = f"HTTP/1.1 {interim} X\r\nLink: </a.css>\r\n\r\n".encode() + answer(200, "X-Last: yes")

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.headers) == (200, ["Content-Length: 0", "X-Last: yes"])


@pytest.mark.parametrize("interim", [100, 101, 102, 103])
def test_an_interim_response_alone_is_no_answer(transport, receiver, interim):
    receiver.respond = f"HTTP/1.1 {interim} X\r\n\r\n".encode()
    receiver.close_after = True

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error) == (None, "closed_before_response")


def test_interim_responses_without_end_are_cut_off(transport, receiver):
    receiver.respond = lambda _: iter(lambda: b"HTTP/1.1 103 X\r\nLink: " + b"x" * 1_000 + b"\r\n\r\n", None)

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error) == (None, "headers_too_large")


def test_a_status_read_before_the_whole_body_was_sent_counts(transport):
    def refuse(connection: socket.socket) -> None:
        connection.recv(1_000)
        connection.sendall(answer(413, "Connection: close"))

    with raw_server(refuse) as port:
        outcome = exchange_one(transport, request(f"http://127.0.0.1:{port}/", body=b"x" * 10_000_000))

    assert (outcome.status, outcome.error) == (413, "")


# --- The deadline


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(OK + b"X-Slow: " + b"x" * 200 + b"\r\n\r\n", id="head"),
        pytest.param(b"HTTP/1.1 103 X\r\n\r\n" * 20, id="interim"),
    ],
)
def test_a_head_that_drips_is_cut_off_at_the_deadline(transport, receiver, text):
    receiver.respond = lambda _: drip(text)

    begun = time.monotonic()
    outcome = exchange_one(transport, request(receiver.url, deadline=0.4))

    assert (outcome.status, outcome.error) == (None, "total_timeout")
    assert 0.35 < time.monotonic() - begun < 1.4


def test_a_body_that_drips_is_cut_off_at_the_deadline(transport, receiver):
    receiver.respond = lambda _: [OK + b"Content-Length: 200\r\n\r\n", *drip(b"x" * 200)]

    begun = time.monotonic()
    outcome = exchange_one(transport, request(receiver.url, deadline=0.4))

    assert (outcome.status, outcome.error) == (None, "total_timeout")
    assert outcome.body.startswith(b"xx")
    assert time.monotonic() - begun < 1.4


def test_a_receiver_that_drips_or_is_silent_delays_no_other_request(transport, receiver):
    receiver.respond = lambda one: {
        "/silent": [30.0],
        "/head": drip(OK * 100),
        "/body": [OK + b"Content-Length: 200\r\n\r\n", *drip(b"x" * 200)],
    }.get(one.line.split()[1], answer())
    base = f"http://127.0.0.1:{receiver.port}"
    slow = [request(f"{base}/{path}", deadline=1.0) for path in ("silent", "head", "body")]

    outcomes = exchange(transport, *slow, *[request(receiver.url) for _ in range(50)])

    assert [outcome.error for outcome in outcomes[:3]] == ["total_timeout"] * 3
    assert all(outcome.status == 200 and outcome.timings.total < 500_000 for outcome in outcomes[3:])


def test_a_receiver_that_never_answers_is_left_at_the_deadline(transport, receiver):
    receiver.respond = [30.0]

    outcome = exchange_one(transport, request(receiver.url, deadline=0.2))

    assert (outcome.status, outcome.error, outcome.address) == (None, "total_timeout", "127.0.0.1")
    assert 190_000 <= outcome.timings.total < 1_200_000


def test_a_receiver_that_never_answers_on_a_kept_connection_is_no_fault_of_dns(transport, receiver):
    receiver.respond = lambda one: [30.0] if one.body == b"hang" else answer()
    exchange(transport, request(receiver.url))

    outcome = exchange_one(transport, request(receiver.url, body=b"hang", deadline=0.2))

    assert (outcome.status, outcome.error, receiver.connections) == (None, "total_timeout", 1)


def test_a_receiver_that_does_not_take_the_connection_is_left_at_the_deadline(transport):
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # more than its backlog holds
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())

        outcome = exchange_one(transport, request(f"http://127.0.0.1:{full.getsockname()[1]}/", deadline=0.3))

    assert (outcome.status, outcome.error, outcome.address) == (None, "connect_timeout", "127.0.0.1")
    assert (outcome.timings.connect, outcome.timings.wait) == (None, None)


def test_a_receiver_that_does_not_finish_the_tls_handshake_is_left_at_the_deadline(transport):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        outcome = exchange_one(transport, request(f"https://127.0.0.1:{silent.getsockname()[1]}/", deadline=0.2))

    assert (outcome.status, outcome.error) == (None, "total_timeout")


# --- Answers whose rest is broken (B03): the receiver has answered


@pytest.mark.parametrize(
    ("rest", "word"),
    [
        pytest.param(b"Content-Length: 100\r\n\r\nhello", "missing", id="B03a-short-content-length"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\n20\r\nhello", "outstanding", id="B03b-truncated-chunk"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nhello", "hex", id="B03c-chunk-size-ZZ"),
        pytest.param(b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", "Content-Length", id="B03e-two-lengths"),
        pytest.param(b"Content-Length: abc\r\n\r\nabcd", "Content-Length", id="B03f-length-abc"),
        pytest.param(b"Content-Length: -5\r\n\r\nabcd", "Content-Length", id="B03f-length-negative"),
        pytest.param(b"Transfer-Encoding: wrong\r\n\r\nabcd", "Transfer-Encoding", id="unknown-transfer-encoding"),
        pytest.param(
            b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n", "outstanding", id="truncated-trailers"
        ),
    ],
)
def test_a_broken_body_changes_nothing_about_the_status(transport, receiver, rest, word):
    receiver.respond = OK + rest
    receiver.close_after = True

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error) == (200, "")
    assert re.match(f"response body unreadable: .*{word}", outcome.detail)


def test_a_reset_in_the_body_changes_nothing_about_the_status(transport):
    def serve(connection: socket.socket) -> None:
        connection.recv(65_536)
        connection.sendall(OK + b"Content-Length: 100\r\n\r\nhello")
        time.sleep(0.05)  # or the reset overtakes the answer
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with raw_server(serve) as port:
        outcome = exchange_one(transport, request(f"http://127.0.0.1:{port}/"))

    assert (outcome.status, outcome.error, outcome.body) == (200, "", b"hello")
    assert outcome.detail.startswith("response body unreadable: ")


def test_a_body_that_only_claims_to_be_compressed_is_kept_as_it_came(transport, receiver):
    receiver.respond = answer(200, "Content-Encoding: gzip", body=b"hello")

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error, outcome.detail, outcome.body) == (200, "", "", b"hello")


def test_trailers_do_not_take_the_place_of_the_headers(transport, receiver):
    receiver.respond = (
        b"HTTP/1.1 503 X\r\nRetry-After: 7\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n"
    )

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.header("retry-after"), outcome.body) == (503, " 7", b"ok")


@pytest.mark.parametrize("head", [b"", b"Content-Length: 200000000\r\n"], ids=["without-length", "with-length"])
def test_an_endless_body_is_read_no_further_than_allowed(transport, receiver, head):
    sent = 0

    def flood(_: Received) -> Iterator[bytes]:
        nonlocal sent
        yield OK + head + b"\r\n"
        for _ in range(4_000):
            sent += 50_000
            yield b"x" * 50_000

    receiver.respond = flood

    outcome = exchange_one(transport, request(receiver.url, read_bytes=100_000, keep_bytes=10))

    assert (outcome.status, outcome.error, outcome.body, outcome.truncated) == (200, "", b"x" * 10, True)
    assert sent < 40_000_000, "the connection was drained"  # the rest is the sockets' buffers


@pytest.mark.parametrize(
    ("length", "kept", "truncated"), [(9, 9, False), (10, 10, False), (11, 10, True), (20, 10, True)]
)
def test_a_body_is_kept_up_to_the_limit_and_says_when_it_is_cut(transport, receiver, length, kept, truncated):
    receiver.respond = answer(200, body=b"x" * length)

    outcome = exchange_one(transport, request(receiver.url, read_bytes=20, keep_bytes=10))

    assert (len(outcome.body), outcome.truncated, outcome.detail) == (kept, truncated, "")


def test_nul_bytes_in_a_body_are_kept(transport, receiver):
    receiver.respond = answer(200, body=b"ok\x00\xff")

    assert exchange_one(transport, request(receiver.url)).body == b"ok\x00\xff"


# --- Malformed and oversized heads (B07)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        pytest.param(b"HTTP/1.1 abc OK\r\n\r\n", "malformed_response", id="status-abc"),
        pytest.param(b"HTTP/1.1 000 OK\r\n\r\n", "malformed_response", id="status-000"),
        pytest.param(b"HTTP/1.1 099 OK\r\n\r\n", "malformed_response", id="status-099"),
        pytest.param(b"HTTP/1.1 20 OK\r\n\r\n", "malformed_response", id="status-20"),
        pytest.param(b"HTTP/1.1 2000 OK\r\n\r\n", "malformed_response", id="status-2000"),
        pytest.param(b"HTTP/1.1 600 OK\r\n\r\n", "malformed_response", id="status-600"),
        pytest.param(b"HTTP/1.1 999 OK\r\n\r\n", "malformed_response", id="status-999"),
        pytest.param(b"HTTP/7.1 200 OK\r\n\r\n", "malformed_response", id="version-7"),
        pytest.param(b"hello, world\r\n", "malformed_response", id="http-0.9"),
        pytest.param(b"\x15\x03\x03\x00\x02\x02\x46", "malformed_response", id="tls-on-a-plain-port"),
        pytest.param(OK + b"X: " + b"x" * 150_000 + b"\r\n\r\n", "headers_too_large", id="line-of-150-KB"),
        pytest.param(OK + b"X: y\r\n" * 60_000 + b"\r\n", "headers_too_large", id="60000-lines"),
    ],
)
def test_a_malformed_head_is_an_error_with_a_name(transport, receiver, reply, error):
    receiver.respond = reply
    receiver.close_after = True

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error) == (None, error)


@pytest.mark.parametrize("lines", [[f"X-{n}: 1" for n in range(120)], ["X: " + "x" * 70_000]], ids=["many", "long"])
def test_a_large_head_that_libcurl_can_read_is_an_answer_and_kept_in_part(transport, receiver, lines):
    receiver.respond = answer(200, *lines)

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error) == (200, "")
    assert len(outcome.headers) <= 100
    assert max(map(len, outcome.headers)) <= 1_000


def test_response_headers_of_any_bytes_are_text_without_nul(transport, receiver):
    receiver.respond = b"HTTP/1.1 200 \xff\r\nX: \xe9\xff\r\nContent-Length: 0\r\n\r\n"

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.header("x")) == (200, " éÿ")


# --- Connections that fail


def test_a_refused_connection_is_an_error_with_a_name(transport):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    outcome = exchange_one(transport, request(f"http://127.0.0.1:{port}/"))

    assert (outcome.status, outcome.error, outcome.address) == (None, "connect_refused", "127.0.0.1")


def test_a_connection_closed_without_an_answer_is_an_error_with_a_name(transport, receiver):
    receiver.respond = b""

    outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error, len(receiver.received)) == (None, "closed_before_response", 1)


def test_a_reset_connection_is_an_error_with_a_name(transport):
    with raw_server(_reset) as port:
        outcome = exchange_one(transport, request(f"http://127.0.0.1:{port}/"))

    assert (outcome.status, outcome.error) == (None, "connection_reset")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (socket.EAI_NONAME, "dns_nxdomain"),
        (socket.EAI_NODATA, "dns_no_address"),
        (socket.EAI_AGAIN, "dns_servfail"),
        (socket.EAI_FAIL, "dns_failed"),
        (None, "dns_failed"),
    ],
)
def test_a_name_that_does_not_resolve_is_an_error_with_the_resolver_s_reason(transport, monkeypatch, code, error):
    # libcurl looks no .onion up (RFC 7686), so that this asks no resolver but the stub.
    def look_up(host, *_, **__):
        assert host == "webhookhub.onion"
        if code is not None:
            raise socket.gaierror(code, "stub")
        return []

    monkeypatch.setattr(transport_module.socket, "getaddrinfo", look_up)
    outcome = exchange_one(transport, request("http://webhookhub.onion/", host="webhookhub.onion"))

    assert (outcome.status, outcome.error, outcome.address) == (None, error, None)


def test_a_resolver_that_hangs_ends_with_the_deadline_and_delays_nobody(transport, receiver, monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(transport_module.socket, "getaddrinfo", lambda *_, **__: free.wait(10))
    hanging = request("http://webhookhub.onion/", host="webhookhub.onion", deadline=1.0)
    hung, other = exchange(transport, hanging, request(receiver.url))
    free.set()

    assert (other.status, other.timings.total < 500_000) == (200, True)
    assert (hung.status, hung.error) == (None, "dns_timeout")


def test_lacking_descriptors_of_our_own_is_told_from_the_receivers_faults(transport, receiver, monkeypatch):
    def no_socket(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(transport_module.socket, "socket", no_socket)
        without = exchange_one(transport, request(receiver.url))
    after = exchange_one(transport, request(receiver.url))

    assert (without.status, without.error) == (None, "local_resource_exhausted")
    assert "Too many open files" in without.detail
    assert (after.status, after.error) == (200, "")


# --- TLS


@dataclasses.dataclass(frozen=True)
class Certificate:
    path: Path
    context: ssl.SSLContext


@pytest.fixture(scope="module")
def make_certificate(tmp_path_factory) -> Callable[..., Certificate]:
    def make(address: str = "127.0.0.1", days: int = 1) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receiver")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=10))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False)
            .sign(key, hashes.SHA256())
        )
        path = tmp_path_factory.mktemp("tls") / "certificate.pem"
        path.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return Certificate(path, context)

    return make


def test_a_trusted_certificate_is_accepted_and_the_handshake_timed(make_certificate):
    certificate = make_certificate()
    with Receiver(certificate.context) as receiver, make_transport(ca_bundle=str(certificate.path)) as transport:
        outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error) == (200, "")
    assert outcome.timings.tls


def test_a_self_signed_certificate_is_refused(make_certificate):
    with Receiver(make_certificate().context) as receiver, make_transport() as transport:
        outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error, receiver.received) == (None, "tls_certificate_invalid", [])


@pytest.mark.parametrize("fault", [{"address": "127.0.0.2"}, {"days": -1}], ids=["other-host", "expired"])
def test_a_certificate_that_does_not_hold_is_refused(make_certificate, fault):
    certificate = make_certificate(**fault)
    with Receiver(certificate.context) as receiver, make_transport(ca_bundle=str(certificate.path)) as transport:
        outcome = exchange_one(transport, request(receiver.url))

    assert (outcome.status, outcome.error, receiver.received) == (None, "tls_certificate_invalid", [])


def test_https_to_a_plain_port_fails_in_the_handshake(transport):
    def serve(connection: socket.socket) -> None:
        connection.recv(65_536)
        connection.sendall(answer(400, body=b"this is plain HTTP"))

    with raw_server(serve) as port:
        outcome = exchange_one(transport, request(f"https://127.0.0.1:{port}/"))

    assert (outcome.status, outcome.error) == (None, "tls_handshake_failed")


# --- The address rule


def test_an_address_that_the_rule_blocks_is_never_dialled(receiver):
    with make_transport(AddressRule.parse(allow_http=True)) as strict:
        blocked = exchange_one(strict, request(receiver.url))
    with make_transport() as open_to_loopback:
        exchange(open_to_loopback, request(receiver.url))  # a dial before this one would be counted by now

    assert (blocked.status, blocked.error, blocked.address) == (None, "blocked_address", None)
    assert "ALLOWED_NETWORKS" in blocked.detail
    assert (receiver.connections, len(receiver.received)) == (1, 1)


def test_a_name_is_blocked_by_the_addresses_it_resolves_to(receiver):
    with make_transport(AddressRule.parse(allow_http=True)) as strict:
        outcome = exchange_one(strict, request(f"http://localhost:{receiver.port}/", host="localhost"))

    assert (outcome.status, outcome.error, receiver.connections) == (None, "blocked_address", 0)


def test_of_a_names_addresses_the_allowed_one_is_dialled_and_decides(transport, receiver):
    """libcurl itself says that localhost is ::1 and 127.0.0.1; the rule allows the second."""
    receiver.respond = lambda one: [30.0] if one.body == b"hang" else answer()
    url = f"http://localhost:{receiver.port}/"

    answered = exchange_one(transport, request(url, host="localhost"))
    hung = exchange_one(transport, request(url, host="localhost", body=b"hang", deadline=0.2))

    assert (answered.status, answered.error) == (200, "")
    assert (hung.status, hung.error) == (None, "total_timeout")


# --- Many, and one after another


def test_six_hundred_requests_are_in_flight_at_once(transport, receiver):
    receiver.respond = lambda _: [0.3, answer()]

    begun = time.monotonic()
    outcomes = exchange(transport, *[request(receiver.url) for _ in range(600)])

    assert {outcome.status for outcome in outcomes} == {200}
    assert (len(receiver.received), receiver.connections) == (600, 600)
    assert time.monotonic() - begun < 3  # one after the other they would take three minutes


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        pytest.param({"headers": ["content-type: a\r\nX-Evil: 1"]}, r"content-type .* '\r'", id="header-crlf"),
        pytest.param({"headers": ["content-type: a\nX-Evil: 1"]}, r"content-type .* '\n'", id="header-lf"),
        pytest.param({"headers": ["content-type: a\x00b"]}, r"content-type .* '\x00'", id="header-nul"),
        pytest.param({"headers": ["content-type: ☃"]}, r"content-type .* '\u2603'", id="header-snowman"),
        pytest.param({"url": "http://127.0.0.1:{port}/a b"}, "rejected", id="url-space"),
        pytest.param({"url": "http://127.0.0.1:{port}/a\tb"}, "rejected", id="url-tab"),
        pytest.param({"url": "http://127.0.0.1:{port}/a\r\nX-Evil: 1"}, "rejected", id="url-crlf"),
        pytest.param({"url": "http://127.0.0.1:{port}/a\x00b"}, "null", id="url-nul"),
        pytest.param({"url": "http://127.0.0.1:{port}/ä"}, "encode", id="url-umlaut"),
    ],
)
def test_a_request_that_cannot_be_built_ends_as_an_outcome(transport, receiver, fields, word):
    if "url" in fields:
        fields = {"url": fields["url"].format(port=receiver.port)}

    outcome = exchange_one(transport, request(**{"url": receiver.url, **fields}))

    assert (outcome.status, outcome.error) == (None, "invalid_header" if "headers" in fields else "invalid_url")
    assert re.search(word.replace("\\", "\\\\"), outcome.detail)
    assert outcome.started_at is not None
    assert receiver.connections == 0


def test_timings_are_of_one_exchange_and_the_dialled_address_is_told(transport, receiver):
    receiver.respond = lambda _: [0.2, answer()]

    first = exchange_one(transport, request(receiver.url))
    second = exchange_one(transport, request(receiver.url))

    assert first.address == second.address == "127.0.0.1"
    assert first.timings.connect
    assert second.timings.connect is None  # the connection was there
    for timings in (first.timings, second.timings):
        assert 190_000 <= timings.wait < 1_000_000
        assert (timings.lookup or 0) + (timings.connect or 0) + timings.wait <= timings.total
        assert timings.tls is None
    assert (second.started_at - first.started_at).total_seconds() >= first.timings.total / 1e6


def test_nothing_of_one_exchange_shows_in_the_next(transport, receiver):
    receiver.respond = lambda one: answer(body=b"x" * 100) if one.body == b"full" else answer(204)
    full = request(receiver.url, body=b"full", keep_bytes=50)
    blocked = request(f"http://[::1]:{receiver.port}/")
    not_built = request(receiver.url, headers=["a: b\nc: d"])
    plain = request(receiver.url)

    one, two, three, four, five, six = [
        exchange_one(transport, each) for each in (full, blocked, full, not_built, plain, blocked)
    ]

    assert (one.truncated, len(one.body), len(three.body)) == (True, 50, 50)
    for outcome, error in ((two, "blocked_address"), (four, "invalid_header"), (six, "blocked_address")):
        assert (outcome.error, outcome.status, outcome.address) == (error, None, None)
        assert (outcome.headers, outcome.body, outcome.truncated) == ([], b"", False)
        assert (outcome.timings.connect, outcome.timings.wait) == (None, None)
    assert (five.status, five.error, five.detail, five.body, five.truncated) == (204, "", "", b"", False)
    assert five.headers == ["Content-Length: 0"]


def test_closing_drops_the_connections_of_what_is_in_flight():
    arrived, gone = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(65_536)
        arrived.set()
        connection.settimeout(5)
        if connection.recv(1) == b"":
            gone.set()

    with raw_server(serve) as port:
        with make_transport() as transport:
            transport.send(request(f"http://127.0.0.1:{port}/"))
            while not arrived.is_set():
                transport.wait(0.05)
        assert gone.wait(2)


def test_a_wake_up_ends_a_wait_and_says_so(transport):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport.watch(ours.fileno())
        transport.wait(0)
        before = transport.woken
        theirs.sendall(b"x")
        begun = time.monotonic()
        transport.wait(5)

        assert (before, transport.woken) == (False, True)
        assert time.monotonic() - begun < 1
        transport.watch(None)
