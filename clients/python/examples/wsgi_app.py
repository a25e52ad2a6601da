"""A receiver without a framework: `python wsgi_app.py`, or any WSGI server with `wsgi_app:application`."""

import os
from wsgiref.simple_server import make_server

from webhookhub.receiver import Message, Receiver
from webhookhub.stores import SqliteStore


def handle(message: Message) -> None:
    """Processes a message once; what it raises is answered 500, and the sender tries again."""
    print("processed", message.key, message.body.decode(), flush=True)


store = SqliteStore(os.environ.get("WEBHOOK_STORE", "webhooks.sqlite3"))
receiver = Receiver(os.environ["WEBHOOK_SECRET"], handle, store)
application = receiver.wsgi

if __name__ == "__main__":
    with make_server("127.0.0.1", int(os.environ.get("PORT", "9000")), application) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        server.serve_forever()
