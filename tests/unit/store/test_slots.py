"""However versions come and go, they never need more adapter slots than a server has."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from store.adapter_slots import LiveCounts, free_slots, needed_slots

COUNTS = st.integers(min_value=0, max_value=20)
LIVE = st.builds(LiveCounts, serving=COUNTS, held=COUNTS, kept=COUNTS, coming=COUNTS)
SLOTS = st.integers(min_value=1, max_value=16)


@given(LIVE, SLOTS)
def test_adapter_slots_are_free_only_below_the_limit(live: LiveCounts, slots: int) -> None:
    limit = max(slots, live.serving + live.held + 1)
    assert free_slots(live, slots) == limit - live.total


@given(st.lists(st.sampled_from(["claim", "publish", "give up", "unload"])), SLOTS)
def test_live_versions_never_exceed_the_slots(events: list[str], slots: int) -> None:
    serving = kept = coming = 0
    for event in events:
        live = LiveCounts(serving=serving, kept=kept, coming=coming)
        if event == "claim" and not coming and free_slots(live, slots) > 0:
            coming = 1
        elif event == "publish" and coming:
            coming, kept, serving = 0, kept + serving, 1
        elif event == "give up":
            coming = 0
        elif event == "unload" and kept:
            kept -= 1
        # One that serves and one that replaces it are the least there can be.
        assert serving + kept + coming <= max(slots, 2)


@given(SLOTS)
def test_serving_and_gated_versions_leave_an_adapter_slot_for_the_next_version(slots: int) -> None:
    """Else no version would be made for as long as a trial, or a person, takes."""
    for serving in range(20):
        alone = LiveCounts(serving=serving, held=serving, gated=2 * serving, kept=0, coming=0)
        assert free_slots(alone, slots) >= 1


@given(LIVE, SLOTS, st.integers(min_value=0, max_value=20))
def test_first_version_to_go_live_in_a_set_needs_slots_for_the_set_as_far_as_possible(
    live: LiveCounts, slots: int, together: int
) -> None:
    alone = LiveCounts(serving=live.serving, held=live.held, kept=0, coming=0)
    needed = needed_slots(live, slots, together)
    assert 1 <= needed <= max(1, together)
    assert free_slots(alone, slots) >= needed
    assert needed == max(1, together) or needed == free_slots(alone, slots)


@given(LIVE, SLOTS, st.integers(min_value=0, max_value=20))
def test_version_that_others_of_its_set_wait_for_needs_a_single_slot(
    live: LiveCounts, slots: int, together: int
) -> None:
    asked = msgspec.structs.replace(live, ready=1, partners_ready=1)
    assert needed_slots(asked, slots, together) == 1
