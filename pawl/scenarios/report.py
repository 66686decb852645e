"""Write the report of a run: `summary.json`, `reward.png` and `report.html`."""

import base64
import json
from html import escape
from pathlib import Path
from typing import Any, Final

from pawl.scenarios.picture import AT_WORK, INK, Curves, draw
from pawl.scenarios.progress import Progress
from pawl.scenarios.scenario import Scenario


def write_report(
    scenario: Scenario,
    folder: Path,
    summary: dict[str, Any],
    progress: Progress,
    curves: Curves,
) -> None:
    """Write the summary, the picture and the page into `folder`; `curves` are the policies' own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    picture = folder / "reward.png"
    draw(picture, progress, scenario.score, curves)
    (folder / "report.html").write_text(page(scenario, summary, progress, picture.read_bytes()))


def closing_words(
    score: str, summary: dict[str, Any], folder: Path, data: Path, policy: str
) -> str:
    """Return the last words of a run, in rich's markup: the result, where it lies, what to do next.

    Args:
        score: what the held-out figures are: success or reward.
        summary: the figures of the run, as `write_report` gets them.
        folder: where the report was written.
        data: the data folder of the run's own database.
        policy: the name of the policy that was trained.
    """
    return (
        f"\nHeld-out {score} went from [bold]{summary['before']:.0%}[/] to "
        f"[bold]{summary['after']:.0%}[/]{_best(summary)} in {summary['updates']} updates "
        f"({summary['seconds'] / 60:.1f} min); {summary['recorded']} of "
        f"{summary['calls']} calls recorded, {summary['failed_requests']} failed.\n"
        f"Picture and page: {folder / 'reward.png'}, {folder / 'report.html'}\n"
        "What next: see the rewards of each version's evaluation, and read what was recorded\n"
        f"    PAWL_DATA_DIR={data} .venv/bin/pawl policies show {policy}\n"
        f"    PAWL_DATA_DIR={data} .venv/bin/pawl export --out episodes.jsonl\n"
        "and let your own agent learn: start [bold].venv/bin/pawl up[/], set\n"
        "    OPENAI_BASE_URL=http://127.0.0.1:8100/v1\n"
        "and POST rewards to http://127.0.0.1:8100/feedback (README: Use it with your agent)."
    )


def _best(summary: dict[str, Any]) -> str:
    """Return the best look in words, where it was not the last."""
    is_last = summary["best"] in (None, summary["after"])
    return "" if is_last else f" (best {summary['best']:.0%})"


def page(scenario: Scenario, summary: dict[str, Any], progress: Progress, picture: bytes) -> str:
    """Return the report as one self-contained HTML page; `picture` is a PNG."""
    image = base64.b64encode(picture).decode()
    facts = {
        "held-out before": f"{summary['before']:.0%}",
        "held-out after": f"{summary['after']:.0%}",
        "held-out at best": f"{summary['best']:.0%}",
        "updates": summary["updates"],
        "time": f"{summary['seconds'] / 60:.1f} min",
        "calls recorded": f"{summary['recorded']} of {summary['calls']}",
        "episodes trained": progress.totals.trained_episodes if progress.totals else 0,
        "failed requests": summary["failed_requests"],
    }
    cards = "".join(
        f"<div class=card><b>{escape(str(value))}</b><span>{escape(name)}</span></div>"
        for name, value in facts.items()
    )
    return f"""<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content="width=device-width,initial-scale=1">
<title>{escape(scenario.title)}</title>
<style>
body{{font:16px/1.5 system-ui,sans-serif;color:{INK};max-width:860px;
 margin:2rem auto;padding:0 1rem}}
h1{{margin-bottom:0}} img{{width:100%}}
.cards{{display:grid;gap:.6rem;margin:1rem 0;
 grid-template-columns:repeat(auto-fit,minmax(10.5rem,1fr))}}
.card{{background:#f1f3f5;border-radius:8px;padding:.6rem .8rem}}
.card b{{display:block;font-size:1.25rem}} .card span{{color:#52606d;font-size:.85rem}}
table{{border-collapse:collapse;width:100%;font-size:.8rem;
 font-variant-numeric:tabular-nums}}
.wide{{overflow-x:auto}}
th,td{{text-align:right;padding:.25rem .35rem;border-bottom:1px solid #e9ecef}}
code{{background:#f1f3f5;padding:.1rem .3rem;border-radius:4px}}
</style>
<h1>{escape(scenario.title)}</h1>
<p>{escape(scenario.about)} Seed {summary["seed"]}.</p>
<div class=cards>{cards}</div>
<img alt="{AT_WORK[scenario.score].capitalize()}, wave after wave"
 src="data:image/png;base64,{image}">
<h2>Updates</h2><div class=wide>{_updates_table(progress)}</div>
<p>The same figures for programs: <code>summary.json</code> beside this page.</p></html>
"""


COLUMNS: Final = {
    "reward": "reward_mean",
    "AIR": "air_mean",
    "episodes": "episodes",
    "trained": "trained_episodes",
    "staleness": "staleness_mean",
    "entropy": "entropy",
    "ratio cut": "ratio_cut_share",
    "gradient": "grad_norm",
    "tokens in rows": "row_tokens",
    "tokens computed": "computed_tokens",
    "seconds": "train_seconds",
}


def _updates_table(progress: Progress) -> str:
    several = len({update.policy for update in progress.updates}) > 1
    names = (*(["policy"] if several else []), "version", *COLUMNS)
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = []
    for update in progress.updates:
        cells = [escape(update.policy)] if several else []
        cells.append(f"@{update.version}" if update.version else "none")
        cells += [_cell(update.metrics.get(key)) for key in COLUMNS.values()]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else escape(str(value))
