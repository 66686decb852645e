"""However versions come and go, they never need more adapter slots than a server has."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from store.adapter_slots import Live, due_in, free_slots, needed_slots

COUNTS = st.integers(min_value=0, max_value=20)
LIVE = st.builds(Live, serving=COUNTS, held=COUNTS, kept=COUNTS, unloading=COUNTS, coming=COUNTS)
SLOTS = st.integers(min_value=1, max_value=16)


@given(LIVE, SLOTS)
def test_a_slot_is_free_only_below_the_limit(live: Live, slots: int) -> None:
    limit = max(slots, live.serving + live.held + 1)
    assert free_slots(live, slots) == max(0, limit - live.total)


@given(st.lists(st.sampled_from(["claim", "publish", "give up", "unload", "forget"])), SLOTS)
def test_live_versions_never_exceed_the_slots(events: list[str], slots: int) -> None:
    serving = kept = unloading = coming = 0
    for event in events:
        live = Live(serving=serving, kept=kept, unloading=unloading, coming=coming)
        if event == "claim" and not coming and free_slots(live, slots):
            coming = 1
        elif event == "publish" and coming:
            coming, kept, serving = 0, kept + serving, 1
        elif event == "give up":
            coming = 0
        elif event == "unload" and kept:
            kept, unloading = kept - 1, unloading + 1
        elif event == "forget":
            unloading = 0
        # One that serves and one that replaces it are the least there can be.
        assert serving + kept + unloading + coming <= max(slots, 2)


@given(SLOTS)
def test_what_serves_or_is_decided_about_always_has_room_for_the_next(slots: int) -> None:
    """Else no version would be made for as long as a trial, or a person, takes."""
    for serving in range(20):
        alone = Live(
            serving=serving, held=serving, gated=2 * serving, kept=0, unloading=0, coming=0
        )
        assert free_slots(alone, slots) >= 1


@given(
    LIVE, SLOTS, st.floats(min_value=0.0, max_value=1e6), st.floats(min_value=0.0, max_value=1e6)
)
def test_half_the_slots_are_taken_at_once_and_the_others_at_even_intervals(
    live: Live, slots: int, tail_s: float, since_s: float
) -> None:
    timed = msgspec.structs.replace(live, tail_s=tail_s, since_s=since_s)
    others = max(1, slots - live.serving - live.held)
    wait_s = due_in(timed, slots)
    if 2 * free_slots(live, slots) >= others:
        assert wait_s == 0.0
    else:
        # One version after the other, each kept for `tail_s`, then needs just the other slots.
        assert wait_s == max(0.0, tail_s / others - since_s)


def test_after_an_outage_a_server_with_idle_slots_is_not_kept_waiting() -> None:
    live = Live(serving=1, kept=3, unloading=0, coming=0, tail_s=36_000.0, since_s=60.0)
    assert due_in(live, 8) == 0.0
    assert due_in(msgspec.structs.replace(live, kept=4), 8) > 0.0


@given(LIVE, SLOTS, st.integers(min_value=0, max_value=20))
def test_the_first_of_a_set_needs_room_for_all_but_no_more_than_there_can_be(
    live: Live, slots: int, together: int
) -> None:
    alone = Live(serving=live.serving, held=live.held, kept=0, unloading=0, coming=0)
    needed = needed_slots(live, slots, together)
    assert 1 <= needed <= max(1, together)
    assert free_slots(alone, slots) >= needed
    assert needed == max(1, together) or needed == free_slots(alone, slots)


@given(LIVE, SLOTS, st.integers(min_value=0, max_value=20))
def test_what_others_are_ready_to_go_live_with_needs_one_slot_and_is_due(
    live: Live, slots: int, together: int
) -> None:
    asked = msgspec.structs.replace(live, ready=1, partners_ready=1, tail_s=1e9, since_s=0.0)
    assert needed_slots(asked, slots, together) == 1
    assert due_in(asked, slots) == 0.0


@given(LIVE, SLOTS)
def test_where_nothing_was_retired_yet_or_nothing_made_it_is_due(live: Live, slots: int) -> None:
    assert due_in(live, slots) == 0.0
    assert due_in(msgspec.structs.replace(live, tail_s=1e6), slots) == 0.0
    assert due_in(msgspec.structs.replace(live, since_s=0.0), slots) == 0.0
