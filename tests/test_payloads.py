"""Validation and slicing of JSON: the table of cases, the two readers against each other, and known traps."""

import hashlib
import json
import re
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deliveries import payloads
from deliveries.payloads import PayloadError, check, check_kind, check_size, slice_items, slice_members
from tests.vectors_loader import build_bytes, load

CASES: list[dict[str, Any]] = load("json_payloads")["cases"]
NAME_A_BYTE = {"invalid_json", "invalid_utf8", "duplicate_key", "lone_surrogate", "nesting_too_deep"}
SPACE = b" \t\r\n"


def refusal(payload: bytes, **limits: int) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        check(payload, **limits)
    return caught.value


def body_refusal(body: bytes) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        slice_members(body)
    return caught.value


@pytest.mark.vectors
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['name']}")
def test_json_payloads(case: dict[str, Any]) -> None:
    payload = build_bytes(case)
    assert (len(payload), hashlib.sha256(payload).hexdigest()) == (case["bytes"], case["sha256"])
    body = b'{"type":"x","data":' + payload + b"}"
    if case["expect"]["status"] == 202:
        check(payload)
        data = slice_members(body)["data"]
        assert data == payload.strip(SPACE)
        check_size(data)
        check_kind(data)
        return
    error = refusal(payload)
    assert error.code == case["expect"]["code"]
    if error.code in NAME_A_BYTE:
        assert re.search(rf"\bbyte {case['error_offset']}\b", error.detail)
    if error.code in {"payload_too_large", "payload_not_object_or_array"}:
        with pytest.raises(PayloadError) as caught:
            data = slice_members(body)["data"]
            check_size(data)
            check_kind(data)
        assert caught.value.code == error.code
    else:
        assert body_refusal(body).code in {error.code, "invalid_json"}


# --- the two readers ------------------------------------------------------------------------------------------------

WHITE = st.text(" \t\r\n", max_size=2)
CHARACTERS = st.sampled_from(["a", "b", "é", "😀", " ", "[", "{", "]", "}", ",", ":", "u", "ud800", "\u2028", "\x7f"])
ESCAPES = st.sampled_from([r"\"", r"\\", r"\/", r"\n", r"\u0061", r"\u0000", r"\ud83d\ude00", r"\uD83D", r"\udc00"])
STRINGS = st.lists(CHARACTERS | ESCAPES, max_size=5).map(lambda parts: f'"{"".join(parts)}"')
NAMES = st.sampled_from(['"a"', r'"\u0061"', '"b"', '""', r'"\n"', '"é"', r'"\u00e9"']) | STRINGS
NUMBERS = st.from_regex(
    r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,4})?", fullmatch=True, alphabet="-.eE+0123456789"
)
SCALARS = STRINGS | NUMBERS | st.sampled_from(["true", "false", "null", "NaN", "-Infinity"])


def arrays(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(WHITE, st.lists(items, max_size=4), WHITE).map(lambda t: f"[{t[0]}{f',{t[2]}'.join(t[1])}{t[2]}]")


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    member = st.tuples(WHITE, NAMES, WHITE, values, WHITE).map(lambda t: f"{t[0]}{t[1]}{t[2]}:{t[2]}{t[3]}{t[4]}")
    return st.lists(member, max_size=4).map(lambda members: "{" + ",".join(members) + "}")


VALUES = st.recursive(SCALARS, lambda inner: arrays(inner) | objects(inner), max_leaves=12)
DEEP = st.tuples(st.integers(28, 36), VALUES).map(lambda t: "[" * t[0] + t[1] + "]" * t[0])
DOCUMENTS = st.tuples(WHITE, VALUES | objects(VALUES) | DEEP, WHITE).map("".join).map(str.encode)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A document with a few bytes removed, repeated or put in."""
    document = draw(DOCUMENTS)
    for _ in range(draw(st.integers(1, 3))):
        start, end = sorted(draw(st.integers(0, len(document))) for _ in range(2))
        end = min(end, start + 6)
        put = draw(
            st.sampled_from([b"", document[start:end] * 2, *(bytes([c]) for c in b'"\\{}[]:,0-.eu \x00\x1f\xff\xc3')])
        )
        document = document[:start] + put + document[end:]
    return document


def read_exactly(document: bytes, max_depth: int) -> dict[str, bytes] | PayloadError | None:
    try:
        return payloads._read(document, max_depth)
    except PayloadError as error:
        return error


@given(DOCUMENTS | damaged() | st.binary(max_size=8), st.sampled_from([1, 2, 3, 31, 32, 1000]))
@example(rb'{"s":"\ud83d\\\ude00"}', 1000)
@example(rb'{"s":"\ud83d\ud83d\ude00\ude00"}', 1000)
@example(b'{"s":"' + b"[{" * 40 + b'"}', 1000)
@example(rb'["\\",[["\\\"]",[]]]]', 3)
def test_the_quick_reader_and_the_exact_reader_agree(document: bytes, max_depth: int) -> None:
    exact = read_exactly(document, min(max_depth, payloads._PLAIN_DEPTH))
    assert payloads._is_plain(document, max_depth) == (not isinstance(exact, PayloadError))


@given(DOCUMENTS | damaged())
def test_what_the_exact_reader_accepts_another_parser_reads(document: bytes) -> None:
    if not isinstance(read_exactly(document, 1000), PayloadError):
        json.loads(document.decode(), parse_int=str)


@given(DOCUMENTS | damaged())
def test_slices_are_the_same_from_both_readers_and_reparse_to_the_same_values(document: bytes) -> None:
    exact = read_exactly(document, payloads.MAX_DEPTH + 1)
    if isinstance(exact, dict):
        assert slice_members(document) == exact
        assert {name: json.loads(value, parse_int=str) for name, value in exact.items()} == json.loads(
            document, parse_int=str
        )
    else:
        assert body_refusal(document).code == (exact.code if exact else "body_not_object")


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), VALUES, max_size=4), WHITE)
def test_slices_equal_the_bytes_that_went_in(parts: dict[str, str], white: str) -> None:
    body = "{" + ",".join(f"{white}{json.dumps(name)}:{white}{value}{white}" for name, value in parts.items()) + "}"
    if isinstance(read_exactly(body.encode(), 1000), PayloadError):
        return
    assert slice_members(body.encode()) == {name: value.encode() for name, value in parts.items()}


@given(st.lists(VALUES, max_size=4), st.sampled_from(['"a"', r'"\u0061"']), WHITE)
def test_items_equal_the_bytes_that_went_in(parts: list[str], name: str, white: str) -> None:
    items = f",{white}".join(f"{white}{part}{white}" for part in parts)
    body = f"{white}{{{white}{name}{white}:{white}[{items}]{white}}}{white}".encode()
    if isinstance(read_exactly(body, 1000), PayloadError):
        return
    assert slice_items(body, "a", 4) == [part.encode() for part in parts]


@given(st.lists(VALUES, max_size=3).map(lambda parts: "[" + ",".join(parts) + "]") | DOCUMENTS.map(bytes.decode))
def test_a_body_of_sound_items_is_sound(value: str) -> None:
    body = f'{{"a":{value}}}'.encode()
    try:
        items = slice_items(body, "a", 100)
        for item in items:
            check(b"[" + item + b"]")
    except PayloadError:
        return
    assert json.loads(body, parse_int=str) == {"a": [json.loads(item, parse_int=str) for item in items]}
    check(body)


# --- traps ----------------------------------------------------------------------------------------------------------


def test_the_members_of_a_body_keep_every_byte_of_their_spelling() -> None:
    data = (
        rb'{"b":1,"a":1.10,"n":12345678901234567890123,"e":1e2,"s":"a\/b\u0000","f":0.12345678901234567890, "z" : -0}'
    )
    assert slice_members(b' { "type" : "x" ,\n "data" :\t' + data + b" } ") == {"type": b'"x"', "data": data}


def test_names_that_are_equal_once_unescaped_are_duplicates_at_any_depth() -> None:
    for body in (rb'{"a":1,"\u0061":2}', rb'{"x":[{"a":1,"\u0061":2}]}'):
        assert body_refusal(body).code == "duplicate_key"


def test_a_name_may_recur_in_another_object() -> None:
    assert slice_members(b'{"a":{"a":[{"a":1},{"a":2}]}}') == {"a": b'{"a":[{"a":1},{"a":2}]}'}


@pytest.mark.parametrize("number", [b"9" * 5000, b"-" + b"9" * 250_000, b"1E400", b"0." + b"1" * 5000, b"1e-99999999"])
def test_numbers_of_any_length_pass_untouched(number: bytes) -> None:
    check(b"[" + number + b"]")
    assert slice_members(b'{"n": ' + number + b" }") == {"n": number}


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity", b"nan", b"01", b".5", b"0x1", b"-", b"1e", b"tru"])
def test_what_only_python_or_javascript_calls_a_number_is_refused(text: bytes) -> None:
    assert refusal(b"[" + text + b"]").code == "invalid_json"


@pytest.mark.parametrize(
    "text", [rb'"\ud800"', rb'"\uDC00"', rb'"\ud83d\\ude00"', rb'"\ud83d \ude00"', rb'{"\ud800":1}']
)
def test_half_a_surrogate_pair_is_refused(text: bytes) -> None:
    assert refusal(b"[" + text + b"]").code == "lone_surrogate"


@pytest.mark.parametrize("text", [rb'"\ud83d\ude00"', rb'"\uD83D\uDE00"', rb'"\\ud800"', rb'"\\\\udc00 \ud83d\ude00"'])
def test_escaped_pairs_and_escaped_backslashes_are_fine_and_stay_on_the_quick_path(text: bytes) -> None:
    assert payloads._is_plain(b"[" + text + b"]", 1000)


@pytest.mark.parametrize(("unit", "end"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_counted_from_one_and_the_payload_may_fill_its_slot_in_the_body(unit: bytes, end: bytes) -> None:
    deepest = unit * 999 + b"[1]" + end * 999
    check(deepest)
    assert slice_members(b'{"data":' + deepest + b"}") == {"data": deepest}
    assert refusal(unit + deepest + end).code == "nesting_too_deep"
    assert body_refusal(b'{"data":' + unit + deepest + end + b"}").code == "nesting_too_deep"


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000 + b"]" * 100_000, b"[" * 262_144, b'{"a":' * 40_000, b"9" * 200_000 + b"[" * 50_000],
    ids=["closed", "open", "objects", "digits"],
)
def test_hostile_text_is_refused_quickly_and_without_recursion(text: bytes) -> None:
    began = time.perf_counter()
    assert refusal(text).code in {"nesting_too_deep", "invalid_json"}
    body_refusal(b'{"data":' + text + b"}")
    assert time.perf_counter() - began < 0.4  # two reads, of at most 200 ms each


def test_many_brackets_that_are_not_deep_stay_on_the_quick_path() -> None:
    assert payloads._is_plain(json.dumps([{"lines": [{"sku": r'\"]["\\', "qty": [1]}]}] * 500).encode(), 1000)


@pytest.mark.parametrize("body", [b"[]", b"1", b'"{}"', b"null", b'[{"a":1}]'])
def test_a_body_must_be_an_object(body: bytes) -> None:
    assert body_refusal(body).code == "body_not_object"


@pytest.mark.parametrize("text", [b"", b" \n"])
def test_nothing_is_named_as_nothing(text: bytes) -> None:
    assert refusal(text).code == body_refusal(text).code == "empty_body"


def test_a_byte_order_mark_is_named_at_the_start_of_the_body_and_of_a_value() -> None:
    assert body_refusal(b'\xef\xbb\xbf{"data":{}}').code == "bom_not_allowed"
    assert body_refusal(b'{"data":\xef\xbb\xbf{}}').code == "bom_not_allowed"
    check('{"s":"\ufeff"}'.encode())


def test_size_is_looked_at_first() -> None:
    assert refusal(b"\xff" * 11, max_bytes=10).code == "payload_too_large"


def test_an_error_says_what_where_and_how_to_go_on() -> None:
    error = body_refusal(rb'{"type":"x","data":{"a/b":[1,{"k":1,"k":2}]}}')
    assert (error.code, error.pointer) == ("duplicate_key", "/data/a~1b/1/k")
    assert str(error) == error.detail
    assert error.detail == 'The JSON repeats the name "k" in one object, up to byte 39; give each member its own name.'


def test_a_pointer_that_would_be_very_long_is_left_out() -> None:
    assert refusal(b"[" * 900 + b"x").pointer == ""


def test_items_of_any_depth_that_a_payload_may_have_are_found() -> None:
    deepest = b'{"data":' + b"[" * 1000 + b"]" * 1000 + b"}"
    assert slice_items(b'{"a":[' + deepest + b" , 1]}", "a", 2) == [deepest, b"1"]


@pytest.mark.parametrize("item", [b"1", b"[" * 900 + b"]" * 900], ids=["flat", "deep"])
def test_more_items_than_the_limit_are_refused(item: bytes) -> None:
    assert slice_items(b'{"a":[' + b",".join([item] * 3) + b"]}", "a", 3) == [item] * 3
    with pytest.raises(PayloadError) as caught:
        slice_items(b'{"a":[' + b",".join([item] * 4) + b"]}", "a", 3)
    assert (caught.value.code, caught.value.pointer) == ("a_too_many", "/a")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"a":[],"a":[]}', "duplicate_key"),
        (b'{"a":[1] 2}', "invalid_json"),
        (b'{"a":[1,]}', "invalid_json"),
        (b'{"a":[1]}}', "invalid_json"),
        (b'{"a":[1]', "invalid_json"),
        (b'\xef\xbb\xbf{"a":[]}', "bom_not_allowed"),
        (b"", "empty_body"),
        (b'{"a":[],"b":1}', "unknown_member"),
        (b'{"a":{}}', "a_missing"),
        (b"{}", "a_missing"),
        (b"[]", "a_missing"),
    ],
)
def test_what_has_not_one_member_with_an_array_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(PayloadError) as caught:
        slice_items(body, "a", 9)
    assert caught.value.code == code
