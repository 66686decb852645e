"""Join totals of which other processes count a part, and choose figures, when they are read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

TOTAL: Final = "_total"
# The label that names a policy, empty for calls that no policy served.
POLICY: Final = "policy"


class Totals(Collector):
    """Collect the metrics of a registry, where some counters include another one."""

    def __init__(self, registry: CollectorRegistry, part: str, wholes: Sequence[str]) -> None:
        """Store the registry, the counter that is a part, and those that include it.

        Args:
            registry: where the metrics are.
            part: name of a counter, without `_total`.
            wholes: names of the counters that its value is added to.
        """
        self._registry = registry
        self._part = part
        self._wholes = frozenset(wholes)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric; the part is read once, so that all its wholes have the same of it."""
        metrics = list(self._registry.collect())
        added = sum(_total(metric) for metric in metrics if metric.name == self._part)
        for metric in metrics:
            if metric.name in self._wholes:
                whole = Metric(metric.name, metric.documentation, metric.type)
                whole.add_sample(metric.name + TOTAL, {}, _total(metric) + added)
                yield whole
            else:
                yield metric


class _Chosen(Collector):
    """Collect the samples of a registry that have a policy, where that is one of the chosen."""

    def __init__(self, registry: CollectorRegistry, is_chosen: Callable[[str], bool]) -> None:
        self._registry = registry
        self._is_chosen = is_chosen

    def collect(self) -> Iterator[Metric]:
        """Yield each metric that has such a sample."""
        for metric in self._registry.collect():
            chosen = Metric(metric.name, metric.documentation, metric.type)
            chosen.samples = [
                sample
                for sample in metric.samples
                if (policy := sample.labels.get(POLICY)) and self._is_chosen(policy)
            ]
            if chosen.samples:
                yield chosen


def only_of(registry: CollectorRegistry, is_chosen: Callable[[str], bool]) -> CollectorRegistry:
    """Return the figures of a registry that are of a policy which is chosen by its name."""
    chosen = CollectorRegistry()
    chosen.register(_Chosen(registry, is_chosen))
    return chosen


def _total(metric: Metric) -> float:
    return sum(sample.value for sample in metric.samples if sample.name == metric.name + TOTAL)
