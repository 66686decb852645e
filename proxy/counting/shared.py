"""Put prometheus_client's counters in shared memory: each process counts, the keeper adds up.

A gauge's `multiprocess_mode` says how the values of several processes are joined. Of the living
processes' values `livesum` is the sum, `livemax` the largest and `livemostrecent` the newest;
`sum` adds those of all processes, dead ones included, as counters and histograms do.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, values
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
    """Hold the blocks that this process inherited from the supervisor; None: it counts alone."""

    blocks: Sequence[int] | None = None
    lock: Final = threading.Lock()


def share(blocks: Sequence[int]) -> None:
    """Keep this process's metrics in one of `blocks`; to be called before any metric is made.

    Raises:
        NoBlock: other processes hold them all.
    """
    block = take_block(blocks)
    for name in block.names:
        if json.loads(name)[1] in OF_THE_LIVING:
            # The last value of a process that is gone.
            block.set(block.place(name), 0.0, 0.0)
    _Shared.blocks = blocks
    values.ValueClass = _value_class(block)


def registry() -> CollectorRegistry:
    """Return the metrics of all processes that share blocks, or of this one if it counts alone."""
    if _Shared.blocks is None:
        return REGISTRY
    together = CollectorRegistry()
    together.register(Together(_Shared.blocks))
    return together


def is_shared() -> bool:
    """Return whether this process counts in shared blocks."""
    return _Shared.blocks is not None


def forget(gauge: Gauge, *labels: str) -> None:
    """Show this series of a gauge of mode `livemostrecent` no more, until it is set again."""
    # Shared, it keeps its place: one without a time is not shown.
    gauge.labels(*labels)._value.set(0.0)
    gauge.remove(*labels)


def _check_mode(metric: str, mode: str) -> None:
    if mode not in MODES:
        raise ValueError(
            f"metric {metric}: multiprocess_mode {mode!r} is not supported; "
            f"use one of {', '.join(filter(None, MODES))}"
        )


class _SharedValue:
    """Keep one number in a block or, if memory is short, where only this process sees it.

    Its interface is that of `prometheus_client.values.MutexValue`.
    """

    block: Block
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
        """Find the number in the block by its metric, labels and mode, or create it."""
        _check_mode(name, multiprocess_mode)
        labels = dict(zip(labelnames, labelvalues, strict=True))
        key = [typ, multiprocess_mode, metric_name, name, sorted(labels.items()), help_text]
        # Kept because they are called several times a call.
        self._store = self.block.set
        self._lock = _Shared.lock.acquire
        self._unlock = _Shared.lock.release
        with _Shared.lock:
            try:
                self._place: int | None = self.block.place(json.dumps(key))
                self._value = self.block.get(self._place)
            except OSError as error:
                self._place, self._value = None, 0.0
                log.error("not_counted", metric=name, reason=str(error))

    def inc(self, amount: float) -> None:
        # Without `with`, which takes longer than all that is between.
        self._lock()
        try:
            value = self._value = self._value + amount
            if self._place is not None:
                self._store(self._place, value)
        finally:
            self._unlock()

    def set(self, value: float, timestamp: float | None = None) -> None:
        with _Shared.lock:
            self._value = value
            if self._place is not None:
                self._store(self._place, value, timestamp or 0.0)

    def set_exemplar(self, exemplar: object) -> None:
        """Ignore an exemplar: none are kept."""

    def get(self) -> float:
        return self._value

    def get_exemplar(self) -> None:
        return None


def _value_class(block: Block) -> type[_SharedValue]:
    """Return the class that prometheus_client is to make its values of: numbers in `block`."""
    return type("SharedValue", (_SharedValue,), {"block": block})


class Together(Collector):
    """Collect the numbers of all blocks, joined over the processes."""

    def __init__(self, blocks: Sequence[int]) -> None:
        """Store the descriptors of the blocks."""
        self._blocks = blocks

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its values joined over all processes."""
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
    """Make a histogram's buckets cumulative, and add its count: the largest bucket's."""
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
            with_bound = dict(labels) | {"le": floatToGoString(bound)}  # type: ignore[no-untyped-call]
            family.add_sample(f"{family.name}_bucket", with_bound, total)
        family.add_sample(f"{family.name}_count", dict(labels), total)
