"""Make Grafana's JSON model: lay the panels out, number them, add what frames them."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final

from .kinds import OF_POLICY, Band, Panel, Query, Row

FILE: Final = Path(__file__).parents[2] / "dashboards" / "grafana" / "dashboards" / "pawl.json"
SOURCE: Final = {"type": "prometheus", "uid": "pawl-prometheus"}
WIDTH: Final = 24
POLICIES: Final = "label_values(pawl_calls_total, policy)"


def dashboard_text(rows: Sequence[Row]) -> str:
    """Return the text of the dashboard's file."""
    return json.dumps(dashboard(rows), indent=2) + "\n"


def dashboard(rows: Sequence[Row]) -> dict[str, Any]:
    """Return Grafana's model of a dashboard with these rows."""
    return {
        "uid": "pawl",
        "title": "Pawl",
        "description": "Agents at work, and how they get better.",
        "tags": ["pawl"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "timepicker": {},
        "fiscalYearStartMonth": 0,
        "links": [],
        "annotations": {"list": [_promotions()]},
        "templating": {"list": [_policy()]},
        "panels": [{"id": i, **panel} for i, panel in zip(count(1), _laid_out(rows), strict=False)],
    }


def _promotions() -> dict[str, Any]:
    """Return the marks at the times when a version got the traffic."""
    return {
        "name": "Promotions",
        "enable": True,
        "iconColor": "green",
        "datasource": SOURCE,
        "expr": f"changes(pawl_serving_version{OF_POLICY}[1m]) > 0",
        "titleFormat": "{{policy}} serves another version",
        "step": "60s",
    }


def _policy() -> dict[str, Any]:
    """Return the variable with which the reader selects policies."""
    return {
        "name": "policy",
        "label": "Policy",
        "type": "query",
        "datasource": SOURCE,
        "definition": POLICIES,
        "query": {"qryType": 1, "query": POLICIES, "refId": "policy"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
        "hide": 0,
        "skipUrlSync": False,
    }


def _laid_out(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield all panels in reading order, each with its place."""
    y = 0
    for row in rows:
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        head = {"type": "row", "title": row.title, "collapsed": False}
        yield head | {"gridPos": place, "panels": []}
        y += 1
        for band in row.bands:
            yield from _side_by_side(band, y)
            y += band.height


def _side_by_side(band: Band, y: int) -> Iterator[dict[str, Any]]:
    """Yield a band's panels; where the width cannot be shared equally, the first get more."""
    share, left = divmod(WIDTH, len(band.panels))
    x = 0
    for index, panel in enumerate(band.panels):
        width = share + (index < left)
        yield _panel(panel) | {"gridPos": {"h": band.height, "w": width, "x": x, "y": y}}
        x += width


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **panel.defaults},
            "overrides": list(panel.overrides),
        },
        "options": panel.options,
        "targets": [_target(*named) for named in zip(ascii_uppercase, panel.queries, strict=False)],
    }


def _target(reference: str, query: Query) -> dict[str, Any]:
    asked = {"instant": True, "range": False} if query.instant else {"range": True}
    return {
        "refId": reference,
        "datasource": SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        **asked,
    }
