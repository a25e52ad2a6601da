"""The receiver kit behind web frameworks: WSGI, Django's view, and the examples of clients/python as they are."""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest
import requests
from django.http import HttpResponse
from django.test import RequestFactory

from endpoints.signing import SCHEMES, generate_secret
from webhookhub.receiver import Receiver, Response
from webhookhub.receiver_django.views import webhook_view
from webhookhub.stores import MemoryStore

CLIENT = Path(__file__).parent.parent / "clients" / "python"
SECRET = generate_secret()
BODY = b'{"n": 1.10}'
NOW = 1_768_478_400


def signed(message_id="evt_1", body=BODY, timestamp=NOW, **more):
    scheme = SCHEMES["standard-webhooks"]
    return dict(line.split(": ", 1) for line in scheme(message_id, timestamp, body, [scheme.parse_secret(SECRET)]))


@pytest.fixture
def receiver():
    answers = {b"created": Response(201, b"{}", "application/json"), b"none": 204, b"odd": 599, b"odder": 299}
    return Receiver(
        SECRET, lambda message: answers.get(message.body), MemoryStore(), max_body=1000, wait=0, now=lambda: NOW
    )


@pytest.fixture
def send(request, receiver):
    """Sends by WSGI or to the Django view: status and headers, body."""

    def by_wsgi(method="POST", body=BODY, headers=None):
        environ = {"REQUEST_METHOD": method, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        environ["QUERY_STRING"] = ""
        setup_testing_defaults(environ)
        environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in (headers or {}).items()}
        started = []
        answer = validator(receiver.wsgi)(environ, lambda *args: started.append(args) or (lambda _: None))
        content = b"".join(answer)
        answer.close()
        return int(started[0][0].split()[0]), dict(started[0][1]), content

    def to_django(method="POST", body=BODY, headers=None):
        made = RequestFactory().generic(method, "/", body, "application/json", headers=headers)
        answer = webhook_view(receiver)(made)
        assert isinstance(answer, HttpResponse)
        return answer.status_code, dict(answer.headers), answer.content

    return {"wsgi": by_wsgi, "django": to_django}[request.param]


each_way = pytest.mark.parametrize("send", ["wsgi", "django"], indirect=True)


@each_way
def test_a_response_arrives_as_it_is_and_again(send):
    for _ in range(2):
        status, headers, body = send(body=b"created", headers=signed(body=b"created"))
        assert (status, headers["Content-Type"], headers["Content-Length"], body) == (
            201,
            "application/json",
            "2",
            b"{}",
        )


@each_way
@pytest.mark.parametrize(("text", "status"), [(b"none", 204), (b"odd", 599), (b"odder", 299)])
def test_statuses_without_a_body_or_a_name_arrive_too(send, text, status):
    if status != 204:
        assert send(body=text, headers=signed(body=text))[0] == status
    else:
        assert "Content-Length" not in send(body=text, headers=signed(body=text))[1]


@each_way
def test_what_does_not_verify_is_answered_400(send):
    status, _, body = send(headers=signed(body=b"other"))
    assert (status, b"no signature fits" in body) == (400, True)


@each_way
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_only_post_is_taken(send, method):
    status, headers, _ = send(method, headers=signed())
    assert (status, headers["Allow"]) == (405, "POST")


@each_way
def test_a_large_body_is_answered_413(send):
    assert send(body=b"x" * 1001)[0] == 413
    assert send(body=b"x" * 1000, headers=signed(body=b"x" * 1000))[0] == 200


@pytest.mark.parametrize(("length", "status"), [("5000000000", 413), ("-1", 400), ("", 400)])
def test_no_more_than_the_limit_is_read_whatever_length_is_said(receiver, length, status):
    class Endless:
        def read(self, size):
            assert 0 <= size <= 1001
            return b"x" * size

    environ = {"REQUEST_METHOD": "POST", "wsgi.input": Endless(), "CONTENT_LENGTH": length}
    started = []
    receiver.wsgi(environ, lambda *args: started.append(args[0]))
    assert started[0].startswith(str(status))


def test_a_body_without_a_length_is_read_where_the_server_ends_it(receiver):
    environ = {"REQUEST_METHOD": "POST", "wsgi.input": io.BytesIO(BODY), "wsgi.input_terminated": True}
    environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in signed().items()}
    started = []
    receiver.wsgi(environ, lambda *args: started.append(args[0]))
    assert started == ["200 OK"]


def test_the_django_view_is_outside_of_csrf_checks_and_of_the_requests_transaction(receiver):
    view = webhook_view(receiver)
    assert view.csrf_exempt
    assert view._non_atomic_requests == {"default"}


# --- The examples


@pytest.fixture(params=["wsgi", "flask", "django"])
def example(request, tmp_path):
    """An example as a process of its own, with its first line, and what else it has printed when it has ended."""
    process = subprocess.Popen(
        [sys.executable, CLIENT / "examples" / f"{request.param}_app.py"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(CLIENT), "WEBHOOK_SECRET": SECRET, "PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield process
    process.kill()
    process.communicate(timeout=10)


def test_an_example_processes_copies_once_and_refuses_what_it_must(example):
    import time

    url = example.stdout.readline().strip()
    headers = signed(timestamp=int(time.time())) | {"Idempotency-Key": "key-1", "Content-Type": "application/json"}
    statuses = []
    together = threading.Barrier(4)

    def send():
        together.wait(10)
        statuses.append(requests.post(url, BODY, headers=headers, timeout=10).status_code)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert statuses == [200] * 4
    assert requests.post(url, BODY + b" ", headers=headers, timeout=10).status_code == 400
    assert requests.get(url, timeout=10).status_code == 405
    example.kill()
    assert example.stdout.read() == 'processed key-1 {"n": 1.10}\n'
