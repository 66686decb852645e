"""Accept only bodies that all parsers read alike (pure): forms, and names within JSON.

A form (`multipart/form-data`, RFC 7578) is read to check the names in it, and passed on as it came.
So forms that parsers read in different ways are errors here: delimiters within a part, repeated or
escaped names, transfer encodings, and character sets in which ASCII bytes mean something else.

If a JSON object repeats a name, the last value counts for Python's parsers, and the first for
others: the proxy would check one value, and the upstream use the other. Names are compared without
escapes, at any depth. For most bodies a count suffices: no name is repeated if the parsed body has
as many members as the bytes.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from proxy.formats.base import ModelRequest
from store.values.documents import count_members, nests_too_deep

FORM: Final = "multipart/form-data"
# vLLM's parser (Starlette) accepts at most so many fields, and as many files.
MOST_PARTS: Final = 1000
MOST_HEAD: Final = 16 * 1024
# Most characters of a name that an error message quotes.
MOST_SHOWN: Final = 64
LINE: Final = b"\r\n"
HEAD_END: Final = b"\r\n\r\n"
CLOSE: Final = b"--"
ENDS: Final = (CLOSE, CLOSE + LINE)
# RFC 2046 §5.1.1; unquoted, only characters that need no quotes and separate nothing.
_QUOTED: Final = re.compile(rb"\"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]\"")
_UNQUOTED: Final = re.compile(rb"[0-9A-Za-z'+_.-]{1,70}")
# For some parsers a backslash escapes a quote, for others it is an ordinary character.
_PARAMETER: Final = re.compile(
    rb"[ \t]*;[ \t]*([0-9A-Za-z_-]+\*?)=(\"(?:[^\"\\]|\\(?!\"))*\"|[^\s\";,\\]+)[ \t]*"
)
# Some parsers end a line at one of these.
_CONTROLS: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_TOKEN: Final = re.compile(rb"[0-9A-Za-z!#$&'*+.^_`|~-]+")
_NAME: Final = re.compile(rb"\"?([0-9A-Za-z_.\[\]-]{1,256})\"?")
# Clients send it besides `filename`, for names that are not ASCII.
_FILE_NAME: Final = b"filename*"
# Fields of a structure are written `mask[file_id]`, `images[0][file_id]` or `mask.file_id`.
_STEPS: Final = re.compile(r"[\[\].]+")
_CHARSET: Final = re.compile(r"charset[^;]*", re.IGNORECASE)
# Character sets that extend ASCII.
_PLAIN: Final = re.compile(
    r'charset\s*=\s*"?(?:utf-?8|us-ascii|iso-8859-1|windows-1252)"?\s*', re.IGNORECASE
)
# A field of this name states the character set of the others (RFC 7578 §4.6).
_CHARSET_FIELD: Final = "_charset_"
_MODEL: Final = "model"
_TRANSFER: Final = (b"7bit", b"8bit", b"binary")
_STRUCTURES: Final = ("[", "{")


class Form(msgspec.Struct, frozen=True):
    """The content of a form without its files.

    `texts` are the values of its parts. `fields` are the same values by name, as in a JSON object:
    names such as `mask[file_id]` make nested objects, and values that are JSON objects or lists are
    parsed.
    """

    texts: tuple[str, ...]
    fields: Mapping[str, Any]


class _Head(NamedTuple):
    name: str
    is_file: bool


def extends_ascii(content_type: str) -> bool:
    """Return whether a content type names no character set, or only ones that extend ASCII."""
    return all(map(_PLAIN.fullmatch, _CHARSET.findall(content_type)))


def read_form(content_type: str, body: bytes) -> Form:
    """Return the content of a form whose boundary `content_type` names.

    Raises:
        ValueError: parsers may read the form differently; the message says what is wrong.
    """
    texts: list[str] = []
    fields: dict[str, Any] = {}
    for number, (head, value) in enumerate(_parts(_boundary(content_type), body)):
        if number >= MOST_PARTS:
            raise ValueError(f"it has more than {MOST_PARTS} parts")
        if value is None:
            if head.name == _MODEL:
                raise ValueError("the part `model` is a file; send it as text")
            continue
        text = _text(value)
        if head.name == _CHARSET_FIELD and not extends_ascii(f"charset={text}"):
            raise ValueError(f"{_CHARSET_FIELD} names another character set than UTF-8")
        texts.append(text)
        _put_member(fields, head.name, _json_or_text(text))
    return Form(tuple(texts), fields)


def _boundary(content_type: str) -> bytes:
    given = content_type.encode(errors="surrogateescape").strip()
    kind = given.partition(b";")[0]
    if kind.strip().lower() != FORM.encode() or not extends_ascii(content_type):
        raise ValueError("its Content-Type is not multipart/form-data in UTF-8")
    named = _parameters(given, len(kind), "its Content-Type")
    boundary = named.get(b"boundary", b"")
    if _QUOTED.fullmatch(boundary):
        return boundary[1:-1]
    if not _UNQUOTED.fullmatch(boundary):
        raise ValueError("its Content-Type names no boundary of 1 to 70 letters and digits")
    return boundary


def _parameters(header: bytes, at: int, header_name: str) -> dict[bytes, bytes]:
    """Return a header's parameters from offset `at` on, by lower-case name, with their quotes.

    `header_name` is for the error's message.
    """
    parameters: dict[bytes, bytes] = {}
    while at < len(header):
        parameter = _PARAMETER.match(header, at)
        name = b"" if parameter is None else parameter[1].lower()
        # Other extended parameters (`name*`) repeat a name (RFC 2231).
        is_repeated = name in parameters or (name.endswith(b"*") and name != _FILE_NAME)
        if parameter is None or is_repeated:
            raise ValueError(f"{header_name} has malformed or repeated parameters")
        parameters[name] = parameter[2]
        at = parameter.end()
    return parameters


def _parts(boundary: bytes, body: bytes) -> Iterator[tuple[_Head, bytes | None]]:
    """Yield the head and the value of each part of a form; the value is None for a file.

    The body is scanned once, and files are not copied.
    """
    mark = CLOSE + boundary
    if not body.startswith(mark):
        raise ValueError("it does not begin with its boundary")
    at = len(mark)
    while body.startswith(LINE, at):
        head_end = body.find(HEAD_END, at, at + MOST_HEAD)
        begin = head_end + len(HEAD_END)
        end = body.find(mark, at)
        if head_end < 0 or end < begin + len(LINE) or not body.startswith(LINE, end - len(LINE)):
            raise ValueError("a part has no head or no end, or its boundary is within it")
        head = _head(body[at + len(LINE) : head_end])
        yield head, None if head.is_file else body[begin : end - len(LINE)]
        at = end + len(mark)
    if body[at : at + len(ENDS[1]) + 1] not in ENDS:
        raise ValueError("it does not end with its boundary")


def _head(raw: bytes) -> _Head:
    headers: dict[bytes, bytes] = {}
    for line in raw.split(LINE):
        name, colon, value = line.partition(b":")
        name = name.lower()
        is_line = colon and _TOKEN.fullmatch(name) and not _CONTROLS.search(value)
        if not is_line or name in headers:
            raise ValueError("a part has headers that are malformed or repeated")
        headers[name] = value.strip(b" \t")
    disposition = headers.get(b"content-disposition", b"")
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    kind = disposition.partition(b";")[0]
    named = _parameters(disposition, len(kind), "the Content-Disposition of a part")
    own = _NAME.fullmatch(named.get(b"name", b""))
    if kind.strip().lower() != b"form-data" or own is None:
        raise ValueError("a part has no name, or one that is not of letters, digits and . _ - [ ]")
    if headers.get(b"content-transfer-encoding", _TRANSFER[0]).lower() not in _TRANSFER:
        raise ValueError("a part has a Content-Transfer-Encoding")
    if not extends_ascii(content_type) or content_type.lower().startswith("multipart/"):
        raise ValueError("a part has parts of its own, or is not in UTF-8")
    # Some parsers take a file without a name for a text.
    return _Head(own[1].decode(), named.get(b"filename", b'""') != b'""')


def _text(value: bytes) -> str:
    """Decode a value as vLLM's parser does: as UTF-8 or else as Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _json_or_text(text: str) -> Any:
    """Return the JSON object or list that a text holds, or the text.

    Raises:
        ValueError: the JSON nests too deep, repeats a name, or has too long a number.
    """
    if not text.lstrip().startswith(_STRUCTURES):
        return text
    if nests_too_deep(text.encode()):
        raise ValueError("one of its parts nests too deep")
    try:
        return json.loads(text, object_pairs_hook=members_once)
    except json.JSONDecodeError:
        return text
    except RepeatedName as error:
        raise ValueError(f"one of its parts has {str(error)[:MOST_SHOWN]!r} twice") from error
    except ValueError as error:
        # A number of more digits than Python converts.
        raise ValueError("one of its parts has a number of too many digits") from error


def _put_member(fields: dict[str, Any], name: str, value: Any) -> None:
    """Add a part's value to `fields` under its name, which may be a path such as `a[b]`.

    Texts of one name become a list.

    Raises:
        ValueError: another value has the name, or a part of the path.
    """
    *path, last = [step for step in _STEPS.split(name) if step] or [name]
    for step in path:
        fields = fields.setdefault(step, {})
        if not isinstance(fields, dict):
            raise ValueError(f"{name} is given both as a value and as an object")
    known = fields.get(last)
    if known is None:
        fields[last] = value
    elif isinstance(value, str) and isinstance(known, (str, list)):
        fields[last] = [*([known] if isinstance(known, str) else known), value]
    else:
        raise ValueError(f"{name} is repeated, and not as text")


_NESTED: Final = frozenset({dict, list})


class RepeatedName(ValueError):
    """Report that a JSON object has the same name twice; the message is the name."""


def repeated_name(request: ModelRequest) -> str | None:
    """Return a name that an object of a request's body has twice, or None if there is none.

    Raises:
        ValueError: a value of the body cannot be read.
    """
    if request.parsed is None or count_members(request.body) == _count_members(request.fields):
        return None
    # Unparsed values have members too, so the names themselves are compared now.
    try:
        json.loads(request.body, object_pairs_hook=members_once)
    except RepeatedName as repeated:
        return str(repeated)
    return None


def members_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with these members; pass this to a JSON parser as `object_pairs_hook`.

    Raises:
        RepeatedName: two members have the same name.
    """
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise RepeatedName(name)
        members[name] = value
    return members


def _count_members(tree: object) -> int:
    """Return how many members all objects within a parsed value have together."""
    count = 0
    waiting: list[Any] = [tree]
    while waiting:
        value = waiting.pop()
        if type(value) is dict:
            count += len(value)
            value = value.values()
        waiting += [one for one in value if type(one) in _NESTED]
    return count
