"""The file of rules: what it may say, and what an error tells."""

from pathlib import Path

import pytest

from proxy.errors import BadRedaction
from proxy.redaction.rules import open_rules, parse_rules


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no table [[rule]]; write one for each rule"),
        ("[[rule]", "r.toml is not TOML"),
        ("[[rule]]\npattern = 'x'", 'rule number 1: name: Field required; write name = "cards"'),
        ("[[rule]]\nname = 'a b'\npattern = 'x'", 'name = "cards", of letters, digits'),
        ("[[rule]]\nname = 'a'", "rule 'a': write either pattern or field"),
        ("[[rule]]\nname = 'a'\npattern = 'x'\nfield = 'request.y'", "either pattern or field"),
        ("[[rule]]\nname = 'a'\npatern = 'x'", "unknown key 'patern': did you mean pattern?"),
        ("[[rule]]\nname = 'a'\npattern = '('", "rule 'a': pattern: RE2 cannot read '('"),
        ("[[rule]]\nname = 'a'\npattern = '(?<=x)y'", "no look-around and no back-references"),
        ("[[rule]]\nname = 'a'\npattern = '(x)\\1'", "no look-around and no back-references"),
        ("[[rule]]\nname = 'a'\npattern = 'x*'", "pattern: it matches the empty text"),
        ("[[rule]]\nname = 'a'\nfield = 'messages'", "write request. or reply., and the names"),
        ("[[rule]]\nname = 'a'\nfield = 'request..x'", "'request..x' is no path of a field"),
        ("[[rule]]\nname = 'a'\nfield = 'request'", "'request' is no path of a field"),
        (
            "[[rule]]\nname = 'a'\npattern = 'x'\n[[rule]]\nname = 'a'\npattern = 'y'",
            "two rules are named 'a'; give each a name of its own",
        ),
    ],
)
def test_a_rule_that_cannot_be_used_names_itself_and_the_remedy(text: str, says: str) -> None:
    with pytest.raises(BadRedaction, match=r"^r\.toml") as raised:
        parse_rules(text, "r.toml")
    assert says in str(raised.value)


def test_a_file_that_is_not_there_is_an_error_and_no_file_is_none(tmp_path: Path) -> None:
    assert open_rules(None) is None
    with pytest.raises(BadRedaction, match=r"PAWL_REDACTION names .*Unset it to store calls as"):
        open_rules(tmp_path / "none.toml")
