"""Define the words that the dashboard is described in: queries, kinds of panels, bands and rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

# What every query about policies is narrowed down to: those that the reader has selected.
OF_POLICY: Final = '{policy=~"$policy"}'


class Query(NamedTuple):
    """Ask Prometheus: a PromQL expression, and the legend of each series that it gives.

    An `instant` query is asked once, for the end of the time shown.
    """

    expression: str
    legend: str
    instant: bool = False


def rate(metric: str, *labels: str, legend: str = "", of: str = "") -> Query:
    """Return a counter's increase a second by `labels`, which are the legend if none is given."""
    shown = legend or " ".join(f"{{{{{label}}}}}" for label in labels)
    by = f" by ({', '.join(labels)}) " if labels else ""
    return Query(f"sum{by}(rate({metric}{of}[$__rate_interval]))", shown)


def rate_of_policy(metric: str, *labels: str, legend: str = "") -> Query:
    """Return what `rate` does, of the selected policies alone."""
    return rate(metric, *labels, legend=legend, of=OF_POLICY)


def newest(metric: str, legend: str = "{{policy}}") -> Query:
    """Return each selected policy's value of a gauge."""
    return Query(f"max by (policy) ({metric}{OF_POLICY})", legend)


def in_the_time_shown(metric: str, legend: str) -> Query:
    """Return by how much a counter increased in the time that the dashboard shows."""
    return Query(f"sum(increase({metric}[$__range]))", legend, instant=True)


def quantile(share: float, metric: str) -> Query:
    """Return a quantile of a histogram, `share` between 0 and 1."""
    buckets = f"sum by (le) (rate({metric}_bucket[$__rate_interval]))"
    return Query(f"histogram_quantile({share}, {buckets})", f"p{100 * share:g}")


def quantiles(metric: str) -> list[Query]:
    """Return the median, p95 and p99 of a histogram."""
    return [quantile(share, metric) for share in (0.5, 0.95, 0.99)]


@dataclass(frozen=True, slots=True)
class Panel:
    """Describe a panel: what it asks, and the parts of Grafana's model that make its kind.

    Attributes:
        kind: Grafana's `type`.
        title: its title, which no other panel has.
        text: a sentence that explains it.
        unit: Grafana's name of the unit.
        queries: what it asks.
        defaults: `fieldConfig.defaults` beside the unit.
        options: Grafana's `options`.
        overrides: `fieldConfig.overrides`.
    """

    kind: str
    title: str
    text: str
    unit: str
    queries: Sequence[Query]
    defaults: dict[str, Any]
    options: dict[str, Any]
    overrides: Sequence[dict[str, Any]] = ()


class Band:
    """Put panels side by side, which share the width; `height` is in Grafana's units."""

    def __init__(self, height: int, *panels: Panel) -> None:
        """Store the height and the panels, from left to right."""
        self.height = height
        self.panels = panels


class Row:
    """Title a part of the dashboard: bands below each other."""

    def __init__(self, title: str, *bands: Band) -> None:
        """Store the title and the bands, from top to bottom."""
        self.title = title
        self.bands = bands


LINES_OPTIONS: Final = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
NUMBER_OPTIONS: Final = {
    "colorMode": "background",
    "graphMode": "area",
    "justifyMode": "auto",
    "orientation": "auto",
    "textMode": "auto",
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
}


def lines(
    title: str, text: str, unit: str, *queries: Query, shape: str = "linear", **limits: Any
) -> Panel:
    """Return a panel of lines over time.

    Args:
        title: its title.
        text: a sentence that explains it.
        unit: Grafana's name of the unit.
        queries: what it asks.
        shape: Grafana's `lineInterpolation`.
        limits: `min` (0 unless given; None for none), `max` and `decimals` of the axis;
            `stacked` and `joined` (over gaps) as booleans; `bytes_right`, the legend of the
            series that is measured in bytes on an axis of its own.
    """
    stacked, joined = limits.pop("stacked", False), limits.pop("joined", False)
    bytes_right = limits.pop("bytes_right", None)
    custom = {
        "drawStyle": "line",
        "lineInterpolation": shape,
        "lineWidth": 1,
        "fillOpacity": 30 if stacked else 8,
        "showPoints": "auto",
        "spanNulls": joined,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    axis = {name: value for name, value in ({"min": 0} | limits).items() if value is not None}
    defaults = {"custom": custom, "color": {"mode": "palette-classic"}} | axis
    overrides = [_on_the_right(bytes_right)] if bytes_right else []
    return Panel("timeseries", title, text, unit, queries, defaults, LINES_OPTIONS, overrides)


def stack(title: str, text: str, unit: str, *queries: Query) -> Panel:
    """Return a panel of areas on top of each other: parts of a whole."""
    return lines(title, text, unit, *queries, stacked=True)


def stairs(title: str, text: str, unit: str, *queries: Query, **limits: Any) -> Panel:
    """Return a panel of lines that stay at a value until the next: what changes at updates."""
    return lines(title, text, unit, *queries, shape="stepAfter", **limits)


def number(
    title: str,
    text: str,
    unit: str,
    query: Query,
    below: str,
    limit: float,
    above: str,
    *words: str,
) -> Panel:
    """Return a panel of one number; its colour is `above` from `limit` on, and `below` under it.

    `words` are shown instead of the values 0, 1, ….
    """
    steps = [{"color": below, "value": None}, {"color": above, "value": limit}]
    shown = {str(value): {"text": word, "index": value} for value, word in enumerate(words)}
    defaults = {
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds"},
        "mappings": [{"type": "value", "options": shown}] if shown else [],
        "noValue": "–",
    }
    return Panel("stat", title, text, unit, [query], defaults, NUMBER_OPTIONS)


def _on_the_right(legend: str) -> dict[str, Any]:
    unit = {"id": "unit", "value": "bytes"}
    axis = {"id": "custom.axisPlacement", "value": "right"}
    return {"matcher": {"id": "byName", "options": legend}, "properties": [unit, axis]}
