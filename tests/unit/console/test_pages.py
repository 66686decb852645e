"""What the console shows of values, and the files that it sends along."""

from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files

import pytest

from console.pages import format_number, time_element, visible_text

VENDOR = files("console") / "static" / "vendor"
# Of the packages htmx.org 2.0.11 and uplot 1.6.32 on npm.
HASHES = {
    "htmx-2.0.11.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
    "htmx-LICENSE": "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
    "uplot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot-1.6.32.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot-LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def test_vendored_files_have_the_published_hashes() -> None:
    found = {one.name: one.read_bytes() for one in VENDOR.iterdir()}
    assert {name: sha256(content).hexdigest() for name, content in found.items()} == HASHES
    assert sum(map(len, found.values())) <= 120 * 1024


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("<script>alert('a')</script>", "&lt;script&gt;alert(&#39;a&#39;)&lt;/script&gt;"),
        ("user\u202egpj.exe", "user<i>202E</i>gpj.exe"),
        ("a\x00\x1b[31mb\r", "a<i>0000 001B</i>[31mb<i>000D</i>"),
        ("half \ud83d of a pair", "half <i>D83D</i> of a pair"),
        ("pass\u200bword\ufeff", "pass<i>200B</i>word<i>FEFF</i>"),
        ("\u200b" * 20, f"<i>{' '.join(['200B'] * 8)} +12</i>"),
        ("e" + "\u0301" * 50 + "x", "e" + "\u0301" * 4 + "x"),
        ("مرحبا", "مرحبا"),
    ],
)
def test_hostile_text_is_escaped_and_invisible_characters_are_shown(text: str, shown: str) -> None:
    assert visible_text(text) == f'<bdi class="text">{shown}</bdi>'


def test_long_text_is_cut_and_says_so_with_a_link_to_the_rest() -> None:
    shown = visible_text("x" * 50, 10, "/calls/1/reply?a=1&b=2")
    assert "xxxxxxxxxx <span" in shown
    assert '40 more <a href="/calls/1/reply?a=1&amp;b=2">raw</a>' in shown
    assert len(visible_text("\u202e<" * 1_000_000)) < 100_000


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0, "0"),
        (1234567, "1\u202f234\u202f567"),
        (0.51239, "0.512"),
        (12.3456, "12.3"),
        (-0.25, "\u22120.250"),
        (3.0, "3"),
        (1.5e-7, "1.5e\u221207"),
        (123456.7, "123\u202f457"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_shown_with_few_digits_and_grouped_thousands(
    value: float | None, shown: str
) -> None:
    assert format_number(value) == shown


def test_time_is_marked_up_for_the_viewers_zone() -> None:
    moment = datetime(2026, 11, 26, 12, 0, 1, tzinfo=UTC)
    assert time_element(moment) == (
        '<time datetime="2026-11-26T12:00:01.000+00:00">2026-11-26 12:00:01 UTC</time>'
    )
    assert time_element(None) == "–"
