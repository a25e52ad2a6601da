"""A receiver in Django, as a project in one file: `python django_app.py`.

In a project of yours: "webhookhub.receiver_django" in INSTALLED_APPS, `manage.py migrate`, and the line of urlpatterns.
"""

import os
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIServer, make_server

import django
from django.conf import settings
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application
from django.urls import path

settings.configure(
    ALLOWED_HOSTS=["127.0.0.1"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ.get("WEBHOOK_STORE", "webhooks.sqlite3"),
            "ATOMIC_REQUESTS": True,
        }
    },
    INSTALLED_APPS=["webhookhub.receiver_django"],
    ROOT_URLCONF=__name__,
    SECRET_KEY=os.urandom(16).hex(),
)
django.setup()

from webhookhub.receiver import Message, Receiver  # noqa: E402
from webhookhub.receiver_django.store import DjangoStore  # noqa: E402
from webhookhub.receiver_django.views import webhook_view  # noqa: E402


def handle(message: Message) -> None:
    """Processes a message once; what it raises is answered 500, and the sender tries again."""
    print("processed", message.key, message.body.decode(), flush=True)


receiver = Receiver(os.environ["WEBHOOK_SECRET"], handle, DjangoStore())
urlpatterns = [path("", webhook_view(receiver))]


class ThreadedServer(ThreadingMixIn, WSGIServer):
    """A thread for each request."""

    daemon_threads = True


if __name__ == "__main__":
    call_command("migrate", verbosity=0)
    port = int(os.environ.get("PORT", "9000"))
    with make_server("127.0.0.1", port, get_wsgi_application(), server_class=ThreadedServer) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        server.serve_forever()
