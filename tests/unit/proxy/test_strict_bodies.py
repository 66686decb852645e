"""A form is read as all readers read it, or not at all; a name that comes twice is found."""

import json
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest
from aiohttp import FormData
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import read_request
from proxy.strict_bodies import MOST_PARTS, Form, extends_ascii, read_form, repeated_name

TYPE = "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n%s\r\n'
END = b"--x--\r\n"


def said(*pairs: tuple[bytes, bytes]) -> Form:
    return read_form(TYPE, b"".join(PART % pair for pair in pairs) + END)


names = st.text("abcXYZ019_-", min_size=1, max_size=8)
texts = st.text(max_size=40).filter(lambda text: not text.lstrip().startswith(("[", "{")))
# A name with half of a character is none that the library can send.
shown = st.text(
    st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs"]),
    max_size=8,
)
files = st.dictionaries(names, st.tuples(shown, st.binary(max_size=80)), max_size=2)


@given(st.dictionaries(names, texts, max_size=4), files)
def test_form_written_by_the_sdks_http_library_is_read(
    fields: dict[str, str], files: dict[str, tuple[str, bytes]]
) -> None:
    given = {name: (f"{file[0]}.wav", file[1]) for name, file in files.items()}
    given = given or {"file": ("a.wav", b"\xff\r\n--x\r\n")}
    request = httpx2.Request("POST", "http://x", data=fields, files=given)
    form = read_form(request.headers["content-type"], request.read())
    assert form.texts == tuple(fields.values())


@given(st.lists(st.tuples(names, texts), max_size=4), st.binary(max_size=80))
def test_form_written_by_aiohttp_is_read(fields: list[tuple[str, str]], file: bytes) -> None:
    data = FormData()
    for name, text in fields:
        data.add_field(name, text.encode(errors="replace").decode(), content_type="text/plain")
    data.add_field("file", file, filename="ä 1.wav", content_type="audio/wav")
    body: Any = data()
    written = b"".join(
        b"--%s\r\n%s%s\r\n" % (body._boundary, part._binary_headers, part._value)
        for part, _, _ in body._parts
    )
    form = read_form(body.content_type, written + b"--%s--\r\n" % body._boundary)
    assert len(form.texts) == len(fields)


@pytest.mark.parametrize(
    "head",
    [
        # .NET, Apache's HttpClient, curl, urllib3.
        b"Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=model",
        b'Content-Disposition: form-data; name="model"\r\nContent-Type: text/plain\r\n'
        b"Content-Transfer-Encoding: 8bit",
        b'content-disposition:form-data;name="model"\r\nContent-Length: 1',
        b"Content-Disposition: form-data; name=\"model\"; filename*=utf-8''%C3%A4.wav",
        b'Content-Disposition: form-data; name="model"; filename=""',
    ],
)
def test_part_of_a_form_is_read_as_real_clients_write_it(head: bytes) -> None:
    form = read_form(
        'multipart/form-data; charset=UTF-8; boundary="x"',
        b"--x\r\n" + head + b"\r\n\r\nm@1\r\n--x--",
    )
    assert form == Form(("m@1",), {"model": "m@1"})


@pytest.mark.parametrize(
    ("pairs", "fields"),
    [
        ([(b"mask[file_id]", b"f")], {"mask": {"file_id": "f"}}),
        ([(b"mask.file_id", b"f")], {"mask": {"file_id": "f"}}),
        ([(b"images[0][file_id]", b"f")], {"images": {"0": {"file_id": "f"}}}),
        ([(b"images[][file_id]", b"f")], {"images": {"file_id": "f"}}),
        ([(b"file_ids[]", b"f"), (b"file_ids[]", b"g")], {"file_ids": ["f", "g"]}),
        ([(b"a", b"1"), (b"a", b"2"), (b"a", b"3")], {"a": ["1", "2", "3"]}),
        (
            [(b"mask", b' {"file_id": "f"}'), (b"mask[n]", b"1")],
            {"mask": {"file_id": "f", "n": "1"}},
        ),
        ([(b"images", b'[{"file_id": "f"}]')], {"images": [{"file_id": "f"}]}),
        ([(b"prompt", b"[sic] a fox {")], {"prompt": "[sic] a fox {"}),
        ([(b"mask", b'{"file_id": "f", "x": "\xff"}')], {"mask": {"file_id": "f", "x": "ÿ"}}),
        ([(b"model", b"")], {"model": ""}),
    ],
)
def test_form_fields_are_nested_as_their_names_say(
    pairs: list[tuple[bytes, bytes]], fields: Mapping[str, Any]
) -> None:
    form = said(*pairs)
    assert form.fields == fields
    assert len(form.texts) == len(pairs)


def test_files_in_a_form_are_skipped_with_any_content() -> None:
    body = FILE % b'{"file_id": "f"}\r\n\r\nm@1\r\n-x--' + PART % (b"model", b"m") + END
    assert read_form(TYPE, body) == Form(("m",), {"model": "m"})
    assert read_form(TYPE, b"--x--") == Form((), {})


ONE = PART % (b"model", b"m")
# Forms that name their boundary in an unclear way.
UNCLEAR_TYPES = {
    "no boundary": "multipart/form-data",
    "two boundaries": "multipart/form-data; boundary=x; boundary=y",
    "an empty boundary": 'multipart/form-data; boundary=""',
    "a boundary in pieces": "multipart/form-data; boundary=x; boundary*0=y",
    "another type": "multipart/mixed; boundary=x",
    "utf-7": "multipart/form-data; boundary=x; charset=utf-7",
    "utf-16": "multipart/form-data; charset='utf-16'; boundary=x",
    "an extended charset": "multipart/form-data; boundary=x; charset*=utf-8''utf-7",
}
# What is unclear about one part, made of a part that is not.
UNCLEAR_PARTS = {
    "no name": (b'name="model"', b'filename="f"'),
    "two names": (b'"model"', b'"a"; name="model"'),
    "an extended name": (b"name=", b"name*=utf-8''"),
    "both kinds of name": (b"name=", b"name*=utf-8''a; name="),
    "a name in pieces": (b'"model"', b'"a"; name*0=mo; name*1=del'),
    "a name with an escape": (b"model", b"mo\\del"),
    "a name with a percent sign": (b"model", b"file%5Fid"),
    "a quote within a file's name": (b'name="model"', b'filename="a\\"; name=\\"b"; name="c"'),
    "a file's name that ends in a backslash": (
        b'name="model"',
        b'filename="a\\\\"; name="b"; x="; name=model; y="',
    ),
    "two dispositions": (b"\r\n\r\n", b"\r\nContent-Disposition: x\r\n\r\n"),
    "a folded header": (b"; name", b";\r\n name"),
    "an attachment": (b"form-data;", b"attachment;"),
    "base64": (b'"\r\n\r\nm', b'"\r\nContent-Transfer-Encoding: base64\r\n\r\nbQ=='),
    "a part in utf-7": (b'"\r\n', b'"\r\nContent-Type: a/b; charset=utf-7\r\n'),
    "parts of a part": (b'"\r\n', b'"\r\nContent-Type: multipart/mixed; boundary=y\r\n'),
    "a line feed alone": (b"\r\n", b"\n"),
    "too long a head": (b"\r\n\r\n", b"\r\nA: %s\r\n\r\n" % (b"b" * 20_000)),
}
UNCLEAR_BODIES = {
    "a model that is a file": FILE.replace(b'"file"', b'"model"') % b"m" + END,
    "a preamble": b"hello\r\n" + ONE + END,
    "an epilogue": ONE + END + PART % (b"model", b"n") + END,
    "no end": ONE,
    "half an end": ONE + b"--x",
    "no head": b"--x\r\n\r\nm\r\n" + END,
    "no blank line": b'--x\r\nContent-Disposition: form-data; name="model"\r\n' + END,
    "a head of line feeds": b'--x\r\nA: b\nContent-Disposition: form-data; name="m"\r\n\r\n',
    "a delimiter after a line feed": PART % (b"a", b"\n--x\nA: b\n\nm") + END,
    "a delimiter that goes on": PART % (b"a", b"\r\n--xy\r\n") + END,
    "spaces after a delimiter": ONE + ONE.replace(b"--x", b"--x ") + END,
    "a charset for all": PART % (b"_charset_", b"utf-7") + ONE + END,
    "whole and in parts": PART % (b"voice", b"alloy") + PART % (b"voice[id]", b"v") + END,
    "in parts and whole": PART % (b"voice[id]", b"v") + PART % (b"voice", b"alloy") + END,
    "two structures": (PART % (b"voice", b'{"id": "v"}')) * 2 + END,
    "too deep": PART % (b"a", b"[" * 200 + b"]" * 200) + END,
    "a number that is too long": PART % (b"a", b'[%s, {"file_id": "f"}]' % (b"9" * 5000)) + END,
    "too many parts": ONE * (MOST_PARTS + 1) + END,
}
UNCLEAR = {
    **{why: (kind, ONE + END) for why, kind in UNCLEAR_TYPES.items()},
    **{why: (TYPE, ONE.replace(*change) + END) for why, change in UNCLEAR_PARTS.items()},
    **{why: (TYPE, body) for why, body in UNCLEAR_BODIES.items()},
    "a list as boundary": ("multipart/form-data; boundary=x,y", b"--x,y--"),
}


@pytest.mark.parametrize("why", UNCLEAR)
def test_ambiguous_form_is_not_read(why: str) -> None:
    with pytest.raises(ValueError, match=r"^(it|its|a|[\w\[\].]+) "):
        read_form(*UNCLEAR[why])


PIECES = st.sampled_from(
    [
        *(b"--x", b"--", b"\r\n", b"\n", b"\r\n\r\n", b"x", b"m@1", b'{"file_id": "f"}', b"\xff"),
        *(b"Content-Disposition: form-data", b'; name="a"', b"; name=b[c]", b'; filename="f"'),
        *(b"Content-Type: text/plain", b"; charset=utf-8", b": ", b'"', b"\\", b"\x00", ONE, END),
    ]
)
bodies = st.lists(PIECES, max_size=14).map(b"".join)


@given(bodies | bodies.map(lambda inner: ONE + inner + b"\r\n" + END) | st.binary())
def test_any_bytes_as_a_form_are_read_or_refused(body: bytes) -> None:
    try:
        form = read_form(TYPE, body)
    except ValueError:
        return
    assert body.startswith(b"--x")
    assert all(text.encode() in body or text.encode("latin-1") in body for text in form.texts)


class Reader:
    """What vLLM's reader of forms, Starlette's, makes of one."""

    def __init__(self) -> None:
        self.dispositions: list[bytes] = []
        self.values: list[bytes] = []
        self._name = b""

    def begins(self) -> None:
        self.values.append(b"")

    def has(self, data: bytes, start: int, end: int) -> None:
        self.values[-1] += data[start:end]

    def names(self, data: bytes, start: int, end: int) -> None:
        self._name = data[start:end].lower()

    def says(self, data: bytes, start: int, end: int) -> None:
        if self._name == b"content-disposition":
            self.dispositions.append(data[start:end])


@pytest.mark.vllm
@given(
    bodies.map(lambda inner: ONE + inner) | bodies.map(lambda inner: ONE + inner + b"\r\n" + END)
)
def test_form_is_read_as_vllms_form_parser_reads_it(body: bytes) -> None:
    from python_multipart.multipart import MultipartParser, parse_options_header

    try:
        form = read_form(TYPE, body)
    except ValueError:
        return
    reader = Reader()
    parser = MultipartParser(
        b"x",
        {
            "on_part_begin": reader.begins,
            "on_part_data": reader.has,
            "on_header_field": reader.names,
            "on_header_value": reader.says,
        },
    )
    parser.write(body)
    parser.finalize()
    said = [parse_options_header(one)[1] for one in reader.dispositions]
    read = [
        value
        for options, value in zip(said, reader.values, strict=True)
        if not options.get(b"filename")
    ]
    assert len(form.texts) == len(read)
    for text, value in zip(form.texts, read, strict=True):
        assert value in (text.encode(), text.encode("latin-1", "replace"))
    whole = {options[b"name"].decode() for options in said if not options.get(b"filename")}
    assert {name for name in whole if name.isalpha()} <= form.fields.keys()


@given(
    st.recursive(
        st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_form_field_with_a_json_structure_is_read_as_json(value: Any) -> None:
    text = json.dumps(value).encode()
    meant = value if isinstance(value, (list, dict)) else text.decode()
    assert said((b"a", text)).fields == {"a": meant}


@pytest.mark.parametrize(
    ("content_type", "plain"),
    [
        ("", True),
        ("application/json", True),
        ("application/json; charset=utf-8", True),
        ('application/json;CHARSET="UTF-8"; x=y', True),
        ("text/plain; charset=iso-8859-1", True),
        ("application/json; charset=utf-16", False),
        ("application/json; charset=utf-7", False),
        ("application/json; charset=utf-8; charset=utf-7", False),
        ("application/json; charset*=utf-8''utf-7", False),
        ("application/json; charset", False),
    ],
)
def test_content_type_without_a_charset_or_with_an_ascii_superset_is_plain(
    content_type: str, plain: bool
) -> None:
    assert extends_ascii(content_type) is plain


TWICE: list[tuple[bytes, str]] = [
    (b'{"model": "a", "model": "b"}', "model"),
    (b'{"model": "a", "mod\\u0065l": "b"}', "model"),
    (b'{"model" : "a",\r\n"model"\t: "a"}', "model"),
    (b'{"m": [{"a": {"id": 1, "x": 2, "id": null}}]}', "id"),
    (b'{"a\\\\": 1, "b": "\\\\", "a\\\\": 2}', "a\\"),
    # What is made up for is not: a text that looks like a name, a number that is hard to read.
    (b'{"model": "a", "model": "b", "x": "\\":"}', "model"),
    (b'{"model": "a", "model": "b", "x": [":", ": "]}', "model"),
    (b'{"model": "a", "model": "b", "x": [1e400, {"y": 1}]}', "model"),
    (b'{"x": [1e400, {"y": 1, "y": 2}]}', "y"),
    # Blanks of all kinds before the colon.
    (b'{"a":1,"a"\n\t:2,"x" \r:"y"}', "a"),
]
ONCE = [
    b"{}",
    b'{"model": "a", "x": "\\"model\\": \\"b\\", :", "y": [{"model": "\\\\"}, {"model": ":"}]}',
    b'{"x": [1e400, {"y": 1}], "y": {"x": {"y": 1}}}',
    b'{"Model": "a", "model": "b"}',
    b"[1]",
    b"no JSON",
]


@pytest.mark.parametrize(("body", "name"), TWICE)
def test_repeated_json_name_in_a_request_is_found(body: bytes, name: str) -> None:
    assert repeated_name(read_request(body)) == name


@pytest.mark.parametrize("body", ONCE)
def test_unrepeated_json_names_in_a_request_are_not_reported(body: bytes) -> None:
    assert repeated_name(read_request(body)) is None


odd_texts = st.text(st.sampled_from('":\\{}[], a\u00e9'), max_size=6)
values = st.recursive(
    odd_texts | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=3),
    max_leaves=12,
)


# What may stand before a colon (RFC 8259, section 2).
blanks = st.text(st.sampled_from(" \t\n\r"), max_size=2)


def written(pairs: list[tuple[str, Any]], ascii_only: bool, blank: str) -> bytes:
    members = (
        f"{json.dumps(name, ensure_ascii=ascii_only)}{blank}: {json.dumps(value)}"
        for name, value in pairs
    )
    return ("{" + ",".join(members) + "}").encode()


@given(st.lists(st.tuples(odd_texts, values), max_size=6), st.booleans(), blanks)
def test_any_object_is_checked_for_repeated_names(
    pairs: list[tuple[str, Any]], ascii_only: bool, blank: str
) -> None:
    names = [name for name, _ in pairs]
    found = repeated_name(read_request(written(pairs, ascii_only, blank)))
    assert (found is None) == (len(set(names)) == len(names))
    assert found is None or names.count(found) > 1
