"""What versions are probed with is ordinary text, the same before and after an update."""

from pathlib import Path

from tests.integration.trainer.learners.test_memory import learner
from tests.support.training import rows


def test_a_learner_probes_with_the_same_text_after_an_update(
    tiny_model: str, tmp_path: Path
) -> None:
    made = learner(tiny_model, tmp_path)
    made.restore(None)
    before, plain = made.probe_rows(), made.logprobs(made.probe_rows())
    made.update(rows(4))
    assert made.probe_rows() == before
    assert made.logprobs(before) != plain
