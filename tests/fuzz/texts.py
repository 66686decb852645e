"""Bytes as nobody should send them, and as clients and servers do but for something in them."""

from collections.abc import Mapping
from typing import Final

import msgspec

from tests.fuzz.tape import Grammar, Tape

# The deepest is past what Python's parsers follow; the others are on both sides of every limit.
DEPTHS: Final = (2, 99, 100, 101, 128, 500, 979, 1_000, 1_100, 2_000, 3_000)
BRACKETS: Final = ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"":', b"}]"))
PLAIN: Final = (b"null", b"true", b"false", b"[]", b"{}", b"1", b"0", b'""', b'"a"')
NUMBERS: Final = (
    *(b"-0", b"2", b"-1", b"0.5", b"1.0", b"1e-6", b"1E400", b"-1e999", b"2147483648"),
    *(b"18446744073709551616", b"9" * 400, b"0." + b"1" * 400, b"1e-400", b"01", b"NaN", b"-"),
)
STRINGS: Final = (
    *(b'"m"', b'"stop"', b'"call_1"', b'"a\\nb"', b'"\\u0000"', b'"\\ud83d"', b'"\\udc00x"'),
    *(b'"\xff"', b'"\xc3"', b'"\xed\xa0\x80"', '"\U0001f600"'.encode(), '"\u2028\u0085"'.encode()),
    *(b'"a\nb"', b'"' + b"x" * 1_025 + b'"', b'"</think>"', b'"data: [DONE]"', b'"\\', b'"\\u12"'),
)
BLANKS: Final = (b"", b"", b"", b"", b" ", b"\n", b"\r\n", b"\t", b"\n\ndata: x\n")
MEMBERS: Final = 3


def quoted(text: bytes) -> bytes:
    """Any text as a JSON string."""
    return b'"%b"' % text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def deep(tape: Tape) -> bytes:
    """Lists and objects in each other, many levels."""
    depth, (opening, closing) = tape.pick(DEPTHS), tape.pick(BRACKETS)
    if tape.calm:
        depth = DEPTHS[0]
    inner = tape.pick((b"1", b"", b'""', b"1e400"))
    return opening * depth + inner + closing * depth


def anything(tape: Tape, levels: int = 3) -> bytes:
    """Any JSON there is, and some that is none."""
    if tape.calm:
        return tape.pick(PLAIN)
    if levels and tape.below(4) == 3:
        return _nest(tape, levels - 1)
    match tape.below(8):
        case 0 | 1 | 2:
            found = tape.pick(PLAIN)
        case 3 | 4:
            found = tape.pick(NUMBERS)
        case 5 | 6:
            found = tape.pick(STRINGS)
        case _:
            found = deep(tape) if tape.rarely() else quoted(tape.bytes(6))
    return found


def _nest(tape: Tape, levels: int) -> bytes:
    members = [anything(tape, levels) for _ in range(tape.below(MEMBERS + 1))]
    if tape.below(2):
        return b"[%b]" % b",".join(members)
    return b"{%b}" % b",".join(tape.pick(STRINGS) + b":" + member for member in members)


def listed(member: Grammar, most: int = MEMBERS) -> Grammar:
    """Lists of such members."""

    def write(tape: Tape) -> bytes:
        return b"[%b]" % b",".join([member(tape) for _ in range(tape.below(most + 1))])

    return write


def one_of(*texts: bytes) -> Grammar:
    """One of these; while it is calm, one that every parser reads."""
    sound = tuple(filter(_is_sound, texts)) or texts
    return lambda tape: tape.pick(sound if tape.calm else texts)


def _is_sound(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def either(*grammars: Grammar) -> Grammar:
    """One of these grammars."""
    return lambda tape: tape.pick(grammars)(tape)


def shaped(usual: Mapping[str, Grammar], few: Mapping[str, Grammar] | None = None) -> Grammar:
    """Objects of an API's fields, most there and as they should be, others anything.

    Of `few`, three are there at most. A field may come twice, and so may one that nobody knows.
    """
    names, rare = tuple(usual), tuple(few or ())
    known = {**usual, **(few or {})}

    def write(tape: Tape) -> bytes:
        # They come first, while there is something to choose from.
        chosen = [tape.pick(rare) for _ in range(tape.below(4) if rare else 0)]
        chosen += [name for name in names if not tape.rarely()]
        if tape.rarely():
            chosen.append(tape.pick((*names, "odd")))
        blank = b"" if tape.calm else tape.pick(BLANKS)
        return b"{%b}" % (b"," + blank).join([field(tape, name) for name in chosen])

    def field(tape: Tape, name: str) -> bytes:
        grammar = anything if tape.rarely() else known.get(name, anything)
        return quoted(name.encode()) + b":" + grammar(tape)

    return write


def damaged(whole: Grammar) -> Grammar:
    """As an API has it half of the time, else strange.

    Of what is strange, now and then some places are flipped, cut out, repeated or written over.
    """

    def write(tape: Tape) -> bytes:
        tape.calm = tape.below(2) == 0
        data = bytearray(whole(tape))
        if tape.calm:
            tape.calm = False
            return bytes(data)
        for _ in range(max(0, tape.below(6) - 2)):
            _damage(tape, data)
        return bytes(data)

    return write


def _damage(tape: Tape, data: bytearray) -> None:
    at, length = tape.below(len(data) + 1), tape.pick((1, 1, 4, 64))
    match tape.below(4):
        case 0:
            data[at:at] = tape.bytes(8)
        case 1 if at < len(data):
            data[at] ^= 1 << tape.below(8)
        case 2:
            del data[at : at + length]
        case _:
            data[at:at] = data[at : at + length]


def cut(tape: Tape, data: bytes) -> list[bytes]:
    """Cut it at some places, or, where it is short, at each byte."""
    match tape.below(4):
        case 0:
            return [data]
        case 1 if len(data) < 1_000:
            return [data[at : at + 1] for at in range(len(data))]
        case _:
            places = sorted(tape.below(len(data) + 1) for _ in range(tape.below(9)))
            return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
