"""Loaded before Django's settings are: gives the tests embedded servers of their own, unless URLs are given."""

import os
from pathlib import Path

from webhookhub import embedded

os.environ.setdefault("WEBHOOKHUB_VAR", str(Path(__file__).resolve().parent.parent / "var" / "test"))
# Receivers of tests are on loopback and speak plain HTTP.
os.environ["ALLOWED_NETWORKS"] = "127.0.0.0/8"
os.environ["ALLOW_HTTP"] = "1"

_servers = embedded.servers()
_servers.__enter__()


def pytest_unconfigure() -> None:
    """Stops the servers that this run started."""
    _servers.__exit__(None, None, None)
