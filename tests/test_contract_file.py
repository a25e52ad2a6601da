"""Contracts of the operator's own: what a file may say, and what is said of one that is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from endpoints.contract_file import ContractFileError, read_contracts
from endpoints.contracts import CONTRACTS, STANDARD, decide

GOOD = """
[patient]
base = "standard"
title = "Patient"
waits = [10, 60, 600]
jitter = 20
terminal = [400, "410-412"]
disable_on = 451
deadline = 5
keep_bytes = 0

[absolute]
base = "patient"
offsets = [60, 3600]
retry_after = {least = 60, most = 3600}

[deaf]
retry_after = false
"""


def test_a_contract_is_its_base_and_what_differs():
    found = read_contracts(GOOD, CONTRACTS)
    patient, absolute, deaf = found["patient"], found["absolute"], found["deaf"]
    assert (patient.name, patient.title, patient.max_attempts) == ("patient", "Patient", 4)
    assert [(step.nominal, step.least) for step in patient.steps] == [
        (10_000, 8_000),
        (60_000, 48_000),
        (600_000, 480_000),
    ]
    assert patient.terminal == {400, 410, 411, 412}
    assert patient.disable_on == {451}
    assert (patient.deadline, patient.keep_bytes, patient.read_bytes) == (5.0, 0, STANDARD.read_bytes)
    assert patient.retry_after == STANDARD.retry_after
    assert (absolute.from_first, absolute.overdue, absolute.terminal) == (True, 60_000, patient.terminal)
    assert absolute.retry_after.statuses is None
    assert deaf.retry_after is None
    assert deaf.steps == STANDARD.steps


def test_it_decides_as_it_says():
    patient = read_contracts(GOOD, CONTRACTS)["patient"]
    actions = [
        decide(patient, delivery="d", attempt=attempt, first_started=0, ended=0, status=status).action
        for attempt, status in [(1, 400), (1, 451), (1, 404), (3, 500), (4, 500), (4, 204)]
    ]
    assert actions == ["terminal", "disable", "retry", "retry", "exhausted", "delivered"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[a]\nbase = @\n", None, "not TOML.*line 2"),
        ("[a]\nwaits = [5,\n  6\n\n", None, "not TOML: .*at end of document.*; the last value begins in line 2"),
        ('title = "x"\n', 1, "outside of any contract"),
        ("[a]\n[standard]\n", 2, "already"),
        ("[A]\n", 1, "lower-case"),
        ('[a]\nbase = "none"\n', 2, "one of betterstood, brief, kingminos, standard"),
        ('[b]\nbase = "a"\n[a]\n', 2, "one of betterstood, brief, kingminos, standard"),
        ("[a]\ntimeout = 5\n", 2, "no part of a contract; there are base, challenge, deadline"),
        ("[a]\n\nwaits = []\n", 3, "1 to 99"),
        ("[a]\nwaits = [5, 0]\n", 2, "has 0.*from 1"),
        ("[a]\nwaits = [5.5]\n", 2, "whole number"),
        ("[a]\nwaits = [true]\n", 2, "whole number"),
        ('[a]\nwaits = ["5s"]\n', 2, "whole number"),
        ("[a]\nwaits = [5]\njitter = 60\n", 3, "from 0 to 50"),
        ("[a]\njitter = 5\n", 2, "goes with waits"),
        ("[a]\nwaits = [5]\noffsets = [5]\n", 3, "not both"),
        ("[a]\noffsets = [60, 60]\n", 2, "later than the one before"),
        ("[x]\nterminal = 400\n[a]\nterminal = [99]\n", 4, "100 to 599"),
        ("[a]\nterminal = [204]\n", 2, "2xx is a success"),
        ('[a]\nterminal = ["500-400"]\n', 2, "range"),
        ('[a]\nterminal = ["x"]\n', 2, "range"),
        ("[a]\ndeadline = 60\n", 2, "from 1 to 15"),
        ("[a]\nkeep_bytes = -1\n", 2, "from 0"),
        ("[a]\nretry_after = true\n", 2, "false"),
        ("[a]\nretry_after = {least = 100, most = 50}\n", 2, "from 100"),
        ("[a]\n[a.retry_after]\nleast = 100\n\nmost = 50\n", 5, "retry_after.most has 50; .* from 100"),
        ("[a]\nretry_after.least = -1\n[b]\nretry_after.least = 5\n", 2, "retry_after.least has -1"),
        ('[b]\nbase = "standard"\n[a.retry_after]\nstatuses = [99]\n', 4, "retry_after.statuses has 99"),
        ("[a]\nretry_after = {seconds = 5}\n", 2, "table of"),
        ('[a]\nretry_after = {replaces = "yes"}\n', 2, "replaces has 'yes'; it must be true or false"),
        ("[a]\ntitle = 5\n", 2, "title must be a text"),
        ('[a]\nsignature = "kingminos"\n', 2, "one of standard-webhooks, stripe-like"),
        ('[a]\nheaders = ["X-A: {secret}"]\n', 2, "may hold {attempt}, {time}"),
        ('[a]\nheaders = ["X-A: {attempt.__class__}"]\n', 2, "may hold {attempt}"),
        ('[a]\nheaders = ["X-A: {"]\n', 2, "may hold {attempt}"),
        ('[a]\nheaders = ["X A: b"]\n', 2, "must be a line like"),
        ('[a]\nheaders = ["X-A: b\\r\\nX-B: c"]\n', 2, "must be a line like"),
        ('[a]\nheaders = ["Webhook-Signature: x"]\n', 2, "not for a contract to set"),
        ('[a]\nheaders = "X-A: b"\n', 2, "a list of at most 20 lines"),
        ("[a]\ndisable_after = 0\n", 2, "from 1"),
        ('[a]\nwhen_inactive = "drop"\n', 2, "one of hold, dead, skip"),
        ('[a]\nhttps_443 = "no"\n', 2, "true or false"),
    ],
)
def test_a_mistake_is_said_with_its_line_and_the_rule(text, line, words):
    with pytest.raises(ContractFileError, match=words) as refused:
        read_contracts(text, CONTRACTS)
    if line:
        assert str(refused.value).startswith(f"line {line}: ")


def test_a_mistake_stops_the_start_and_a_good_file_is_offered(tmp_path):
    path = tmp_path / "contracts.toml"
    environment = {**os.environ, "CONTRACTS_FILE": str(path), "WEBHOOKHUB_VAR": str(tmp_path), "GENERATE_SECRETS": "1"}
    ask = "import django; django.setup(); from endpoints.models import contract_choices; print(contract_choices())"

    def start():
        command = [sys.executable, "-c", f"import os; {ask}"]
        environment["DJANGO_SETTINGS_MODULE"] = "webhookhub.settings"
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False
        )

    missing = start()
    assert "CONTRACTS_FILE names" in missing.stderr
    path.write_text("[patient]\nwaits = [0]\n")
    wrong = start()
    assert wrong.returncode != 0
    assert f"SettingError: CONTRACTS_FILE ({path}), line 2: waits has 0" in wrong.stderr
    path.write_text(GOOD)
    assert "('patient', 'Patient')" in start().stdout
