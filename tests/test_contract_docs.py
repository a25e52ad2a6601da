"""The page of contracts says what the values say."""

import re
from pathlib import Path

from django.core.management import call_command

from endpoints.contract_file import read_contracts
from endpoints.contracts import BETTERSTOOD, BRIEF, CONTRACTS, KINGMINOS, STANDARD
from endpoints.management.commands.contracts import contracts_table

PAGE = Path(__file__).parent.parent / "docs" / "contracts.md"


def test_the_page_holds_the_table_that_the_command_prints(capsys):
    call_command("contracts")
    [table] = re.findall(r"<!-- contracts -->\n(.*)<!-- /contracts -->", PAGE.read_text(), re.DOTALL)
    assert table == capsys.readouterr().out


def test_the_example_of_the_page_is_read():
    [example] = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert read_contracts(example, CONTRACTS).keys() == {"patient", "absolute"}


def test_the_table_says_what_differs():
    table = contracts_table([STANDARD, BRIEF, BETTERSTOOD, KINGMINOS])
    assert "| attempts | 10 | 6 | 8 | 8 |" in table
    assert "| disables the endpoint | 410 | never | 410 | 20 dead deliveries in a row |" in table
    assert "on 429: takes the time's place, 1 s to 1 d" in table
    assert "1 min, 2 min, 4 min, 8 min, 16 min, 30 min, 1 h (the first 1 min to 6 min)" in table
    assert "64 KiB / nothing" in table
