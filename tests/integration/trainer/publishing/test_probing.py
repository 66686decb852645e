"""What versions are probed with is ordinary text, the same before and after an update."""

from pathlib import Path

import pytest

from tests.integration.trainer.learners.test_memory import learner
from tests.support.training import recipe, rows
from trainer.learners.learner import Learner
from trainer.learners.probing import PROBE_LENGTH


def test_a_learner_probes_with_the_same_text_after_an_update(
    tiny_model: str, tmp_path: Path
) -> None:
    made = learner(tiny_model, tmp_path)
    made.restore(None)
    before, plain = made.probe_rows(), made.logprobs(made.probe_rows())
    made.update(rows(4))
    assert made.probe_rows() == before
    assert made.logprobs(before) != plain


@pytest.mark.parametrize(("count", "texts"), [(1, 1), (4, 4), (9, 4)])
def test_the_recipe_says_how_many_texts(
    tiny_model: str, tmp_path: Path, count: int, texts: int
) -> None:
    made = recipe()
    publish = made.publish.model_copy(update={"probe_rows": count})
    one = Learner(tiny_model, made.model_copy(update={"publish": publish}), 0, tmp_path)
    assert [len(row.ids) for row in one.probe_rows()] == [PROBE_LENGTH] * texts
