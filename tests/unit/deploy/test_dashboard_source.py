"""The dashboard is what its description says, and a metric gets its panel by one line."""

from scripts.dashboard import kinds
from scripts.dashboard.kinds import Band, Row, lines, number, rate
from scripts.dashboard.model import FILE, WIDTH, dashboard, dashboard_text
from scripts.dashboard.panels import ROWS
from tests.conftest import ROOT
from tests.support.docs.documents import split_blocks


def test_the_file_is_what_the_description_says() -> None:
    assert FILE.read_text() == dashboard_text(ROWS), "`make docs` writes it"


def test_a_metric_gets_its_panel_by_one_line() -> None:
    first, *others = ROWS[0].bands
    toy = lines("Toy", "What the toy counts.", "short", rate("pawl_toy_total", "kind"))
    made = dashboard([Row(ROWS[0].title, Band(first.height, *first.panels, toy), *others)])
    [panel] = [panel for panel in made["panels"] if panel["title"] == "Toy"]
    [target] = panel["targets"]
    assert target["expr"] == "sum by (kind) (rate(pawl_toy_total[$__rate_interval]))"
    assert target["legendFormat"] == "{{kind}}"
    beside = [p["gridPos"] for p in made["panels"] if p["gridPos"]["y"] == panel["gridPos"]["y"]]
    assert len(beside) == len(first.panels) + 1
    assert sum(place["w"] for place in beside) == WIDTH
    assert beside[-1]["x"] + beside[-1]["w"] == WIDTH


def test_the_line_of_the_guide_is_a_panel() -> None:
    page = ROOT / "docs/howto/add-a-metric.md"
    [code] = [one for one in split_blocks(page, page.read_text())[1] if one.language == "python"]
    panel = eval(code.text, vars(kinds).copy())
    assert isinstance(panel, kinds.Panel)
    assert code.text.count("\n") == 1


def test_words_stand_for_a_numbers_values() -> None:
    panel = number("Up", "Is it?", "none", rate("x_total"), "red", 1, "green", "no", "yes")
    [mapping] = panel.defaults["mappings"]
    assert [mapping["options"][value]["text"] for value in ("0", "1")] == ["no", "yes"]
