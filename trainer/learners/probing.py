"""Make the rows that versions are probed with: ordinary text, the same for every version.

Nothing of an episode is in them, so that a version's manifest keeps nothing that somebody may want
to be deleted.
"""

from typing import Any, Final

from trainer.batches import Row, bare_row

# Both sides are sure enough of ordinary text to be compared; random ids have log-probabilities so
# low that bfloat16 differs by more than the tolerance. Half of each text is the prompt.
PROBE_TEXTS: Final = (
    "The river rises in the hills north of the town and runs past the old mill to the sea. In the"
    " spring it carries the snow of the whole valley, and the bridge is closed for a week.",
    "Question: a train leaves at nine and needs two hours and a half. When does it arrive? Answer:"
    " it arrives at half past eleven, because nine and two is eleven, and half an hour is left.",
    "To make the soup, wash the vegetables and cut them into small pieces. Boil two litres of water"
    " with a little salt, put everything in, and let it cook over a low fire until it is soft.",
    '{"name": "search", "arguments": {"query": "opening hours of the library", "limit": 3}} The'
    " library is open from ten to six on weekdays, and from ten to two on Saturdays.",
)
PROBE_LENGTH: Final = 32


def probe_rows(tokenizer: Any) -> list[Row]:
    """Return a row for each text, to compare the served log-probabilities of."""
    rows = []
    for number, text in enumerate(PROBE_TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        # A tokenizer of few words has few ids for a text.
        ids = (ids * PROBE_LENGTH)[:PROBE_LENGTH]
        rows.append(bare_row(number, ids[: PROBE_LENGTH // 2], ids[PROBE_LENGTH // 2 :]))
    return rows
