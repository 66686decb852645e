"""Labels are few: nothing that a client or an upstream makes up becomes a series."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.metrics import metric_label, status_label


@given(st.text())
def test_a_metric_s_name_is_one_of_three(metric: str) -> None:
    wanted = metric if metric in ("reward", "tool_status") else "other"
    assert metric_label(metric) == wanted


def test_those_that_we_name_are_told_apart() -> None:
    assert [metric_label(name) for name in ("reward", "tool_status", "f1", "")] == [
        "reward",
        "tool_status",
        "other",
        "other",
    ]


def test_a_status_is_one_that_http_defines_or_a_class() -> None:
    found = {status_label(status) for status in range(100, 1000)}
    assert {"200", "404", "429", "503", "5xx", "4xx", "9xx"} <= found
    assert len(found) < 90
    assert status_label(529) == "5xx"
