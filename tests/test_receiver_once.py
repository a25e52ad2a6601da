"""The receiver kit processes a message once: keys and ids, what is stored and for how long, copies at one time."""

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test import override_settings

from endpoints.signing import SCHEMES, generate_secret
from webhookhub.receiver import Message, Receiver, Response, SecretError, VerificationError
from webhookhub.stores import Held, MemoryStore, SqliteStore

NOW = 1_768_478_400
HOUR = 3600
SECRET = generate_secret()
BODY = b'{"n":1.10}'
DJANGO = pytest.param("django", marks=pytest.mark.django_db(transaction=True))
KEY = "8e03978e-40d5-43dd-bc93-6894a57f9324"


class Clock:
    """Stands still until it is set, or slept by."""

    def __init__(self) -> None:
        self.time = float(NOW)

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def django_table(django_db_setup, django_db_blocker):
    """The Django app of the kit, in the tests' PostgreSQL."""
    from django.conf import settings

    with (
        django_db_blocker.unblock(),
        override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, "webhookhub.receiver_django"]),
    ):
        call_command("migrate", "webhookhub_receiver", verbosity=0)
        call_command("makemigrations", "webhookhub_receiver", check=True, dry_run=True, verbosity=0)
        yield
        call_command("migrate", "webhookhub_receiver", "zero", verbosity=0)


@pytest.fixture(params=["memory", "sqlite", DJANGO])
def store(request, clock, tmp_path):
    if request.param == "memory":
        return MemoryStore(now=clock)
    if request.param == "sqlite":
        return SqliteStore(tmp_path / "seen.sqlite3", now=clock)
    request.getfixturevalue("django_table")
    from webhookhub.receiver_django.store import DjangoStore

    return DjangoStore(now=clock)


@dataclasses.dataclass
class Handler:
    """Keeps what it was given; `answer` is what it returns, raises, or a function of the message."""

    messages: list[Message] = dataclasses.field(default_factory=list)
    answer: object = None

    def __call__(self, message):
        self.messages.append(message)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(message) if isinstance(self.answer, Callable) else self.answer


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def make(clock, store, handler):
    def make_receiver(**options):
        return Receiver(SECRET, handler, store, **{"now": clock, "sleep": clock.sleep, "wait": 0} | options)

    return make_receiver


def signed(clock, message_id="evt_1", *, scheme="standard-webhooks", body=BODY, key=None, **more):
    keys = [SCHEMES[scheme].parse_secret(SECRET)]
    headers = dict(line.split(": ", 1) for line in SCHEMES[scheme](message_id, int(clock.time), body, keys))
    return headers | ({} if key is None else {"Idempotency-Key": key}) | more


# --- What is processed, stored and repeated


def test_an_unseen_message_is_processed_with_all_that_the_handler_needs(make, handler, clock):
    assert make().receive(BODY, signed(clock, key=KEY)) == Response(200)
    [message] = handler.messages
    assert message[:4] == (KEY, "evt_1", NOW, BODY)
    assert message.headers["idempotency-key"] == KEY


def test_a_seen_message_gets_the_stored_response_and_is_not_processed(make, handler, clock):
    handler.answer = Response(201, b'{"booked":\xff}', "application/json")
    first = make().receive(BODY, signed(clock, key=KEY))
    handler.answer = 404
    clock.sleep(30)
    again = make().receive(BODY, signed(clock, key=KEY))
    assert first == Response(201, b'{"booked":\xff}', "application/json")
    assert again == first._replace(repeated=True)
    assert len(handler.messages) == 1


@pytest.mark.parametrize(("answer", "status"), [(None, 200), (202, 202), (404, 404), (422, 422), (301, 301)])
def test_what_ends_a_delivery_is_stored(make, handler, clock, answer, status):
    handler.answer = answer
    answers = [make().receive(BODY, signed(clock)) for _ in range(2)]
    assert [one.status for one in answers] == [status, status]
    assert len(handler.messages) == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 502, 503, 504, 599])
def test_what_the_sender_tries_again_after_is_not_stored(make, handler, clock, status):
    handler.answer = Response(status, retry_after=7)
    assert make().receive(BODY, signed(clock)).headers["Retry-After"] == "7"
    handler.answer = 200
    assert make().receive(BODY, signed(clock)) == Response(200)
    assert len(handler.messages) == 2


def test_a_handler_that_raises_leaves_nothing_stored(make, handler, clock):
    handler.answer = RuntimeError("no disk")
    with pytest.raises(RuntimeError, match="no disk"):
        make().receive(BODY, signed(clock))
    handler.answer = None
    assert make().receive(BODY, signed(clock)) == Response(200)


def test_a_request_that_does_not_verify_is_answered_400_and_forgotten(make, handler, clock):
    answer = make().receive(BODY + b" ", signed(clock))
    assert answer.status == 400
    assert b"no signature fits" in answer.body
    assert not handler.messages
    assert make().receive(BODY, signed(clock)) == Response(200)


def test_other_messages_are_processed_beside_it(make, handler, clock):
    for number in range(3):
        make().receive(BODY, signed(clock, f"evt_{number}", key=f"key-{number}"))
    assert len(handler.messages) == 3


# --- Keys and ids


@pytest.mark.parametrize("key", [f'"{KEY}"', f"  {KEY}\t", f' "{KEY}" '])
def test_a_key_is_the_same_quoted_and_bare(make, handler, clock, key):
    make().receive(BODY, signed(clock, "evt_1", key=KEY))
    assert make().receive(BODY, signed(clock, "evt_2", key=key)).repeated
    assert handler.messages[0].key == KEY


def test_escapes_in_a_quoted_key_are_read(make, handler, clock):
    make().receive(BODY, signed(clock, key=r'"a\"b\\c d"'))
    assert handler.messages[0].key == r'a"b\c d'


@pytest.mark.parametrize("key", ['"open', 'a"b', "a,b", "a b", '"a\\b"', "é", '"é"', "x" * 256])
def test_what_is_no_key_is_answered_400(make, handler, clock, key):
    assert make().receive(BODY, signed(clock, key=key)).status == 400
    assert not handler.messages


@pytest.mark.parametrize("key", ["", '""'])
def test_without_a_key_the_message_id_is_the_key(make, handler, clock, key):
    make().receive(BODY, signed(clock))
    assert make().receive(BODY, signed(clock, key=key)).repeated
    assert handler.messages[0].key == "evt_1"


def test_a_captured_request_with_another_key_is_known_by_its_signed_id(make, handler, clock):
    captured = signed(clock, key=KEY)
    make().receive(BODY, captured)
    assert make().receive(BODY, captured | {"Idempotency-Key": "another"}).repeated
    del captured["Idempotency-Key"]
    assert make().receive(BODY, captured).repeated
    assert len(handler.messages) == 1


def test_the_key_of_a_captured_request_is_not_taken_from_the_message_that_has_it(make, handler, clock):
    captured = signed(clock, "evt_1", key=KEY)
    make().receive(BODY, captured)
    assert make().receive(BODY, captured | {"Idempotency-Key": "key-2"}).repeated
    assert not make().receive(BODY, signed(clock, "evt_2", key="key-2")).repeated
    assert len(handler.messages) == 2


def test_a_key_is_not_taken_for_an_id(make, handler, clock):
    make().receive(BODY, signed(clock, "evt_1", key="evt_2"))
    assert not make().receive(BODY, signed(clock, "evt_2")).repeated


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_of_the_sender_is_verified_and_its_id_known(scheme, clock):
    handler = Handler()
    receiver = Receiver(SECRET, handler, MemoryStore(), scheme=scheme, now=clock)
    assert receiver.receive(BODY, signed(clock, "evt_9", scheme=scheme)) == Response(200)
    assert receiver.receive(BODY, signed(clock, "evt_9", scheme=scheme)).repeated
    assert [(message.key, message.message_id) for message in handler.messages] == [("evt_9", "evt_9")]
    assert receiver.receive(BODY + b"x", signed(clock, "evt_8", scheme=scheme)).status == 400


def test_the_signed_id_inside_a_cloud_event_counts_where_the_header_is_not_signed(clock):
    handler = Handler()
    receiver = Receiver(SECRET, handler, MemoryStore(), scheme="elicitra", now=clock)
    body = json.dumps({"specversion": "1.0", "id": "evt_7"}).encode()
    kind = {"Content-Type": "application/cloudevents+json; charset=utf-8"}
    receiver.receive(body, signed(clock, scheme="elicitra", body=body, **kind))
    captured = signed(clock, "evt_other", scheme="elicitra", body=body, key="another", **kind)
    assert receiver.receive(body, captured).repeated
    assert handler.messages[0].message_id == "evt_7"


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"id":7}', '{"id":"\u00e9"}'.encode(), b"[" * 100_000])
def test_a_cloud_event_without_a_usable_id_is_known_by_the_header(clock, body):
    handler = Handler()
    receiver = Receiver(SECRET, handler, MemoryStore(), scheme="elicitra", now=clock)
    kind = {"content-type": "application/cloudevents+json"}
    receiver.receive(body, signed(clock, "evt_6", scheme="elicitra", body=body, **kind))
    assert handler.messages[0].message_id == "evt_6"


def test_a_request_with_neither_key_nor_id_is_answered_400(clock):
    handler = Handler()
    receiver = Receiver(SECRET, handler, MemoryStore(), scheme="github-like", now=clock)
    headers = signed(clock, scheme="github-like")
    del headers["webhook-id"]
    answer = receiver.receive(BODY, headers)
    assert (answer.status, b"neither" in answer.body) == (400, True)
    assert not handler.messages
    assert receiver.receive(BODY, headers | {"idempotency-key": KEY}) == Response(200)


# --- Signatures in lists of several


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("v1,", 400),
        ("{right:.20}", 400),
        ("v2,x {right}", 200),
        ("{wrong}  {right}", 200),
        ("{wrong} {wrong} {right}", 200),
        ("{wrong}", 400),
    ],
)
def test_the_right_signature_counts_wherever_it_stands_in_the_list(clock, line, status):
    right = signed(clock)["webhook-signature"]
    wrong = signed(clock, "evt_2")["webhook-signature"]
    handler = Handler()
    receiver = Receiver(SECRET, handler, MemoryStore(), now=clock)
    headers = signed(clock, **{"webhook-signature": line.format(right=right, wrong=wrong)})
    assert receiver.receive(BODY, headers).status == status
    assert len(handler.messages) == (status == 200)


# --- How long


def test_a_key_is_known_for_72_hours_from_when_it_was_stored_and_not_after(make, handler, clock):
    handler.answer = lambda _: clock.sleep(50)  # processing takes a while
    make().receive(BODY, signed(clock, key=KEY))
    clock.time = NOW + 50 + 72 * HOUR  # a sender that counts from there may still replay
    assert make().receive(BODY, signed(clock, key=KEY)).repeated
    clock.time += 0.001
    assert not make().receive(BODY, signed(clock, key=KEY)).repeated
    assert len(handler.messages) == 2


def test_a_message_of_a_process_that_died_is_processed_when_its_lease_has_run_out(make, handler, clock, store):
    message = make().open(BODY, signed(clock, key=KEY))
    assert store.claim(message.names, "of a process that dies", lease=60) is None
    clock.sleep(60)
    assert make().process(message).status == 409
    clock.sleep(0.001)
    assert make().process(message) == Response(200)


def test_one_whose_lease_ran_out_still_stores_what_it_answered(make, handler, clock, store):
    def slow(message):
        clock.sleep(61)
        assert store.claim(["id:evt_1"], "another", lease=60) is None
        return 202

    handler.answer = slow
    assert make().receive(BODY, signed(clock)).status == 202
    store.release(["id:evt_1"], "another")  # which came to nothing
    handler.answer = 500
    assert make().receive(BODY, signed(clock))[::4] == (202, True)


def test_one_whose_lease_ran_out_does_not_release_the_claim_of_another(make, handler, clock, store):
    def slow(message):
        clock.sleep(61)
        assert store.claim(["id:evt_1"], "another", lease=60) is None
        return 500

    handler.answer = slow
    make().receive(BODY, signed(clock))
    assert store.claim(["id:evt_1"], "third", lease=60) == Held(None)


def test_what_has_expired_is_removed(store, clock):
    count = {
        "MemoryStore": lambda: len(store),
        "SqliteStore": lambda: _count_sqlite(store),
        "DjangoStore": lambda: store._rows.count(),
    }[type(store).__name__]
    for number in range(8):
        store.claim([f"id:{number}"], "x", lease=60)
        store.keep([f"id:{number}"], Response(), seconds=100)
    assert count() == 8
    clock.sleep(101)
    store.claim(["id:new"], "x", lease=60)
    assert count() == 1


def _count_sqlite(store):
    with store._transaction() as database:
        return database.execute("SELECT count(*) FROM seen").fetchone()[0]


# --- Copies at one time


def test_of_copies_at_once_one_is_processed_and_the_others_get_its_answer(make, handler, clock):
    copies = 6
    together = threading.Barrier(copies)

    def answer(_):
        threading.Event().wait(0.02)
        return Response(201, b"one")

    handler.answer = answer
    receiver = make(wait=1_000.0, sleep=lambda _: threading.Event().wait(0.002))
    answers = []

    def send(key):
        together.wait(10)
        try:
            answers.append(receiver.receive(BODY, signed(clock, key=key)))
        finally:
            connections.close_all()

    # Some with other keys: the signed id makes them copies too.
    threads = [threading.Thread(target=send, args=[KEY if number % 2 else f"k{number}"]) for number in range(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(handler.messages) == 1
    assert [(one.status, one.body) for one in answers] == [(201, b"one")] * copies
    assert sorted(one.repeated for one in answers) == [False] + [True] * (copies - 1)


def test_a_copy_that_has_waited_long_enough_gets_409_with_retry_after(make, handler, clock):
    inner = []
    handler.answer = lambda _: inner.append(make(wait=10).receive(BODY, signed(clock, key=KEY)))
    assert make().receive(BODY, signed(clock, key=KEY)) == Response(200)
    assert inner[0].status == 409
    assert inner[0].headers["Retry-After"] == "5"
    assert 10 <= clock.time - NOW < 10.1
    assert len(handler.messages) == 1


def test_a_copy_that_waits_processes_the_message_when_the_first_fails(make, handler, clock, store):
    message = make().open(BODY, signed(clock, key=KEY))
    store.claim(message.names, "first", lease=60)
    receiver = make(wait=10, sleep=lambda _: store.release(message.names, "first"))
    assert receiver.process(message) == Response(200)
    assert len(handler.messages) == 1


def test_a_store_in_memory_looks_and_claims_in_one_step():
    class Slow(dict):
        def get(self, name):
            found = super().get(name)
            threading.Event().wait(0.005)  # long enough for another thread to look, too
            return found

    store = MemoryStore()
    store.claim([], "", lease=0)  # prunes, which makes a new dict
    store._entries = Slow()
    claims = []
    threads = [
        threading.Thread(target=lambda: claims.append(store.claim(["id:evt_1"], "x", lease=60))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(claims, key=bool) == [None, Held(None), Held(None)]


def test_copies_in_several_processes_are_processed_once(tmp_path):
    program = """if True:
        import sys
        from webhookhub.receiver import Message, Receiver
        from webhookhub.stores import SqliteStore
        def handle(message):
            with open("processed", "a") as file:
                file.write("x")
        receiver = Receiver(sys.argv[1], handle, SqliteStore("seen.sqlite3"))
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(20):
            message = Message(f"key-{number}", f"evt_{number}", 0, b"", {})
            assert receiver.process(message).status == 200
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, SECRET],
            cwd=tmp_path,
            env={"PYTHONPATH": "/".join([*__file__.split("/")[:-2], "clients/python"])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert (tmp_path / "processed").read_text() == "x" * 20


# --- Mistakes of the caller, and Django's transactions


def test_an_unusable_secret_or_scheme_is_said_at_the_start():
    with pytest.raises(SecretError, match="at least 24"):
        Receiver("whsec_AAAA", Handler(), MemoryStore())
    with pytest.raises(SecretError, match="no secret"):
        Receiver([], Handler(), MemoryStore())
    with pytest.raises(ValueError, match="unknown scheme"):
        Receiver(SECRET, Handler(), MemoryStore(), scheme="md5")


def test_the_secrets_may_come_from_a_generator(clock):
    receiver = Receiver((one for one in [generate_secret(), SECRET]), Handler(), MemoryStore(), now=clock)
    assert receiver.receive(BODY, signed(clock)) == Response(200)
    assert receiver.receive(BODY, signed(clock, "evt_2")) == Response(200)


def test_a_body_beyond_the_limit_is_answered_413_unread(clock):
    receiver = Receiver(SECRET, Handler(), MemoryStore(), max_body=10, now=clock)
    assert receiver.receive(b"x" * 11, {}).status == 413
    assert receiver.receive(BODY, signed(clock)) == Response(200)


def test_open_tells_why_a_request_is_refused(clock):
    receiver = Receiver(SECRET, Handler(), MemoryStore(), now=clock)
    with pytest.raises(VerificationError) as refused:
        receiver.open(BODY, {})
    assert refused.value.code == "missing_header"


@pytest.mark.parametrize("store", [DJANGO], indirect=True)
def test_a_claim_inside_a_transaction_is_refused(store):
    with pytest.raises(RuntimeError, match="durable"), transaction.atomic():
        store.claim(["id:evt_1"], "token", lease=60)
    assert not connection.in_atomic_block


@pytest.mark.parametrize("store", [DJANGO], indirect=True)
def test_the_handler_may_open_transactions_of_its_own(make, handler, clock, store):
    def handle(_):
        with transaction.atomic():
            raise ValueError

    handler.answer = handle
    with pytest.raises(ValueError):
        make().receive(BODY, signed(clock))
    assert store.claim(["id:evt_1"], "token", lease=60) is None
