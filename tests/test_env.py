"""Settings from the environment: a wrong value stops the start, and says which and why."""

import pytest

from webhookhub.env import SettingError, env_bool, env_int, env_list, env_secret, env_str


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("THING", "THING_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("off", False), ("", False)]
)
def test_switches(monkeypatch, text, value):
    monkeypatch.setenv("THING", text)
    assert env_bool("THING", not value) is value


def test_a_switch_of_another_word_names_the_variable(monkeypatch):
    monkeypatch.setenv("THING", "maybe")
    with pytest.raises(SettingError, match="THING is 'maybe'"):
        env_bool("THING", False)


@pytest.mark.parametrize("text", ["", "three", "-1", "1.5"])
def test_a_number_that_is_none_names_the_variable_and_the_least(monkeypatch, text):
    monkeypatch.setenv("THING", text)
    with pytest.raises(SettingError, match="THING is .* at least 0"):
        env_int("THING", 5)


def test_a_list_minds_no_spaces_and_no_trailing_comma(monkeypatch):
    monkeypatch.setenv("THING", " a , b,, c ,")
    assert env_list("THING") == ["a", "b", "c"]


def test_a_required_value_that_is_missing_is_named():
    with pytest.raises(SettingError, match="THING is not set.*THING_FILE"):
        env_str("THING")


def test_a_file_gives_the_value_and_the_variable_wins(monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("from the file\n")
    monkeypatch.setenv("THING_FILE", str(tmp_path / "secret"))
    assert env_str("THING") == "from the file"
    monkeypatch.setenv("THING", "from the variable")
    assert env_str("THING") == "from the variable"


def test_a_file_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("THING_FILE", str(tmp_path / "none"))
    with pytest.raises(SettingError, match="THING_FILE names .*none.*No such file"):
        env_str("THING")


def test_a_secret_is_made_once_and_kept_from_others(tmp_path):
    first = env_secret("THING", lambda: "made", folder=tmp_path / "secrets")
    again = env_secret("THING", lambda: "other", folder=tmp_path / "secrets")
    assert first == again == "made"
    assert (tmp_path / "secrets" / "THING").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_may_not_be_made_is_required(tmp_path):
    with pytest.raises(SettingError, match="THING is not set.*same value"):
        env_secret("THING", folder=tmp_path)
