"""Add up what was counted of records since a test began: the counters are the process's."""

from proxy.metrics import exposed_registry
from tests.support.waiting import until

COUNTERS = ("", "_stored", "_dead_lettered", "_dropped", "_deleted")
SPOOLED = "pawl_records_spooled"
_before: dict[str, float] = {}


def ledger() -> dict[str, float]:
    """The outcomes and their sum, as `/metrics` has them."""
    names = {f"pawl_records{name}_total" for name in COUNTERS} | {SPOOLED}
    shown = exposed_registry()
    return {name: shown.get_sample_value(name) or 0.0 for name in names}


def count_from_here() -> None:
    """Leave out what was counted until now; spooled records are no count, and read anew."""
    _before.update(ledger() | {SPOOLED: 0.0})


def assert_adds_up() -> None:
    """Each record that was made since is in one place."""
    made, places = _made_and_placed()
    assert made == sum(places.values()), places


async def until_adds_up() -> None:
    """The same of an ingester at work, which counts a record a moment after it has moved it."""
    await until(lambda: (found := _made_and_placed())[0] == sum(found[1].values()))


def _made_and_placed() -> tuple[float, dict[str, float]]:
    now = {name: value - _before[name] for name, value in ledger().items()}
    return now.pop("pawl_records_total"), now
