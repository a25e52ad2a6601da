"""The payload boundary: limits of classes, shrinking to a size, and what must stay as it was."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deliveries import payloads
from endpoints.projection import ProjectionGap, check_schema, project

BIG = payloads.MAX_PAYLOAD_BYTES
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"x-class": "identifier"},
        "key": {"x-class": "key"},
        "label": {"x-class": "label"},
        "email": {"x-class": "email"},
        "phone": {"x-class": "phone"},
        "text": {"x-class": "text"},
        "note": {"x-class": "text"},
        "list": {
            "x-class": "collection",
            "items": {"required": ["k"], "properties": {"k": {"x-class": "key"}, "t": {"x-class": "text"}}},
        },
        "map": {"x-class": "collection", "additionalProperties": {"x-class": "label"}},
        "transcript": {"x-class": "excluded"},
        "plain": {"type": "object"},
        "person": {
            "required": ["phone"],
            "properties": {"phone": {"x-class": "phone"}, "raw": {"x-class": "excluded"}},
        },
        "a/b~c": {"x-class": "label"},
    },
}


def dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def with_truncation(data: str, *pointers: str) -> bytes:
    return f'{data}"truncation":{{"omittedFields":{json.dumps(pointers, separators=(",", ":"))}}}}}'.encode()


def values(payload: object, *, max_bytes: int = BIG, schema: Any = SCHEMA) -> tuple[Any, list[str]]:
    data, omitted = project(dumps(payload), schema, max_bytes=max_bytes)
    payloads.check(data, max_bytes=max_bytes)
    value = json.loads(data)
    assert value.pop("truncation") == {"omittedFields": list(omitted)}
    return value, list(omitted)


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        ("{}", "{"),
        (' { "a\\u0062" : 1.10e+5 ,\n"text": "\\u00e9\\/" }\n', '{ "a\\u0062" : 1.10e+5 ,\n"text": "\\u00e9\\/" ,'),
        ('{"id":"]}\\"\\\\","x":[{"y":"}"}, [ ]]}', '{"id":"]}\\"\\\\","x":[{"y":"}"}, [ ]],'),
        ('{"id": 1 , "truncation": {"mine": [1]}, "z":-0}', '{"id": 1,"z":-0,'),
        ('{"truncation":1}', "{"),
        ('{"id":1,"transcript":"secret" , "person": { "phone" : "1" ,"raw":2}}', '{"id":1,"person": {"phone" : "1"},'),
        ('{"text":null,"list":"no list","map":7,"person":[]}', '{"text":null,"list":"no list","map":7,"person":[],'),
    ],
)
def test_what_is_not_cut_keeps_its_bytes(payload: str, data: str) -> None:
    assert project(payload.encode(), SCHEMA, max_bytes=BIG).data == with_truncation(data)


@pytest.mark.parametrize(
    ("name", "most"), [("key", 256), ("label", 256), ("email", 320), ("phone", 32), ("a/b~c", 256)]
)
def test_a_value_that_is_too_long_is_left_out_when_optional(name: str, most: int) -> None:
    assert values({"id": 1, name: "é" * most}) == ({"id": 1, name: "é" * most}, [])
    pointer = "/" + name.replace("~", "~0").replace("/", "~1")
    assert values({"id": 1, name: "é" * (most + 1)}) == ({"id": 1}, [pointer])


def test_a_required_value_that_is_too_long_is_a_gap() -> None:
    with pytest.raises(ProjectionGap, match="required identifier at /id is 257 characters long") as caught:
        values({"id": "x" * 257})
    assert caught.value.pointer == "/id"


def test_a_required_value_takes_the_nearest_optional_part_around_it_along() -> None:
    assert values({"id": 1, "person": {"phone": "1" * 33}}) == ({"id": 1}, ["/person"])
    assert values({"list": [{"k": "a"}, {"k": "b" * 257, "t": "b" * 9000}, {"k": "c"}]}) == (
        {"list": [{"k": "a"}, {"k": "c"}]},
        ["/list/1"],
    )


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("x" * 8192, "x" * 8192),
        ("x" * 8193, "x" * 8192),
        ("é" * 5000, "é" * 4096),
        ("x" + "é" * 5000, "x" + "é" * 4095),
        ("xxx" + "😀" * 2100, "xxx" + "😀" * 2047),
    ],
)
def test_a_text_is_cut_at_a_character_boundary(text: str, cut: str) -> None:
    for ascii_only in (True, False):
        payload = json.dumps({"text": text}, ensure_ascii=ascii_only).encode()
        assert json.loads(project(payload, SCHEMA, max_bytes=BIG).data)["text"] == cut


def test_a_collection_loses_its_tail() -> None:
    many = {f"k{n}": n for n in range(150)}
    assert values({"list": list(range(101)), "map": many}) == (
        {"list": list(range(100)), "map": dict(list(many.items())[:100])},
        ["/list", "/map"],
    )


def test_collections_shrink_before_texts_and_the_last_first() -> None:
    payload = {"text": "t" * 100, "list": [1111111] * 10, "note": "n" * 100, "map": {"a": "x" * 30, "b": "y" * 30}}
    sizes = {}
    for limit in range(len(dumps(payload)) + 40, 90, -1):
        value, omitted = values(payload, max_bytes=limit)
        sizes[limit] = omitted
        if "text" in value and len(value["text"]) < 100:
            assert not value.get("note")
        if value.get("note", "n" * 100) != "n" * 100:
            assert not value.get("list")
        if len(value.get("list", [])) < 10:
            assert not value.get("map")
    assert list(dict.fromkeys(map(tuple, sizes.values())))[:5] == [
        (),
        ("/map",),
        ("/list", "/map"),
        ("/list", "/note", "/map"),
        ("/text", "/list", "/note", "/map"),
    ]


def test_the_most_that_fits_is_kept() -> None:
    payload = {"list": [7] * 50}
    for limit in range(60, 130):
        value, omitted = values(payload, max_bytes=limit)
        if omitted:
            assert len(project(dumps(payload), SCHEMA, max_bytes=limit).data) in (limit, limit - 1)
        else:
            assert value == payload


def test_members_go_after_collections_and_texts_the_last_first() -> None:
    payload = {"label": "l" * 40, "id": 1, "person": {"a": 1.25e99, "phone": "1" * 30}, "list": [1] * 30}
    steps = dict.fromkeys(tuple(values(payload, max_bytes=limit)[1]) for limit in range(250, 70, -1))
    assert list(steps) == [(), ("/list",), ("/person", "/list"), ("/label", "/person", "/list")]


def test_white_space_goes_before_content() -> None:
    payload = b'{ "text" : "a  b" ,\n "list" : [ 1 , { "t" : " x " } ] }'
    for limit in (len(payload) + 34, len(payload) + 33):
        data, omitted = project(payload, SCHEMA, max_bytes=limit)
        assert omitted == ()
    assert data == with_truncation('{"text":"a  b","list":[1,{"t":" x "}],')


# What a schema says nothing about

OPEN: dict[str, Any] = {
    "x-classes": {
        "rawError": "excluded",
        "transcript": "excluded",
        "email": "email",
        "phones": "phone",
        "name": "label",
    },
    "properties": {"id": {"x-class": "identifier"}, "transcript": {"x-class": "text"}},
}


def test_an_array_is_a_collection_an_object_too_and_a_string_a_text_wherever_it_is() -> None:
    many = {f"k{n}": n for n in range(150)}
    payload = {"a": {"list": list(range(101)), "map": many}, "b": [["x"] * 101, "é" * 5000], "c": 10**300}
    assert values(payload, schema=OPEN) == (
        {
            "a": {"list": list(range(100)), "map": dict(list(many.items())[:100])},
            "b": [["x"] * 100, "é" * 4096],
            "c": 10**300,
        },
        ["/a/list", "/a/map", "/b/0", "/b/1"],
    )


def test_members_of_the_payload_itself_are_no_collection() -> None:
    many = {f"k{n}": n for n in range(150)}
    assert values(many, schema=OPEN) == (many, [])
    assert values(many, schema={}) == (many, [])
    assert project(b'{"a":{},"truncation":1}', {}, max_bytes=BIG).data == with_truncation('{"a":{},')


@pytest.mark.parametrize("name", ["rawError", "raw_error", "RAW-ERROR", r"raw\u0045rror", "transcript", "Transcript"])
def test_what_is_excluded_by_name_is_left_out_wherever_it_is(name: str) -> None:
    payload = (
        f'{{"id":1,"a":{{"b":[{{"{name}":{{"x":[1]}},"c":2}},{{"{name}":"s"}}]}},"list":[["{name}"],'
        f'{{"{name}":null}}]}}'
    )
    assert project(payload.encode(), OPEN, max_bytes=BIG).data == with_truncation(
        f'{{"id":1,"a":{{"b":[{{"c":2}},{{}}]}},"list":[["{name}"],{{}}],'
    )


def test_the_schema_of_a_field_counts_before_its_name() -> None:
    assert values({"transcript": "kept", "a": {"transcript": "gone"}}, schema=OPEN) == (
        {"transcript": "kept", "a": {}},
        [],
    )


def test_a_class_by_name_has_its_limit_wherever_it_is_and_passes_on_to_what_is_in_it() -> None:
    payload = {
        "a": [{"email": "e" * 321}, {"email": "e" * 320}],
        "phones": ["1" * 32, {"home": "2" * 33}, ["3" * 33]],
        "name": {"first": "n" * 257, "email": "e" * 300},
    }
    assert values(payload, schema=OPEN) == (
        {"a": [{}, {"email": "e" * 320}], "phones": ["1" * 32, {}, []], "name": {"email": "e" * 300}},
        ["/a/0/email", "/phones/1/home", "/phones/2/0", "/name/first"],
    )


def test_a_place_too_deep_for_a_pointer_is_told_of_by_what_is_around_it() -> None:
    name = "n" * 600
    payload = {name: {"a": ["x" * 9000], name: {"b": {"c": "y" * 9000, "d": "z" * 9000}}}}
    value, omitted = values(payload, schema=OPEN)
    assert omitted == [f"/{name}/a/0", f"/{name}"]
    assert value[name][name]["b"]["d"] == "z" * 8192


def test_required_collections_and_texts_become_empty_but_stay() -> None:
    schema = {
        "required": ["c", "t"],
        "properties": {"c": {"x-class": "collection"}, "t": {"x-class": "text"}},
    }
    payload = {"c": [1] * 50, "t": "t" * 100}
    assert values(payload, schema=schema, max_bytes=58) == ({"c": [], "t": ""}, ["/c", "/t"])
    with pytest.raises(ProjectionGap, match="over the limit of 50") as caught:
        values(payload, schema=schema, max_bytes=50)
    assert caught.value.pointer == ""


def test_a_pointer_into_something_left_out_is_not_listed() -> None:
    payload = {"id": 1, "list": [{"k": "a", "t": "x" * 9000}, {"k": "b", "t": "y" * 9000}]}
    assert values(payload)[1] == ["/list/0/t", "/list/1/t"]
    assert values(payload, max_bytes=9000)[1] == ["/list", "/list/0/t"]
    assert values(payload, max_bytes=80)[1] == ["/list"]


def test_what_would_not_get_shorter_is_left_alone() -> None:
    assert values({"id": 1, "text": "ab", "label": "l" * 60}, max_bytes=70) == ({"id": 1, "text": "ab"}, ["/label"])


# --- properties -----------------------------------------------------------------------------------------------------

# Long values are rare: hypothesis warns of examples whose text is long.
STRINGS = st.text(max_size=12) | st.builds(
    lambda text, times: text * times, st.text(min_size=1, max_size=2), st.sampled_from([33, 257, 321, 4100])
)
VALUES = st.recursive(
    st.none() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["k", "t", "é"]), inner, max_size=3),
    max_leaves=6,
)
MANY = st.builds(lambda value, times: [value] * times, VALUES, st.sampled_from([3, 101]))
NAMES = st.sampled_from([*SCHEMA["properties"], "stranger", "truncation", "ü"])
DOCUMENTS = st.dictionaries(NAMES, VALUES | MANY, max_size=10)
WRITERS = st.sampled_from(
    [
        lambda value: json.dumps(value).encode(),
        lambda value: json.dumps(value, ensure_ascii=False, indent=1).encode(),
        dumps,
    ]
)


def resolve(value: Any, pointer: str) -> Any:
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        value = value[int(name) if isinstance(value, list) else name]
    return value


def without_space(payload: bytes) -> bytes:
    """Without the white space between values."""
    return re.sub(rb'("[^"\\]*(?:\\.[^"\\]*)*")|\s', rb"\1", payload)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of what hypothesis tries now and then
@given(DOCUMENTS, WRITERS, st.sampled_from([60, 100, 300, 1000, 5000, 20_000, BIG]))
def test_every_projection_keeps_the_rules(document: dict[str, Any], write: Any, max_bytes: int) -> None:
    payload = write(document)
    try:
        data, omitted = project(payload, SCHEMA, max_bytes=max_bytes)
    except ProjectionGap as gap:
        assert gap.pointer == "" or resolve(document, gap.pointer) is not None  # noqa: PT017
        return
    payloads.check(data, max_bytes=max_bytes)
    assert project(payload, SCHEMA, max_bytes=max_bytes) == (data, omitted)
    assert json.loads(data)["truncation"] == {"omittedFields": list(omitted)}
    assert list(json.loads(data))[-1] == "truncation"
    assert len(set(omitted)) == len(omitted)
    for pointer in omitted:
        resolve(document, pointer)
    touched = {pointer.split("/")[1].replace("~1", "/").replace("~0", "~") for pointer in omitted}
    sent, kept = payloads.slice_members(payload), payloads.slice_members(data)
    for name in sent.keys() - touched - {"truncation", "transcript", "person"}:
        assert kept[name] in (sent[name], without_space(sent[name]))
    again = project(data, SCHEMA, max_bytes=max_bytes)
    assert again.omitted == ()
    assert json.loads(again.data) | {"truncation": 0} == json.loads(data) | {"truncation": 0}


@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_is_read(pair: tuple[bytes, bytes]) -> None:
    deep = pair[0] * 498 + b"1" + pair[1] * 498
    payload = b'{"text":"' + b"t" * 9000 + b'","x":' + deep + b"}"
    data, omitted = project(payload, SCHEMA, max_bytes=BIG)
    assert deep in data
    assert omitted == ("/text",)


def named(count: int, value: object) -> dict[str, object]:
    return {f"member{n:05}": value for n in range(count)}


@pytest.mark.parametrize(
    ("payload", "rule", "max_bytes"),
    [
        (named(500, "t" * 480), {"x-class": "text"}, BIG // 2),
        (named(500, [1] * 220), {"x-class": "collection"}, 30_000),
        (named(500, "l" * 250), {"x-class": "label"}, 20_000),
        (named(10_000, 12345678), {}, 1000),
        (named(10_000, [[1, 2, 3], {"a": "x"}]), {}, 1000),
        ({"member00000": [0] * 120_000}, {"x-class": "collection"}, 100),
        ({"member00000": "é" * 120_000}, {"x-class": "text"}, 100),
    ],
)
def test_a_large_payload_shrinks_to_what_there_is_room_for(
    payload: dict[str, object], rule: dict[str, str], max_bytes: int
) -> None:
    schema = {"properties": dict.fromkeys(list(payload)[:500], rule)}
    try:
        data, omitted = project(dumps(payload), schema, max_bytes=max_bytes)
    except ProjectionGap as gap:
        assert gap.pointer == ""  # noqa: PT017
        return
    assert 0 < len(data) <= max_bytes
    assert omitted


# --- the schema -----------------------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    return {"properties": {"a": nested(depth - 1)}} if depth > 1 else {}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ([], "must be a JSON object"),
        ({"x-classes": ["email"]}, "x-classes must be an object"),
        ({"x-classes": {"a": "collection"}}, "x-classes gives 'a' the unknown class 'collection'; use one of email"),
        ({"x-classes": {"a": None}}, "unknown class None"),
        ({"x-classes": {str(n): "key" for n in range(501)}}, "at most 500 names"),
        ({"properties": {"a": {"x-classes": {"b": "key"}}}}, "'/a' has x-classes, which stand at its top alone"),
        ({"x-class": "text"}, "without x-class at its top"),
        ({"properties": []}, "an object as its properties"),
        ({"properties": {"a": 1}}, "'/a' must be an object, true or false"),
        ({"required": "id"}, "a list of names as required"),
        ({"properties": {"a": {"x-class": "name"}}}, "unknown x-class 'name'; use one of collection"),
        ({"properties": {"a": {"x-class": ["text"]}}}, "unknown x-class"),
        ({"properties": {"a": {"x-class": "collection", "required": ["x"]}}}, "names members of a collection"),
        ({"properties": {"a": {"items": [{}]}}}, "'/a/items' must be an object"),
        ({"oneOf": [{"properties": {"a": {"x-class": "excluded"}}}]}, "an x-class inside oneOf"),
        (nested(11), "deeper than 10 levels"),
        ({"properties": {str(n): {} for n in range(501)}}, "more than 500 properties"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema", [{}, SCHEMA, OPEN, nested(10), {"properties": {"a": True}, "additionalProperties": False}]
)
def test_a_good_schema_is_accepted(schema: object) -> None:
    check_schema(schema)
