"""`manage.py receive`: a receiver to develop against, made with the receiver kit (clients/python)."""

import argparse
import threading
import time
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection

import webhookhub.receiver as kit
from endpoints.contracts import CONTRACTS
from endpoints.encryption import Unreadable
from endpoints.models import Endpoint
from endpoints.services import verifying_secrets
from endpoints.signing import SCHEMES, SecretError
from webhookhub.ids import parse_typeid
from webhookhub.stores import MemoryStore


class Command(BaseCommand):
    """Prints each request that verifies, and misbehaves as it is told."""

    help = "Receives webhooks on loopback: prints each request, verified or repeated or not, and answers as it is told."

    def add_arguments(self, parser: CommandParser) -> None:
        """The switches."""
        parser.add_argument("--port", type=int, default=8001, help="port on 127.0.0.1 (default 8001)")
        key = parser.add_mutually_exclusive_group()
        key.add_argument("--secret", action="append", help="to verify with; may be given several times")
        key.add_argument("--endpoint", help="ep_... whose secrets in the database verify (default: by the port)")
        parser.add_argument(
            "--scheme", choices=SCHEMES, default="standard-webhooks", help="how --secret signs (default %(default)s)"
        )
        parser.add_argument("--status", type=int, default=200, help="answer with this status (default 200)")
        parser.add_argument(
            "--header", action="append", default=[], help="add this line to the answer: 'Retry-After: 30'"
        )
        parser.add_argument("--wait", type=float, default=0, metavar="SECONDS", help="answer after this long")
        parser.add_argument(
            "--drip", type=float, metavar="SECONDS", help="send the answer's head a byte at a time, so far apart"
        )
        parser.add_argument("--hang", action="store_true", help="never answer")
        parser.add_argument("--close", action="store_true", help="close the connection without an answer")
        parser.add_argument("--quiet", action="store_true", help="print a count now and then, not the requests")

    def handle(self, *args: Any, **options: Any) -> None:
        """Serves until it is stopped."""
        try:
            server = Receiver(argparse.Namespace(**options), self._say)
        except (OSError, ValueError) as error:
            raise CommandError(f"cannot receive on port {options['port']}: {error}") from error
        self._say(f"receiving on http://127.0.0.1:{server.server_port}/")
        server.serve_forever()

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()  # also into a pipe


class Receiver(ThreadingHTTPServer):
    """The receiver, with its switches."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, switches: argparse.Namespace, say: Any) -> None:
        self.switches = switches
        self.say = say
        self.count = 0
        self.lock = threading.Lock()
        self.stores: defaultdict[str, MemoryStore] = defaultdict(MemoryStore)  # one for each endpoint
        self.kits = [self._kit("", switches.secret, switches.scheme)] if switches.secret else []
        super().__init__(("127.0.0.1", switches.port), Handler)

    def receive(self, body: bytes, headers: dict[str, str]) -> tuple[kit.Message | None, kit.Response]:
        """The message, None if it does not verify, and the answer.

        Secrets are read again when none of them has signed it, for they may have been rotated.
        """
        found = self._open(body, headers)
        if not found and not self.switches.secret:
            self.kits = self._look_up()
            found = self._open(body, headers)
        if not found:
            return None, kit.Response(401)
        receiver, message = found
        return message, receiver.process(message)

    def _open(self, body: bytes, headers: dict[str, str]) -> tuple[kit.Receiver, kit.Message] | None:
        for receiver in self.kits:
            with suppress(kit.VerificationError):
                return receiver, receiver.open(body, headers)
        return None

    def _look_up(self) -> list[kit.Receiver]:
        if self.switches.endpoint:
            found = Endpoint.objects.filter(pk=parse_typeid(Endpoint.prefix, self.switches.endpoint))
        else:
            found = Endpoint.objects.filter(url__contains=f":{self.server_port}/")
        try:
            return [one for endpoint in found if (one := self._kit_of(endpoint))]
        finally:
            connection.close()  # each connection to this server has a thread, and would keep one of its own

    def _kit_of(self, endpoint: Endpoint) -> kit.Receiver | None:
        contract = CONTRACTS.get(endpoint.contract)
        if contract is None:
            self.say(f"{endpoint.typeid} follows {endpoint.contract}, a contract that is not known here: not verified")
            return None
        try:
            secrets = verifying_secrets(endpoint)
        except (Unreadable, SecretError) as error:
            self.say(f"{endpoint.typeid} has a secret that cannot be used: not verified ({error})")
            return None
        return self._kit(endpoint.typeid, secrets, contract.signature) if secrets else None

    def _kit(self, name: str, secrets: list[str], scheme: str) -> kit.Receiver:
        return kit.Receiver(secrets, lambda _: self.switches.status, self.stores[name], scheme=scheme)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Receiver

    def do_POST(self) -> None:
        """Reads, verifies, prints, and answers or does not."""
        switches = self.server.switches
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        message, response = self.server.receive(body, headers)
        self._print(body, headers, message, response)
        if switches.hang:
            threading.Event().wait()
        if switches.close:
            self.close_connection = True
            return
        time.sleep(switches.wait)
        self._answer(response.status)

    def _print(self, body: bytes, headers: dict[str, str], message: kit.Message | None, response: kit.Response) -> None:
        with self.server.lock:
            self.server.count += 1
            if not self.server.switches.quiet:
                mark = "NOT VERIFIED" if message is None else "repeated" if response.repeated else "verified"
                message_id = headers.get("webhook-id") if message is None else message.message_id
                shown = body[:2_000].decode("utf-8", "backslashreplace")
                self.server.say(f"{mark} {message_id} {len(body)} bytes {shown}")
            elif self.server.count % 1_000 == 0:
                self.server.say(f"{self.server.count} requests")

    def _answer(self, status: int) -> None:
        lines = [f"HTTP/1.1 {status} .", "Content-Length: 0", *self.server.switches.header, "", ""]
        head = "\r\n".join(lines).encode()
        try:
            if self.server.switches.drip is None:
                self.wfile.write(head)
                return
            for byte in head:
                self.wfile.write(bytes([byte]))
                time.sleep(self.server.switches.drip)
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: `_print` says what there is to say."""
