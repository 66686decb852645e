"""Define the metric that every process has, and begin counters at 0."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Final

from prometheus_client import Gauge
from prometheus_client.metrics import MetricWrapperBase

from store import __version__

BUILD: Final = Gauge(
    "pawl_build_info",
    "1, with the version of Pawl that runs.",
    ["version"],
    multiprocess_mode="livemostrecent",
)


def show_version() -> None:
    """Set the metric `pawl_build_info`, which tells the version of Pawl that this process runs."""
    BUILD.labels(__version__).set(1)


def begin_at_zero(known: Mapping[MetricWrapperBase, Iterable[Iterable[str]]]) -> None:
    """Create each metric for every combination of its known label values, with the value 0.

    For Prometheus's `rate` and `increase`, a counter that is first seen at 1 has not grown.
    """
    for metric, values in known.items():
        for labels in product(*values):
            metric.labels(*labels)
