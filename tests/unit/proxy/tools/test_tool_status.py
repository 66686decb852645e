"""x-pawl-tool-status: an RFC 9651 list, or a clear word on what is wrong with it."""

import pytest

from proxy.tool_events import ToolStatusError, parse_tool_status


def test_the_contract_example_is_read() -> None:
    events = parse_tool_status('ok;id="call_1", error;id="call_2";detail="exit 2";ms=12.5')
    assert [(e.status, e.tool_id, e.detail, e.ms) for e in events] == [
        ("ok", "call_1", None, None),
        ("error", "call_2", "exit 2", 12.5),
    ]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ('ok;id="a', "RFC 9651"),
        ('fine;id="a"', "fine"),
        ("ok", "no id"),
        ("ok;id=a", "id must be a string"),
        ('ok;id="a";colour="red"', "colour"),
        ('ok;id="a";ms="soon"', "ms must be a number"),
        ('ok;id="a";ms=-1', "ms must be a number"),
        ('"ok";id="a"', "ok is not a tool status"),
        ("(ok error)", "not a tool status"),
    ],
)
def test_what_is_wrong_is_named(value: str, named: str) -> None:
    with pytest.raises(ToolStatusError, match=named):
        parse_tool_status(value)
