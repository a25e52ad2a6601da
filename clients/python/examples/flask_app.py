"""A receiver in Flask: `flask --app flask_app run --port 9000`."""

import os

from flask import Flask, Response, request

from webhookhub.receiver import Message, Receiver
from webhookhub.stores import SqliteStore

app = Flask(__name__)


def handle(message: Message) -> None:
    """Processes a message once; what it raises is answered 500, and the sender tries again."""
    print("processed", message.key, message.body.decode(), flush=True)


store = SqliteStore(os.environ.get("WEBHOOK_STORE", "webhooks.sqlite3"))
receiver = Receiver(os.environ["WEBHOOK_SECRET"], handle, store)


@app.post("/")
def webhook() -> Response:
    """Reads one byte more than is allowed, so that the receiver sees what is too large."""
    response = receiver.receive(request.stream.read(receiver.max_body + 1), request.headers)
    return Response(response.body, response.status, response.headers)


if __name__ == "__main__":
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", int(os.environ.get("PORT", "9000")), app, threaded=True)
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()
