"""Texts that PostgreSQL does not take are escaped; all others stay what they are."""

from hypothesis import given
from hypothesis import strategies as st

from store.write.rows import MAX_INDEXED_BYTES, storable_call, storable_text
from tests.support.records import call, tool_event

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)


@given(ANY_TEXT)
def test_any_text_can_be_stored(value: str) -> None:
    stored = storable_text(value)
    assert "\x00" not in stored
    stored.encode()
    if "\x00" not in value and value.isprintable():
        assert stored == value


@given(ANY_TEXT, ANY_TEXT)
def test_any_call_can_be_stored(name: str, other: str) -> None:
    record = storable_call(
        call(
            name,
            served_model=other,
            response_id=name,
            finish=other,
            tool_events=(tool_event("ok", name),),
        )
    )
    for value in (record.episode, record.served_model, record.response_id, record.finish):
        assert value is not None
        assert storable_text(value) is not None
        assert "\x00" not in value
        value.encode()
    assert "\x00" not in (record.tool_events[0].tool_id or "")


def test_storable_call_is_left_unchanged() -> None:
    record = call("e", tool_events=(tool_event("ok", "t"),), response_id="\u00fc" * 1024)
    assert storable_call(record) is record


def test_response_id_too_long_for_an_index_is_dropped() -> None:
    assert storable_call(call(response_id="r" * (MAX_INDEXED_BYTES + 1))).response_id is None
