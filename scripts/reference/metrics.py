"""Write the page of metrics: every Prometheus metric of proxy, trainer and steward."""

from collections.abc import Iterator
from types import ModuleType
from typing import Final

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

import pawl.steward.metrics
import proxy.metrics
import trainer.metrics

from .markdown import code, page, paragraph, table_with_notes

INTRODUCTION: Final = """
The proxy serves its metrics at `/metrics` of its admin port (`PAWL_ADMIN_LISTEN`), summed over all
workers and the keeper. The trainer serves its own at `/metrics` of `PAWL_TRAINER_LISTEN`, and a
steward at that of `PAWL_STEWARD_LISTEN` (with `pawl_trained_version`, too, of policies with a
gate), with the Python and process metrics of
prometheus_client. A histogram `NAME` has the series `NAME_bucket`, `NAME_sum` and `NAME_count`.
"""
RECORDS: Final = """
Each record ends in exactly one of five places: `pawl_records_total` = `pawl_records_stored_total`
+ `pawl_records_spooled` + `pawl_records_dead_lettered_total` + `pawl_records_dropped_total`
+ `pawl_records_deleted_total`.
`pawl_reward` has no `_sum`, because rewards may be negative; `pawl_reward_stated_sum` stands in
for it. It may fall: use `delta()`, not `rate()`.
"""
MODULES: Final[dict[str, ModuleType]] = {
    "Proxy": proxy.metrics,
    "Trainer": trainer.metrics,
    "Steward": pawl.steward.metrics,
}
HEAD: Final = ("metric", "type", "labels", "meaning")
LABELS: Final = {
    "arm": "What an episode was given: `base`, `serving` or `canary`.",
    "bound": "`lower` or `upper`.",
    "figure": "`pawl_eval_reward`: `mean`, or `low` or `high` for the limits of its 95 % interval. "
    "`pawl_sentinel_difference`: `mean`, or `mean_absolute` for its mean size.",
    "judge": "Name of the judge.",
    "judged": "`trial`: of a version that is tried; `watch`: of what serves.",
    "kind": "`pawl_tokens_total`: `prompt` or `sampled`. `pawl_calls_explored_total`: "
    "`temperature`, `seed` or `strict`.",
    "metric": "`reward`, `tool_status`, or `other` for a metric of any other name.",
    "outcome": "`pawl_updates_total`: `trained`, `no_signal` (no call had an advantage other than "
    "0), `released` (given back), `rejected` (the version failed its probe) or `failed`. "
    "`pawl_waited_for_adapter_total`: `served`, or `given_up` (503). "
    "`pawl_steward_loads_total`: `loaded`, `replaced` (it had other files), "
    "`refused`, `altered` (the files are not those that were written), `unread` (they could not be "
    "read), or `misserved` (it was not served as it was trained).",
    "path": "A forwarded route without the ids in it, such as `/v1/models`.",
    "policy": "Name of the policy; empty if none served the call.",
    "reason": "`pawl_refused_total`: an error class of [http.md](http.md#errors). "
    "`pawl_calls_not_trainable_total`: as in the column `transitions.reason`. "
    "`pawl_episodes_consumed_total`: `trained`, or as in the column `consumptions.reason`. "
    "`pawl_withheld_total`: `not_json` (a body that rules cannot be applied to), `unreadable`, or "
    "`program` (it failed over the call).",
    "replica": "Base URL of a replica of the model server.",
    "result": "`known` if the target was seen before, else `pending`.",
    "source": "`key` or `task`: what a recipe caps claims by.",
    "status": "`pawl_calls_total`: how the call ended, as in the column `transitions.status`. "
    "`pawl_tool_events_total`: the tool status. `pawl_forwarded_total`: the HTTP status.",
    "stream": "`true` or `false`: whether the reply was streamed.",
    "rule": "Name of a rule of redaction, or `program`.",
    "tenant": "Whose the judge is.",
    "to": "State of a version: `canary`, `serving`, `rolled_back`, `published` or `rejected`.",
    "version": "Number of the policy version; empty if none served the call. "
    "`pawl_steward_altered_adapters`: its served name.",
    "what": "`pawl_clients_too_slow_total`: `head`, `body` or `write`. `pawl_outdated_total`: "
    "`episodes`, `unspent`, `calls`, `statements` or `letters`.",
}


def metrics_page() -> str:
    """Return `metrics.md`."""
    return page(
        "Metrics",
        paragraph(INTRODUCTION),
        *(_section(title, module) for title, module in MODULES.items()),
        "## Labels",
        table_with_notes(("label", "meaning"), [(code(one), text) for one, text in _labels()]),
    )


def metrics_of(module: ModuleType) -> Iterator[MetricWrapperBase]:
    """Yield a module's metrics in the order of their definition, those in dicts too."""
    for value in vars(module).values():
        held = list(value.values()) if isinstance(value, dict) else [value]
        yield from (one for one in held if isinstance(one, MetricWrapperBase))


def family_of(metric: MetricWrapperBase) -> Metric:
    """Return a metric's name, type and documentation."""
    return next(iter(metric.describe()))


def name_of(metric: MetricWrapperBase) -> str:
    """Return a metric's name as a query has it: a counter's ends in `_total`."""
    family = family_of(metric)
    return f"{family.name}_total" if family.type == "counter" else family.name


def labels_of(metric: MetricWrapperBase) -> tuple[str, ...]:
    """Return the names of a metric's labels."""
    return tuple(metric._labelnames)


def _section(title: str, module: ModuleType) -> str:
    rows = [
        (
            code(name_of(one)),
            family_of(one).type,
            ", ".join(map(code, labels_of(one))),
            family_of(one).documentation,
        )
        for one in metrics_of(module)
    ]
    blocks = [f"## {title}", table_with_notes(HEAD, rows)]
    if module is proxy.metrics:
        blocks.append(paragraph(RECORDS))
    return "\n\n".join(blocks)


def _labels() -> list[tuple[str, str]]:
    """Return each label in use with its meaning.

    Raises:
        KeyError: a label has no meaning in `LABELS`.
    """
    metrics = [metric for module in MODULES.values() for metric in metrics_of(module)]
    used = {label for metric in metrics for label in labels_of(metric)}
    return [(label, LABELS[label]) for label in sorted(used)]
