"""Dashboard and rules: every query is PromQL, and asks for metrics and labels that exist."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import promql_parser as promql
import pytest
from prometheus_client.metrics import MetricWrapperBase

import controller.metrics
import proxy.metrics
import store.metrics
import trainer.metrics
from tests.support.docs.guides import CLIENTS
from tests.support.yaml_text import parse_yaml

ROOT: Final = Path(__file__).parents[3] / "dashboards"
DASHBOARD: Final = ROOT / "grafana" / "dashboards" / "pawl.json"
RULES: Final = ROOT / "rules" / "pawl.yml"
RULE_TESTS: Final = Path(__file__).parent / "rules.yml"
PROMTOOL: Final = shutil.which("promtool") or shutil.which("promtool", path=CLIENTS)
DATASOURCES: Final = ROOT / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
PROVIDERS: Final = ROOT / "grafana" / "provisioning" / "dashboards" / "pawl.yml"
# Prometheus gives every series these, and that of a cluster namespace and pod.
TARGET_LABELS: Final = {"job", "instance", "namespace", "pod"}
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
INTERVALS: Final = re.compile(r"\$__(rate_interval|interval|range)\b")


class Selector(NamedTuple):
    """One selection in a query: a series' name, and the labels that the query has of it.

    `chosen` are those of which it takes only what the variable of that name says.
    """

    series: str
    labels: frozenset[str]
    chosen: frozenset[str]


class Query(NamedTuple):
    """One query of the dashboard or the rules."""

    where: str
    expression: str
    legend: str


def dashboard() -> dict[str, Any]:
    """The dashboard's model."""
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    """All panels that are not rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def variables() -> dict[str, dict[str, Any]]:
    """The dashboard's variables that are labels of series, by name."""
    _, *chosen = dashboard()["templating"]["list"]
    return {one["name"]: one for one in chosen}


def dashboard_queries() -> list[Query]:
    """What the panels and the annotations ask."""
    asked = [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]
    marks = [
        Query(mark["name"], mark["expr"], mark["titleFormat"])
        for mark in dashboard()["annotations"]["list"]
    ]
    return asked + marks


def rules() -> list[dict[str, Any]]:
    """All alerting rules."""
    loaded = parse_yaml(RULES.read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def rule_queries() -> list[Query]:
    """What the rules ask; their annotations show labels of what they find."""
    return [Query(rule["alert"], rule["expr"], json.dumps(rule["annotations"])) for rule in rules()]


def parsed(expression: str) -> promql.Expr:
    """The query's tree; Grafana's own intervals are filled in first."""
    return promql.parse(INTERVALS.sub("1m", expression))


def selectors(expression: str) -> list[Selector]:
    """What a query selects. Labels it groups by are asked of all that it groups."""
    return list(_selectors(parsed(expression), frozenset()))


def _selectors(node: promql.Expr, grouped: frozenset[str]) -> Iterator[Selector]:
    if isinstance(node, promql.VectorSelector):
        matchers = node.matchers.matchers
        yield Selector(
            node.name or "",
            grouped | {m.name for m in matchers},
            frozenset(
                m.name for m in matchers if m.op == promql.MatchOp.Re and m.value == f"${m.name}"
            ),
        )
        return
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        grouped |= set(node.modifier.labels)
    for child in _children(node):
        yield from _selectors(child, grouped)


def _children(node: promql.Expr) -> list[promql.Expr]:
    match node:
        case promql.Call():
            return list(node.args)
        case promql.BinaryExpr():
            return [node.lhs, node.rhs]
        case promql.MatrixSelector():
            return [node.vector_selector]
        case promql.NumberLiteral() | promql.StringLiteral() | promql.VectorSelector():
            return []
        case promql.AggregateExpr() | promql.ParenExpr() | promql.SubqueryExpr():
            return [node.expr]
        case promql.UnaryExpr():
            return [node.expr]
    raise AssertionError(f"{type(node).__name__} is not known here")


def labels_of_result(node: promql.Expr) -> set[str] | None:
    """The labels that are left in what a query gives; None where all are."""
    match node:
        case promql.AggregateExpr():
            return set() if node.modifier is None else set(node.modifier.labels)
        case promql.Call() if node.func.name == "histogram_quantile":
            inner = labels_of_result(node.args[1])
            return None if inner is None else inner - {"le"}
        case promql.BinaryExpr() if isinstance(node.lhs, promql.NumberLiteral):
            return labels_of_result(node.rhs)
        case promql.BinaryExpr():
            return labels_of_result(node.lhs)
        case promql.ParenExpr():
            return labels_of_result(node.expr)
    return None


def registered() -> dict[str, frozenset[str]]:
    """Every series that a process can export, with its labels."""
    found: dict[str, frozenset[str]] = {}
    for module in (store.metrics, proxy.metrics, trainer.metrics, controller.metrics):
        for value in vars(module).values():
            for metric in value.values() if isinstance(value, dict) else [value]:
                if isinstance(metric, MetricWrapperBase):
                    found |= _series(metric)
    return found


def _series(metric: MetricWrapperBase) -> dict[str, frozenset[str]]:
    """What one metric exports: a histogram that begins below 0, say, has no `_sum`."""
    names = metric._labelnames
    probe = [f"probe-{name}" for name in names]
    if names:
        metric.labels(*probe)
    samples = [sample for family in metric.collect() for sample in family.samples]
    if names:
        samples = [x for x in samples if set(probe) <= set(x.labels.values())]
        metric.remove(*probe)
    found: dict[str, frozenset[str]] = {}
    for sample in samples:
        found[sample.name] = found.get(sample.name, frozenset()) | sample.labels.keys()
    return found


QUERIES: Final = [*dashboard_queries(), *rule_queries()]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.where}: {query.expression}")
def test_promql_query_uses_existing_series_and_labels_and_its_legend_labels_of_its_result(
    query: Query,
) -> None:
    known = registered()
    for series, labels, _ in selectors(query.expression):
        if series == "up":
            assert labels <= TARGET_LABELS
            continue
        assert series in known
        assert labels <= known[series] | TARGET_LABELS, series
    shown = set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", query.legend)) - {"value"}
    left = labels_of_result(parsed(query.expression))
    if left is not None:
        assert shown <= left


def aggregates(node: promql.Expr) -> Iterator[promql.AggregateExpr]:
    """All aggregations of a query's tree."""
    if isinstance(node, promql.AggregateExpr):
        yield node
    for child in _children(node):
        yield from aggregates(child)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.where}: {query.expression}")
def test_promql_aggregation_keeps_namespaces_apart(query: Query) -> None:
    for one in aggregates(parsed(query.expression)):
        assert one.modifier is not None
        assert "namespace" in one.modifier.labels


def test_alert_of_refusals_asks_for_all_errors_of_status_429_and_503() -> None:
    [expression] = [rule["expr"] for rule in rules() if rule["alert"] == "PawlRequestsRefused"]
    [asked] = re.findall(r'reason=~"([^"]*)"', expression)
    busy = {
        error.__name__ for error in proxy.metrics.refusal_classes() if error.status in (429, 503)
    }
    assert set(asked.split("|")) == busy


def test_only_counters_have_rates() -> None:
    for query in QUERIES:
        for name in re.findall(r"(?:rate|increase)\((\w+)", query.expression):
            assert re.search(r"_(total|bucket|sum|count)$", name), query


def test_dashboards_datasource_variable_defaults_to_the_provisioned_prometheus() -> None:
    [source] = parse_yaml(DATASOURCES.read_text())["datasources"]
    first = dashboard()["templating"]["list"][0]
    assert (first["name"], first["type"], first["query"]) == (
        "datasource",
        "datasource",
        source["type"],
    )
    assert first["current"] == {"text": source["name"], "value": source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    asking = [dashboard()["annotations"]["list"], [*variables().values()], panels()]
    asking += [panel["targets"] for panel in panels()]
    assert all(one["datasource"] == SOURCE for group in asking for one in group)


def test_grafanas_minimum_interval_is_the_scrape_interval() -> None:
    [source] = parse_yaml(DATASOURCES.read_text())["datasources"]
    config = parse_yaml((ROOT / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_dashboards_and_rules_are_mounted_where_grafana_and_prometheus_look() -> None:
    compose = parse_yaml((ROOT.parent / "docker-compose.yml").read_text())
    targets = {
        source: target
        for name in ("grafana", "prometheus")
        for source, target, *_ in (v.split(":") for v in compose["services"][name]["volumes"])
    }
    [provider] = parse_yaml(PROVIDERS.read_text())["providers"]
    assert targets["./dashboards/grafana/dashboards"] == provider["options"]["path"]
    [pattern] = parse_yaml((ROOT / "prometheus.yml").read_text())["rule_files"]
    assert pattern == f"{targets['./dashboards/rules']}/*.yml"
    home = compose["services"]["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"


def test_each_dashboard_variable_is_a_label_filtered_by_the_variables_before_it() -> None:
    before: list[str] = []
    for name, variable in variables().items():
        assert variable["query"]["query"] == variable["definition"]
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
        assert match is not None
        [selector] = selectors(match[1])
        assert match[2] == name
        assert name in registered()[selector.series] | TARGET_LABELS
        assert selector.chosen == {*before}
        # A stack without namespaces has no such label, which `.*` matches and `.+` does not.
        assert (variable["includeAll"], variable["allValue"]) == (True, ".*")
        before.append(name)
    assert before == ["namespace", "instance", "policy"]


@pytest.mark.parametrize("query", dashboard_queries(), ids=lambda query: query.where)
def test_each_dashboard_query_filters_by_every_variable_that_its_series_has(query: Query) -> None:
    for series, _, chosen in selectors(query.expression):
        assert chosen == variables().keys() & (registered()[series] | TARGET_LABELS)


def test_each_alert_has_its_section_in_the_runbook() -> None:
    page = (ROOT.parent / "docs/howto/operate.md").read_text()
    alerts = page.split("\n## Alerts\n")[1].split("\n## ")[0]
    names = [rule["alert"] for rule in rules()]
    assert re.findall(r"^### (.*)$", alerts, re.MULTILINE) == names
    links = [rule["annotations"]["runbook_url"] for rule in rules()]
    assert links == [f"docs/howto/operate.md#{name.lower()}" for name in names]


@pytest.mark.skipif(not PROMTOOL, reason="promtool is not installed (scripts/install_clients.py)")
def test_alert_rules_pass_their_promtool_tests() -> None:
    command = [str(PROMTOOL), "test", "rules", str(RULE_TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_rule_has_a_test_and_the_test_of_a_healthy_system_has_all_series() -> None:
    healthy, *others = parse_yaml(RULE_TESTS.read_text())["tests"]
    assert [one["name"] for one in others] == [rule["alert"] for rule in rules()]
    for one in others:
        expected = [
            sample for look in one["promql_expr_test"] for sample in look.get("exp_samples", [])
        ]
        assert {look["labels"] for look in expected} == {f'{{alertname="{one["name"]}"}}'}
    assert not any("exp_samples" in look for look in healthy["promql_expr_test"])
    given = {re.split("[{ ]", one["series"])[0] for one in healthy["input_series"]}
    assert given == {one.series for query in rule_queries() for one in selectors(query.expression)}
