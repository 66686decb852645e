"""prometheus_client's counters in shared blocks: each process counts, the keeper adds up.

A gauge says by its `multiprocess_mode` what several processes' values mean together: `livesum`
adds those of the processes that are alive, `livemax` takes the largest and `livemostrecent` the
newest of theirs, and `sum` adds all, as counters and histograms do. What a dead process counted
goes on counting.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, values
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from proxy.counting.memory import Block, is_held, read_block, take_block

log = structlog.get_logger()

LIVE_SUM: Final = "livesum"
LARGEST: Final = "livemax"
NEWEST: Final = "livemostrecent"
OF_THE_LIVING: Final = (LIVE_SUM, LARGEST, NEWEST)
MODES: Final = ("", "sum", *OF_THE_LIVING)
Labels = tuple[tuple[str, str], ...]


class _Shared:
    """What this process was handed down."""

    blocks: Sequence[int] | None = None
    lock: Final = threading.Lock()


def share(blocks: Sequence[int]) -> None:
    """Count in a block of these from now on; before any metric is made.

    Raises:
        NoBlock: other processes hold them all.
    """
    block = take_block(blocks)
    for name in block.names:
        if json.loads(name)[1] in OF_THE_LIVING:
            # What a process that is gone said of itself.
            block.set(block.place(name), 0.0, 0.0)
    _Shared.blocks = blocks
    values.ValueClass = _value_class(block)


def registry() -> CollectorRegistry:
    """Return what all processes that share their counters count together."""
    if _Shared.blocks is None:
        return REGISTRY
    together = CollectorRegistry()
    together.register(Together(_Shared.blocks))
    return together


def is_shared() -> bool:
    """Say whether this process counts together with others."""
    return _Shared.blocks is not None


def _value_class(block: Block) -> type:
    """Return what prometheus_client makes its values of."""

    class SharedValue:
        """One number; where the machine has no memory left, one that nobody sees."""

        _multiprocess = True

        def __init__(
            self,
            typ: str,
            metric_name: str,
            name: str,
            labelnames: Sequence[str],
            labelvalues: Sequence[str],
            help_text: str,
            multiprocess_mode: str = "",
            **_: Any,
        ) -> None:
            if multiprocess_mode not in MODES:
                raise ValueError(f"{name}: no multiprocess_mode {multiprocess_mode!r} here")
            labels = dict(zip(labelnames, labelvalues, strict=True))
            key = [typ, multiprocess_mode, metric_name, name, sorted(labels.items()), help_text]
            with _Shared.lock:
                try:
                    self._place: int | None = block.place(json.dumps(key))
                    self._value = block.get(self._place)
                except OSError as error:
                    self._place, self._value = None, 0.0
                    log.error("not_counted", metric=name, reason=str(error))

        def inc(self, amount: float) -> None:
            with _Shared.lock:
                self._value += amount
                if self._place is not None:
                    block.set(self._place, self._value, 0.0)

        def set(self, value: float, timestamp: float | None = None) -> None:
            with _Shared.lock:
                self._value = value
                if self._place is not None:
                    block.set(self._place, value, timestamp or 0.0)

        def set_exemplar(self, exemplar: object) -> None:
            """No exemplars are kept."""

        def get(self) -> float:
            return self._value

        def get_exemplar(self) -> None:
            return None

    return SharedValue


class Together(Collector):
    """The numbers of all blocks, joined."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = blocks

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with what all processes counted of it."""
        families: dict[str, Metric] = {}
        joined: dict[tuple[str, str, Labels], float] = {}
        newest: dict[tuple[str, str, Labels], float] = {}
        for block in self._blocks:
            alive: bool | None = None
            for raw, value, at in read_block(block):
                typ, mode, metric, name, labels, text = json.loads(raw)
                families.setdefault(metric, Metric(metric, text, typ))
                key = (metric, name, tuple(map(tuple, labels)))
                if mode in OF_THE_LIVING:
                    alive = is_held(block) if alive is None else alive
                    if not alive:
                        continue
                if mode == LARGEST:
                    joined[key] = max(joined.get(key, value), value)
                elif mode != NEWEST:
                    joined[key] = joined.get(key, 0.0) + value
                elif at > newest.get(key, 0.0):
                    joined[key], newest[key] = value, at
        for (metric, name, labels), value in joined.items():
            families[metric].add_sample(name, dict(labels), value)
        for family in families.values():
            if family.type == "histogram":
                _accumulate(family)
            yield family


def _accumulate(family: Metric) -> None:
    """Make each bucket hold what the smaller ones do, and count what is in the largest."""
    buckets: dict[Labels, dict[float, float]] = {}
    rest = []
    for sample in family.samples:
        if "le" not in sample.labels:
            rest.append(sample)
            continue
        others = dict(sample.labels)
        bound = float(others.pop("le"))
        buckets.setdefault(tuple(sorted(others.items())), {})[bound] = sample.value
    family.samples = rest
    for labels, counts in buckets.items():
        total = 0.0
        for bound, count in sorted(counts.items()):
            total += count
            shown = dict(labels) | {"le": floatToGoString(bound)}  # type: ignore[no-untyped-call]
            family.add_sample(f"{family.name}_bucket", shown, total)
        family.add_sample(f"{family.name}_count", dict(labels), total)
