"""Our quicker metrics count as prometheus_client's do."""

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from proxy.metrics import SECONDS, Counter, Histogram

Sample = tuple[str, dict[str, str], float]


def samples(metric: prometheus_client.metrics.MetricWrapperBase) -> list[Sample]:
    """All that a metric shows, but for the time at which it was made."""
    return [
        (sample.name, sample.labels, sample.value)
        for family in metric.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


@given(st.lists(st.floats(-2, 200) | st.sampled_from(SECONDS)))
def test_a_histogram(amounts: list[float]) -> None:
    shown = []
    for kind in (Histogram, prometheus_client.Histogram):
        metric = kind("s", "Times.", ["stream"], registry=CollectorRegistry(), buckets=SECONDS)
        for amount in amounts:
            metric.labels("true").observe(amount)
        shown.append(samples(metric))
    assert shown[0] == shown[1]


@given(st.lists(st.integers(0, 9)))
def test_a_counter(amounts: list[int]) -> None:
    shown = []
    for kind in (Counter, prometheus_client.Counter):
        metric = kind("c", "Calls.", ["stream"], registry=CollectorRegistry())
        metric.labels("true").inc()
        for amount in amounts:
            metric.labels("true").inc(amount)
        shown.append(samples(metric))
    assert shown[0] == shown[1]


def test_a_metric_without_its_labels_is_not_counted() -> None:
    with pytest.raises(AttributeError):
        Counter("c", "Calls.", ["stream"], registry=CollectorRegistry()).inc()
