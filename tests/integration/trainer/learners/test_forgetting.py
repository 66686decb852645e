"""The meter of forgetting: exact, the same in any order, and without effect on training."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.training import (
    Renew,
    in_every_layout,
    ppo_recipe,
    recipe,
    rows,
    sft_recipe,
)
from trainer.batches import Row
from trainer.errors import Unusable
from trainer.learners import kl
from trainer.learners.kernels.head import CHUNK, Head, head_kl, logits_kl
from trainer.learners.kl import kl_figures, measured_rows
from trainer.learners.learner import Learner
from trainer.recipes.recipe import Recipe

RECIPES: dict[str, Callable[..., Recipe]] = {
    "grpo": recipe,
    "ppo": ppo_recipe,
    "sft": sft_recipe,
}


def plain_kl(made: Learner, batch: Sequence[Row]) -> float:
    """One sequence at a time, all of the vocabulary, in double precision: the reference."""
    each = []
    for row in batch:
        ids = torch.tensor([row.inputs])
        places = slice(len(row.prompt_ids) - 1, None)
        with torch.no_grad():
            own = made._model(input_ids=ids).logits[0, places].double().log_softmax(-1)
            with made._model.disable_adapter():
                base = made._model(input_ids=ids).logits[0, places].double().log_softmax(-1)
        each += (own.exp() * (own - base)).sum(-1).tolist()
    return sum(each) / len(each)


def test_kl_to_base_is_computed_over_the_whole_vocabulary(tiny_model: str, tmp_path: Path) -> None:
    batch = rows(groups=2)
    for layout, made in in_every_layout(tiny_model, recipe(), tmp_path):
        for _ in range(2):
            told = made.update(batch)
        metered = measured_rows(batch)
        assert told["kl_tokens"] == sum(len(row.sampled_ids) for row in metered)
        made._model.eval()
        wanted = plain_kl(made, metered)
        assert wanted > 0.001
        assert told["kl_to_base"] == pytest.approx(wanted, rel=1e-3), layout


def test_kl_by_a_chunked_head_equals_kl_by_the_whole_head(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    own, base, head = torch.randn(7, 5), torch.randn(7, 5), torch.randn(11, 5)
    whole = head_kl(own, base, Head(head))
    monkeypatch.setitem(CHUNK, "cpu", 44)
    assert torch.allclose(head_kl(own, base, Head(head)), whole, atol=1e-6)
    assert torch.allclose(whole, logits_kl(own @ head.T, base @ head.T), atol=1e-6)
    assert float(logits_kl(own, own).abs().max()) == 0.0
    near = logits_kl(own, own + 1e-7 * torch.randn_like(own))
    assert float(near.min()) >= 0.0


def test_unmoved_policy_has_zero_kl_to_base(renew: Renew) -> None:
    made = renew(recipe())
    still = [msgspec.structs.replace(row, advantage=0.0) for row in rows()]
    assert made.update(still)["kl_to_base"] == 0.0
    one, two = (made.update(rows())["kl_to_base"] for _ in range(2))
    assert 0.0 < one < two


@pytest.mark.parametrize("name", RECIPES)
def test_training_is_the_same_without_measuring_kl_to_the_base(
    renew: Renew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def train(folder: Path) -> dict[str, bytes]:
        made = renew(RECIPES[name](steps=2))
        torch.manual_seed(3)
        for number in range(2):
            made.update(rows(number))
        made.save(folder)
        drawn = {"drawn": torch.rand(4).numpy().tobytes()}
        files = [file for file in folder.rglob("*") if file.is_file()]
        return drawn | {str(file.relative_to(folder)): file.read_bytes() for file in files}

    with_it = train(tmp_path / "with")
    assert len(with_it) > 3
    monkeypatch.setattr(Learner, "_measure_kl_to_base", lambda *_: {})
    assert train(tmp_path / "without") == with_it


def test_calls_chosen_to_measure_kl_do_not_depend_on_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = rows(groups=2, members=3)
    monkeypatch.setattr(kl, "FEWEST_TOKENS", 40)
    chosen = measured_rows(batch)
    assert 1 < len(chosen) < len(batch)
    assert sum(len(row.ids) for row in chosen) <= 40
    for order in itertools.islice(itertools.permutations(batch), 20):
        assert measured_rows(order) == chosen
    monkeypatch.setattr(kl, "FEWEST_TOKENS", 1)
    assert measured_rows(batch) == chosen[:1]


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_non_finite_kl_makes_an_update_unusable(odd: float) -> None:
    [row, *_] = rows()
    measured: list[Any] = [{row.key: [0.1, odd, 0.2]}]
    with pytest.raises(Unusable, match="KL of the trained policy"):
        kl_figures([row], measured)
