"""The receiver kit pulls what the hub could not deliver; the hub here is a stub."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from endpoints.signing import SCHEMES, generate_secret
from tests.receiver import answer
from webhookhub import pull as pull_module
from webhookhub.pull import Pulled, PullError, pull
from webhookhub.receiver import Receiver
from webhookhub.stores import MemoryStore

NOW = 1_768_478_400
SECRET = generate_secret()
KEY = "whk_of_one_endpoint"


class Hub:
    """Answers GET /v1/replay in pages of two, and each event."""

    def __init__(self, server):
        self.server = server
        self.events = {}  # by id, oldest first: a body, or an answer's bytes

    def __call__(self, request):
        path = urlsplit(request.line.split()[1])
        if request.header("Authorization") != f"Bearer {KEY}":
            return answer(401, body=b'{"title":"no such key"}')
        if path.path != "/v1/replay":
            return self._event(path.path.removeprefix("/v1/replay/"))
        start = int(parse_qs(path.query).get("cursor", ["0"])[0])
        rows = [{"event_id": one, "state": "exhausted"} for one in list(self.events)[start : start + 2]]
        page = {"data": rows} | ({"next_cursor": str(start + 2)} if len(rows) == 2 else {})
        return answer(200, "Content-Type: application/json", body=json.dumps(page).encode())

    def _event(self, event_id):
        body = self.events[event_id]
        self.server.close_after = b"cut off" in body
        if body.startswith(b"HTTP"):
            return body
        lines = SCHEMES["standard-webhooks"](event_id, NOW, body, [SCHEMES["standard-webhooks"].parse_secret(SECRET)])
        return answer(200, "Content-Type: application/json", f"Idempotency-Key: key-{event_id}", *lines, body=body)


@pytest.fixture
def processed():
    return []


@pytest.fixture
def ours(processed):
    """Our receiver; it fails on events that say so."""

    def handle(message):
        if b"fail" in message.body:
            raise RuntimeError("as told")
        processed.append((message.key, message.body))
        return 422 if b"refuse" in message.body else None

    return Receiver(SECRET, handle, MemoryStore(), max_body=1000, now=lambda: NOW)


@pytest.fixture
def hub(receiver):
    """The stub's address, and its events."""
    receiver.respond = Hub(receiver)
    receiver.events = receiver.respond.events
    receiver.base = receiver.url.removesuffix("/hook")
    return receiver


def test_every_event_of_every_page_is_processed_oldest_first(hub, ours, processed):
    hub.events |= {f"evt_{number}": b'{ "n": %d.10 }' % number for number in range(5)}
    assert pull(hub.base + "/", KEY, ours) == Pulled([f"evt_{number}" for number in range(5)], [], [], [])
    assert processed == [(f"key-evt_{number}", b'{ "n": %d.10 }' % number) for number in range(5)]


def test_what_was_processed_before_is_not_processed_again(hub, ours, processed):
    hub.events |= {"evt_1": b"1"}
    pull(hub.base, KEY, ours)
    assert pull(hub.base, KEY, ours) == Pulled([], ["evt_1"], [], [])
    assert len(processed) == 1


def test_an_event_that_fails_stops_no_other(hub, ours, processed, caplog):
    hub.events |= {
        "evt_1": b"fail",
        "evt_2": answer(404),
        "evt_3": answer(410, body=b'{"status":410}'),
        "evt_4": answer(302, "Location: http://127.0.0.1:1/"),
        "evt_5": b"x" * 1001,
        "evt_6": answer(200, body=b"not signed"),
        "evt_7": b"HTTP/1.1 200 cut off\r\nContent-Length: 10\r\n\r\n123",
        "evt_8": b"refuse",
        "evt_9": b"fine",
    }
    failed = ["evt_1", "evt_2", "evt_4", "evt_5", "evt_6", "evt_7", "evt_8"]
    assert pull(hub.base, KEY, ours) == Pulled(["evt_9"], [], failed, ["evt_3"])
    assert [body for _, body in processed] == [b"refuse", b"fine"]
    assert all(f"event {event_id} failed" in caplog.text for event_id in failed)
    assert KEY not in caplog.text


def test_a_stored_refusal_is_no_success_the_second_time_either(hub, ours, processed):
    hub.events |= {"evt_1": b"refuse"}
    assert [pull(hub.base, KEY, ours).failed for _ in range(2)] == [["evt_1"], ["evt_1"]]
    assert len(processed) == 1


def test_a_wrong_key_is_said(hub, ours):
    with pytest.raises(PullError, match="answered 401.*no such key"):
        pull(hub.base, "whk_wrong", ours)


@pytest.mark.parametrize(
    ("list_answer", "reason"),
    [
        (answer(302, "Location: http://127.0.0.1:1/"), "answered 302"),
        (answer(200, body=b"<html>"), "not a list"),
        (answer(200, body=b'{"data": 1}'), "not a list"),
        (answer(200, body=b"[]"), "not a list"),
        (answer(200, body=b'{"data": [], "next_cursor": "0"}'), "does not go on"),
        (answer(200, body=b" " * (2**20 + 1)), "larger than 1048576 bytes"),
        (b"", "replay"),
    ],
)
def test_a_list_that_cannot_be_read_is_said(hub, ours, list_answer, reason):
    hub.respond = list_answer
    with pytest.raises(PullError, match=reason):
        pull(hub.base, KEY, ours)


def test_a_hub_that_does_not_answer_is_given_up(hub, ours, monkeypatch):
    monkeypatch.setattr(pull_module, "TIMEOUT", (1, 0.05))
    hub.respond = [1.0]
    with pytest.raises(PullError, match="timed out"):
        pull(hub.base, KEY, ours)


@pytest.mark.parametrize("url", ["http://hub.example.com", "http://10.0.0.1:8000", "http://127.0.0.1.example.com"])
def test_the_key_does_not_leave_this_machine_in_the_clear(ours, url):
    with pytest.raises(PullError, match="in the clear: use https"):
        pull(url, KEY, ours)


@pytest.mark.parametrize("url", ["hub.example.com", "ftp://hub.example.com", "https://", "file:///etc/passwd"])
def test_what_is_no_address_of_a_hub_is_said(ours, url):
    with pytest.raises(PullError, match="is not the address of a hub"):
        pull(url, KEY, ours)


def test_netrc_does_not_take_the_place_of_the_key(hub, ours, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    hub.events |= {"evt_1": b"1"}
    assert pull(hub.base, KEY, ours).processed == ["evt_1"]


def test_a_session_of_the_callers_is_used_and_left_open(hub, ours):
    import requests

    hub.events |= {"evt_1": b"1"}
    with requests.Session() as session:
        session.headers["X-From"] = "cron"
        pull(hub.base, KEY, ours, session=session)
        assert session.get(hub.base + "/v1/replay", timeout=5).status_code == 401
    assert hub.received[0].header("X-From") == "cron"
