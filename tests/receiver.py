"""A receiver on loopback, under a test's control down to the bytes of its answers."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from django.db import connection


@dataclass
class Received:
    """A request as it came over the wire."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    at: float = field(default_factory=time.time)

    def header(self, name: str) -> str | None:
        """The value of a header, by its name in any case."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


# What a connection does with a request: returns the answer's bytes, or pieces of them with pauses (seconds) between.
Answer = bytes | Iterable[bytes | float]


def answer(status: int = 200, *lines: str, body: bytes = b"") -> bytes:
    """A plain answer that keeps the connection open."""
    return "\r\n".join([f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *lines, "", ""]).encode() + body


class Receiver:
    """Accepts connections, keeps what it received, and answers by `respond`, a function or a fixed answer.

    An answer of `b""` closes the connection. `close_after` closes it after each answer. With `tls` it speaks https.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.received: list[Received] = []
        self.connections = 0
        self.respond: Answer | Callable[[Received], Answer] = answer()
        self.close_after = False
        self._server = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._server.getsockname()[1]
        self._tls = tls
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}/hook"
        self._stopped = threading.Event()

    def __enter__(self) -> "Receiver":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._server.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls:
            try:
                connection = self._tls.wrap_socket(connection, server_side=True)
            except OSError:
                return  # the sender did not like our certificate
        with connection, connection.makefile("rb") as stream:
            while (received := self._read(stream)) is not None:
                self.received.append(received)
                reply = self.respond(received) if callable(self.respond) else self.respond
                try:
                    if not reply or not self._write(connection, reply) or self.close_after:
                        return
                except OSError:
                    return  # the sender has gone

    @staticmethod
    def _read(stream) -> Received | None:
        try:
            line = stream.readline()
            if not line:
                return None
            headers = []
            while raw := stream.readline().decode("latin-1").rstrip("\r\n"):
                name, _, value = raw.partition(":")
                headers.append((name, value.strip()))
            length = int({name.lower(): value for name, value in headers}.get("content-length", 0))
            return Received(line.decode("latin-1").strip(), headers, stream.read(length))
        except OSError:
            return None

    def _write(self, connection: socket.socket, reply: Answer) -> bool:
        for piece in [reply] if isinstance(reply, bytes) else reply:
            if isinstance(piece, bytes):
                connection.sendall(piece)
            elif self._stopped.wait(piece):
                return False
        return True


def in_receiver(action: Callable[[], object], reply: bytes) -> Callable[[Received], bytes]:
    """An answer before which the receiver's thread does something to the database, on a connection of its own."""

    def respond(_: Received) -> bytes:
        try:
            action()
        finally:
            connection.close()
        return reply

    return respond
