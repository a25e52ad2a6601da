"""The receiver kit, loaded from its file: its package has the name of the server's own."""

import importlib.util
from pathlib import Path

_FILE = Path(__file__).resolve().parents[1] / "clients" / "python" / "webhookhub" / "receiver.py"
_spec = importlib.util.spec_from_file_location("webhookhub_receiver", _FILE)
receiver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(receiver)

SecretError, VerificationError = receiver.SecretError, receiver.VerificationError
Verified, verify = receiver.Verified, receiver.verify
