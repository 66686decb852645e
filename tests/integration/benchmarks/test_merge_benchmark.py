"""benchmarks.merge in its smallest form: what holds whatever the size."""

from argparse import Namespace

import pytest
import torch
from rich.console import Console

from benchmarks.merge.episodes import QUICK, random_words, thread
from benchmarks.merge.measure import everything
from benchmarks.merge.models import TINY, make_model
from benchmarks.merge.tables import tables
from benchmarks.merge.work import needed_flops

pytestmark = pytest.mark.timeout(100)


def test_the_smallest_run_is_right_and_can_be_shown() -> None:
    options = Namespace(budget=1024, repeats=1, seeds=3, quick=True)
    said: list[str] = []
    result = everything(TINY, random_words(TINY.vocab_size), QUICK, options, said.append)
    assert result["tiny"]["largest_difference"] < 1e-6
    assert result["gradient"]["largest_difference"] < 1e-5
    for case in ("groups", "thread"):
        assert result[case]["tokens"] < result[case]["trl_tokens"]
        # TRL's own loss over padded rows has the same gradient.
        assert result[case]["largest_difference"] < 1e-5
    assert [update["dtype"] for update in result["updates"]] == ["float32", "bfloat16"]
    assert result["half"]["cosine"] > 0.99
    console = Console(width=160)
    with console.capture() as shown:
        console.print(*tables(result))
    assert "random trees" in shown.get()
    assert said


def test_merged_needs_fewer_operations() -> None:
    model = make_model(TINY, torch.float32)
    rows = thread(QUICK, random_words(TINY.vocab_size))
    merged = needed_flops(model, [rows])
    assert merged < needed_flops(model, [rows], merge=False)
    assert merged == needed_flops(model, [[rows[-1]]]) + sum(
        4.0 * len(row.sampled_ids) * TINY.hidden_size * TINY.vocab_size for row in rows[:-1]
    )
