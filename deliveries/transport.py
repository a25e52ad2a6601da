"""The only module that speaks HTTP to receivers: thousands of requests in flight on one thread (libcurl multi, epoll).

A request's end is always an `Outcome`, never an exception. Each has one deadline over look-up, connect, TLS, sending
and answer. Redirects are not followed, no proxy or credential comes from the environment, nothing is decompressed,
and every address is checked when it is dialled.
"""

import contextlib
import errno
import functools
import os
import re
import select
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urljoin

import pycurl

from endpoints.addresses import AddressRule, Blocked
from webhookhub import __version__

USER_AGENT = f"WebhookHub/{__version__}"
CONNECT_SECONDS = 5  # a receiver that is there answers a connect within one retransmission (3 s) or not at all
IDLE_SECONDS = 15  # a connection idle for longer is not used again: many receivers have closed theirs by then
HEADER_LINES, HEADER_CHARS = 100, 1_000  # as much of a response's head as is kept; libcurl itself refuses over 300 KB

# The ways a request ends without a usable status, by libcurl's error; the words are those of the contracts.
_ERRORS = {
    pycurl.E_COULDNT_RESOLVE_HOST: "dns_failed",
    pycurl.E_SSL_CONNECT_ERROR: "tls_handshake_failed",
    pycurl.E_PEER_FAILED_VERIFICATION: "tls_certificate_invalid",
    pycurl.E_RECV_ERROR: "connection_reset",
    pycurl.E_GOT_NOTHING: "closed_before_response",
    pycurl.E_SEND_ERROR: "write_error",
    pycurl.E_URL_MALFORMAT: "invalid_url",
    pycurl.E_UNSUPPORTED_PROTOCOL: "malformed_response",
    100: "headers_too_large",  # CURLE_TOO_LARGE, which pycurl has no name for
    pycurl.E_OUT_OF_MEMORY: "local_resource_exhausted",
}
# What libcurl ends with over a header line it cannot use, such as a Content-Length that is no number.
_BAD_HEADER = frozenset({8, pycurl.E_BAD_CONTENT_ENCODING})  # 8: CURLE_WEIRD_SERVER_REPLY, nameless in pycurl
_STATUS_LINE = re.compile(r"HTTP/[0-9.]+ [0-9]{3}(?![0-9])")  # libcurl reads 2000 as 200
_AUTHORITY = re.compile(r"[^/?#]*//[^/?#]*")
_UNSENDABLE = re.compile(r"[\r\n\0]|[^\x00-\x7f]")  # in a header: libcurl would send line ends as they are
_TLS_RECORD = re.compile(rb"[\x14-\x17]\x03", re.DOTALL)  # RFC 8446 section 5.1: type, version
_HUGE_HEAD = 200_000  # bytes; libcurl says RECV_ERROR when a head passes its limit (300 KB)
# What the system's resolver says of a name that libcurl could not resolve, which keeps that to itself.
_RESOLVER = {
    socket.EAI_NONAME: "dns_nxdomain",
    socket.EAI_NODATA: "dns_no_address",
    socket.EAI_AGAIN: "dns_servfail",
}
_OS_ERRORS = {errno.ECONNREFUSED: "connect_refused", errno.ENETUNREACH: "network_unreachable"}


@dataclass(frozen=True, slots=True)
class Request:
    """A POST to make. `tag` comes back with the outcome; `headers` are lines without line ends."""

    tag: Any
    url: str
    host: str
    headers: Sequence[str]
    body: bytes
    deadline: float
    read_bytes: int
    keep_bytes: int


class Timings(NamedTuple):
    """Microseconds spent on each phase; None for one that was not reached or not needed (a reused connection)."""

    lookup: int | None
    connect: int | None
    tls: int | None
    wait: int | None
    total: int


@dataclass(slots=True)
class Outcome:
    """How a request ended: with a final `status`, or with an `error` (then `status` is None), and what was seen."""

    request: Request
    started_at: datetime
    status: int | None
    error: str
    detail: str
    address: str | None
    timings: Timings
    headers: list[str]
    body: bytes
    truncated: bool
    reason: str = ""  # the address rule's, of `blocked_address`

    def header(self, name: str) -> str | None:
        """The value of a response header (given in lower case), or None."""
        start = f"{name}:"
        return next((line[len(start) :] for line in self.headers if line.lower().startswith(start)), None)


class _InvalidHeader(ValueError):
    """A header line that cannot be sent."""


@dataclass(slots=True, eq=False)
class _Handle:
    """A reusable curl handle with what its present transfer has gathered."""

    curl: Any
    rule: AddressRule
    request: Request = None  # type: ignore[assignment]
    started_at: datetime = None  # type: ignore[assignment]
    blocked: Blocked | None = None
    exhausted: str = ""
    dialled: str | None = None
    foreign: bytes = b""
    head: list[bytes] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    received: int = 0
    sockets: list[socket.socket] = field(default_factory=list)

    def start(self, request: Request) -> None:
        for line in request.headers:
            if found := _UNSENDABLE.search(line):
                raise _InvalidHeader(f"the header {line.partition(':')[0]} cannot be sent: it holds {found[0]!a}")
        self.request = request
        self.blocked, self.exhausted = None, ""
        self.dialled = None
        self.foreign = b""
        self.head.clear()
        self.body = bytearray()
        self.received = 0
        curl = self.curl
        curl.setopt(pycurl.URL, request.url)
        curl.setopt(pycurl.REQUEST_TARGET, _target(request.url))
        curl.setopt(pycurl.HTTPHEADER, request.headers)
        curl.setopt(pycurl.POSTFIELDS, request.body)
        curl.setopt(pycurl.TIMEOUT_MS, int(request.deadline * 1000))
        self.started_at = datetime.now(UTC)

    def on_body(self, chunk: bytes) -> int:
        if not self.head:
            self.foreign = chunk[:100]
            return 0
        self.received += len(chunk)
        room = self.request.keep_bytes - len(self.body)
        if room > 0:
            self.body += chunk[:room]
        return len(chunk) if self.received <= self.request.read_bytes else 0  # 0: libcurl closes the connection

    def open_socket(self, _purpose: int, address: Any) -> Any:
        try:
            self.rule.check_address(address.addr[0], host=self.request.host)
        except Blocked as blocked:
            if not self.sockets:
                self.blocked = blocked.with_traceback(None)  # or it would hold the frame, which holds this handle
            return pycurl.SOCKET_BAD
        self.dialled = address.addr[0]
        self.blocked = None  # of a name's addresses, the one that is dialled decides how the request ends
        try:
            opened = socket.socket(address.family, address.socktype, address.protocol)
        except OSError as error:
            self.exhausted = f"no socket can be opened: {error}"
            return pycurl.SOCKET_BAD
        self.sockets.append(opened)  # libcurl works on a duplicate
        return opened

    def close_sockets(self) -> None:
        while self.sockets:
            self.sockets.pop().close()


class Transport:
    """Sends requests side by side and says how they ended.

    `ca_bundle` is the file of certificates to trust; of connections at most `max_connections` are kept.
    """

    def __init__(self, *, rule: AddressRule, ca_bundle: str, max_connections: int) -> None:
        self.in_flight = 0
        self.woken = False
        self._rule = rule
        self._ca_bundle = ca_bundle
        self._handles: list[_Handle] = []
        self._idle: list[_Handle] = []
        self._ended: list[Outcome] = []
        self._epoll = select.epoll()
        self._watched: set[int] = set()
        self._timer: float | None = None
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_socket)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._on_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, max_connections)
        self._wake_fd: int | None = None
        self._look_ups = ThreadPoolExecutor(4, thread_name_prefix="look-up")
        self._unresolved: list[tuple[Future[str], float, Outcome]] = []  # with the time by which they end anyhow
        self._resolver_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._resolver_fd, select.EPOLLIN)

    def watch(self, wake_fd: int | None) -> None:
        """Names the descriptor that also ends a wait when it becomes readable; `woken` then says so."""
        if self._wake_fd is not None:
            self._forget(self._wake_fd)
        self._wake_fd = wake_fd
        if wake_fd is not None:
            self._epoll.register(wake_fd, select.EPOLLIN)

    def send(self, request: Request) -> None:
        """Starts a request. Its outcome comes from a later `wait`."""
        handle = self._idle.pop() if self._idle else self._new_handle()
        try:
            handle.start(request)
        except (pycurl.error, ValueError) as error:
            self._ended.append(_not_built(request, error))
            self._idle.append(handle)
            return
        self.in_flight += 1
        self._multi.add_handle(handle.curl)

    def wait(self, timeout: float) -> list[Outcome]:
        """Moves transfers on until one ends, the wake descriptor is readable, or `timeout` seconds are over."""
        now = time.monotonic()
        if self._ended:
            timeout = 0
        if self._timer is not None:
            timeout = min(timeout, max(0.0, self._timer - now))
        for _, until, _ in self._unresolved:
            timeout = min(timeout, max(0.0, until - now))
        self.woken = False
        for fd, event in self._epoll.poll(timeout):
            if fd == self._wake_fd:
                self.woken = True
                continue
            if fd == self._resolver_fd:
                os.eventfd_read(fd)
                continue
            mask = (
                (pycurl.CSELECT_IN if event & select.EPOLLIN else 0)
                | (pycurl.CSELECT_OUT if event & select.EPOLLOUT else 0)
                | (pycurl.CSELECT_ERR if event & (select.EPOLLERR | select.EPOLLHUP) else 0)
            )
            self._multi.socket_action(fd, mask)
        if self._timer is not None and self._timer <= time.monotonic():
            self._timer = None
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        return self._gather()

    def close(self) -> None:
        """Drops everything, also what is in flight."""
        idle = set(self._idle)
        for handle in self._handles:
            if handle not in idle:
                self._multi.remove_handle(handle.curl)
            handle.close_sockets()
            handle.curl.close()
        self._multi.close()
        self._look_ups.shutdown(wait=True, cancel_futures=True)
        os.close(self._resolver_fd)
        self._epoll.close()

    def _gather(self) -> list[Outcome]:
        more = True
        while more:
            more, succeeded, failed = self._multi.info_read()
            for curl in succeeded:
                self._end(curl.handle, pycurl.E_OK, "")
            for curl, code, message in failed:
                self._end(curl.handle, code, message)
        if self._unresolved:
            self._gather_unresolved()
        ended, self._ended = self._ended, []
        return ended

    def _end(self, handle: _Handle, code: int, message: str) -> None:
        self._multi.remove_handle(handle.curl)
        outcome = self._outcome(handle, code, message)
        if outcome.error == "dns_failed":
            self._ask_resolver(outcome)
        else:
            self._ended.append(outcome)
        self._release(handle)

    def _ask_resolver(self, outcome: Outcome) -> None:
        """Finds out what is wrong with a name, within what is left of the deadline."""
        left = outcome.request.deadline - outcome.timings.total / 1_000_000
        future = self._look_ups.submit(_why_unresolved, outcome.request.host)
        future.add_done_callback(lambda _: os.eventfd_write(self._resolver_fd, 1))
        self._unresolved.append((future, time.monotonic() + max(left, 1.0), outcome))

    def _gather_unresolved(self) -> None:
        now, waiting = time.monotonic(), []
        for future, until, outcome in self._unresolved:
            if future.done() or until <= now:
                outcome.error = future.result() if future.done() else "dns_timeout"
                self._ended.append(outcome)
            else:
                waiting.append((future, until, outcome))
        self._unresolved = waiting

    def _release(self, handle: _Handle) -> None:
        self.in_flight -= 1
        handle.close_sockets()
        self._idle.append(handle)

    def _outcome(self, handle: _Handle, code: int, message: str) -> Outcome:
        getinfo = handle.curl.getinfo
        times = [getinfo(info) for info in _TIMES]
        connected_to = getinfo(pycurl.PRIMARY_IP)
        status_line, headers, complete = _parse_head(handle.head)
        status = (getinfo(pycurl.RESPONSE_CODE) or None) if handle.head else None
        error, detail = "", message
        if code != pycurl.E_OK:
            final = status is not None and status >= 200
            if final and ((complete and code != pycurl.E_OPERATION_TIMEDOUT) or code in _BAD_HEADER):
                # The receiver has answered: what is wrong with the rest of its response changes nothing about that.
                detail = "" if handle.received > handle.request.read_bytes else f"response body unreadable: {message}"
            else:
                error, status = self._error(handle, code, times[0]), None
                detail = str(handle.blocked or handle.exhausted or _not_http(handle) or message)
        if status is not None and not (100 <= status <= 599 and _STATUS_LINE.match(status_line)):
            error, detail, status = "malformed_response", f"{status_line[:100]!r} is no status from 100 to 599", None
        if status is not None and 300 <= status <= 399:
            detail = _way_out(handle.request.url, headers)
        return Outcome(
            request=handle.request,
            started_at=handle.started_at,
            status=status,
            error=error,
            detail=detail[:300],
            address=connected_to or handle.dialled,
            timings=_timings(times, reached=bool(connected_to)),
            headers=headers,
            body=bytes(handle.body),
            truncated=handle.received > len(handle.body),
            reason=handle.blocked.reason if handle.blocked else "",
        )

    def _error(self, handle: _Handle, code: int, lookup: int) -> str:
        if handle.blocked:
            return "blocked_address"
        if handle.exhausted:
            return "local_resource_exhausted"
        if code == pycurl.E_OPERATION_TIMEDOUT:
            connected = handle.curl.getinfo(pycurl.PRIMARY_IP)  # the times say nothing of a reused connection
            return "total_timeout" if connected else "connect_timeout" if lookup else "dns_timeout"
        if code == pycurl.E_COULDNT_CONNECT:
            return _OS_ERRORS.get(handle.curl.getinfo(pycurl.OS_ERRNO), "connect_failed")
        if code == pycurl.E_RECV_ERROR and sum(map(len, handle.head)) > _HUGE_HEAD:
            return "headers_too_large"
        return _ERRORS.get(code, "malformed_response")

    def _new_handle(self) -> _Handle:
        curl = pycurl.Curl()
        handle = curl.handle = _Handle(curl, self._rule)
        self._handles.append(handle)
        curl.setopt(pycurl.NOSIGNAL, 1)
        curl.setopt(pycurl.POST, 1)
        curl.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        curl.setopt(pycurl.FOLLOWLOCATION, 0)
        curl.setopt(pycurl.HTTP09_ALLOWED, 1)  # what is no HTTP comes to on_body, which ends it and tells what it was
        curl.setopt(pycurl.PROXY, "")  # whatever the environment says
        curl.setopt(pycurl.NETRC, pycurl.NETRC_IGNORED)
        curl.setopt(pycurl.USERAGENT, USER_AGENT)
        curl.setopt(pycurl.CONNECTTIMEOUT, CONNECT_SECONDS)
        curl.setopt(pycurl.MAXAGE_CONN, IDLE_SECONDS)
        curl.setopt(pycurl.SSLVERSION, pycurl.SSLVERSION_TLSv1_2)
        curl.setopt(pycurl.CAINFO, self._ca_bundle)
        curl.setopt(pycurl.OPENSOCKETFUNCTION, handle.open_socket)
        curl.setopt(pycurl.HEADERFUNCTION, handle.head.append)
        curl.setopt(pycurl.WRITEFUNCTION, handle.on_body)
        return handle

    def _on_socket(self, what: int, fd: int, _multi: Any, _data: Any) -> None:
        if what == pycurl.POLL_REMOVE:
            self._watched.discard(fd)
            self._forget(fd)
            return
        events = _EVENTS[what]
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._watched.add(fd)
            self._epoll.register(fd, events)

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # it may be closed, and so out of the set already
            self._epoll.unregister(fd)

    def _on_timer(self, milliseconds: int) -> None:
        self._timer = None if milliseconds < 0 else time.monotonic() + milliseconds / 1000


_EVENTS = {
    pycurl.POLL_NONE: 0,
    pycurl.POLL_IN: select.EPOLLIN,
    pycurl.POLL_OUT: select.EPOLLOUT,
    pycurl.POLL_INOUT: select.EPOLLIN | select.EPOLLOUT,
}
# Moments of a transfer, in microseconds since its start.
_TIMES = (
    pycurl.NAMELOOKUP_TIME_T,
    pycurl.CONNECT_TIME_T,
    pycurl.APPCONNECT_TIME_T,
    pycurl.PRETRANSFER_TIME_T,
    pycurl.STARTTRANSFER_TIME_T,
    pycurl.TOTAL_TIME_T,
)


def _timings(times: list[int], *, reached: bool) -> Timings:
    looked_up, connected, secured, ready, first_byte, total = times
    return Timings(
        lookup=looked_up or None,
        connect=connected - looked_up if connected > looked_up else None,
        tls=secured - connected if secured > connected else None,
        wait=first_byte - ready if reached and first_byte > ready else None,
        total=total,
    )


def _why_unresolved(host: str) -> str:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return _RESOLVER.get(error.errno or 0, "dns_failed")
    except (OSError, ValueError):
        pass
    return "dns_failed"  # by now it may have come back


@functools.lru_cache(maxsize=10_000)
def _target(url: str) -> str:
    """What the request line says of a URL, byte for byte; libcurl would rewrite dots and percent-encodings."""
    found = _AUTHORITY.match(url)
    target = url[found.end() :].partition("#")[0] if found else ""
    return target if target.startswith("/") else f"/{target}"


def _parse_head(lines: list[bytes]) -> tuple[str, list[str], bool]:
    """The status line and the header lines of the last response, and whether its head is complete.

    Interim responses (1xx) may come before it, and the trailers of a chunked body after it.
    """
    text = b"".join(lines).decode("latin-1").replace("\r\n", "\n").replace("\0", "\ufffd")
    blocks = text.split("\n\n")
    last = max((number for number, block in enumerate(blocks) if block.startswith("HTTP/")), default=0)
    status_line, *headers = blocks[last].rstrip("\n").split("\n")
    return status_line, [line[:HEADER_CHARS] for line in headers[:HEADER_LINES]], last < len(blocks) - 1


def _not_http(handle: _Handle) -> str:
    """What is to say of an answer that does not begin with a status line."""
    if not handle.foreign:
        return ""
    if _TLS_RECORD.match(handle.foreign):
        return "The receiver speaks TLS on this port. Set the URL to https"
    kept = handle.foreign[: handle.request.keep_bytes]
    return f"The answer is not HTTP; it begins with {kept!r}" if kept else "The answer is not HTTP"


def _way_out(url: str, headers: Sequence[str]) -> str:
    """What is to say of a redirect, given the response's headers."""
    location = next((line[9:].strip() for line in headers if line.lower().startswith("location:")), "")
    if not location:
        return ""
    with contextlib.suppress(ValueError):  # of what is no URL; it is told as it came
        location = urljoin(url, location)
    return f"Redirects are not followed. Set the URL to {location}"


def _not_built(request: Request, error: Exception) -> Outcome:
    return Outcome(
        request=request,
        started_at=datetime.now(UTC),
        status=None,
        error="invalid_header" if isinstance(error, _InvalidHeader) else "invalid_url",
        detail=(str(error) if isinstance(error, _InvalidHeader) else f"the request cannot be built: {error}")[:300],
        address=None,
        timings=Timings(None, None, None, None, 0),
        headers=[],
        body=b"",
        truncated=False,
    )
