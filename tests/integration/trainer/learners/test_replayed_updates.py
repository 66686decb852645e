"""Updates under recorded sampling settings: equal in every layout, and without drift."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from store.values.sampling import Distribution
from tests.integration.trainer.learners.test_learner import gradients
from tests.integration.trainer.learners.test_replay import EACH, WORDS, made, packed, row
from tests.support.trainer.merging import (
    TINY,
    gradient,
    largest_difference,
    make_model,
    random_tree,
    train,
)
from tests.support.trainer.reference import shake
from tests.support.training import PLAIN, Renew, by_every_layout, ppo_recipe, recipe, rows
from trainer.batches import Row
from trainer.errors import Unusable
from trainer.learners.replay.shaping import Vocabulary, banned_sequences, places_of
from trainer.learners.scoring import score_rows
from trainer.recipes.recipe import KlOptions

pytestmark = pytest.mark.timeout(240)


def mixed(seed: int) -> list[Row]:
    """Random trees whose rows were sampled in every kind of distribution."""
    distributions = [PLAIN, *(made(name) for name in EACH)]
    made_rows = random_tree(seed, TINY.vocab_size)
    distributions = [
        distributions[(seed + index) % len(distributions)] for index in range(len(made_rows))
    ]
    return [held(one, each) for one, each in zip(made_rows, distributions, strict=True)]


def held(one: Row, distribution: Distribution) -> Row:
    """The row as it was sampled from this distribution, under a grammar that all replies fit."""
    everything = {*range(WORDS)} if distribution.grammar else set()
    masks = tuple(packed({*everything} - {n % 2}) for n in range(len(one.sampled_ids)))
    return msgspec.structs.replace(
        one, distribution=distribution, masks=masks if distribution.grammar else ()
    )


@pytest.fixture(scope="module")
def merging() -> Any:
    return make_model(TINY, torch.float64)


@pytest.fixture(scope="module")
def plain() -> Any:
    return make_model(TINY, torch.float64, lean=False)


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_sampling_settings_apply_alike_to_merged_and_whole_rows(
    merging: Any, plain: Any, seed: int
) -> None:
    batch = mixed(seed)
    with torch.no_grad():
        ours = score_rows(merging, batch)
        theirs = score_rows(plain, batch, layout="whole")
    assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    assert torch.allclose(ours.entropies, theirs.entropies, atol=1e-5)
    train(merging, [batch], layout="tree")
    train(plain, [batch], layout="whole")
    assert largest_difference(gradient(merging), gradient(plain)) < 1e-5


def test_rows_of_equal_prefix_and_sampling_settings_share_their_logits() -> None:
    card = made("a model's card")
    looking = made("presence_penalty")
    batch = [
        *(row([3, 4], [5, 6], card), row([3, 4], [5, 7], card), row([3, 4], [5, 6], PLAIN)),
        *(row([3, 4], [5, 6], looking), row([3, 4, 5], [6], looking), row([3, 4], [5], looking)),
    ]
    parents = [1, 2, 1, 2, 1, 2, 1, 2, 2, 1]
    found = places_of(batch, parents)
    # A penalty counts from where a reply begins: node 2 stands there twice for it.
    assert sorted(found.nodes) == [1, 1, 1, 2, 2, 2, 2]
    assert found.of_tokens[0] == found.of_tokens[2]
    assert found.of_tokens[7] != found.of_tokens[8]
    assert found.of_tokens[6] == found.of_tokens[9]
    assert [group.distribution for group in found.groups] == sorted([card, looking], key=repr)
    assert found.groups[0].start == 2


def test_banned_words_become_their_token_sequences() -> None:
    spelled = {"a": [1], " a": [2], "bc": [3, 4], " bc": [5, 4], "d": [6], " d": [7, 6], "e": []}
    found = banned_sequences(["a", " bc", "d", "e"], lambda text: spelled.get(text, []))
    assert found == ((1,), (2,), (3, 4), (5, 4), (6,))


@pytest.fixture(scope="module")
def vllm_ids() -> Callable[..., tuple[Any, Any]]:
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import SamplingParams

    def found(tokenizer: Any, words: list[str], stops: list[int], eos: Any) -> tuple[Any, Any]:
        params = SamplingParams(bad_words=words, min_tokens=1, stop_token_ids=stops)
        params.update_from_generation_config({"eos_token_id": eos}, tokenizer.eos_token_id)
        tokenizer.max_token_id = len(tokenizer)
        params.update_from_tokenizer(tokenizer)
        return params.bad_words_token_ids, params.all_stop_token_ids

    return found


def test_banned_words_and_stop_tokens_have_the_token_ids_that_vllm_gives_them(
    vllm_ids: Callable[..., tuple[Any, Any]], renew: Renew
) -> None:
    tiny = renew(recipe())
    words, stops = ["w5", " w7", "w8", "other"], [9, 4]
    asked = Distribution(
        temperature=1.0, bad_words=tuple(sorted(words)), min_tokens=2, stop_token_ids=(4, 9)
    )
    [one] = Vocabulary(tiny._tokenizer, tiny._model).with_token_ids([row([3], [4], asked)])
    ends = tiny._model.generation_config.eos_token_id
    sequences, stopping = vllm_ids(tiny._tokenizer, words, stops, ends)
    assert sorted(map(list, one.distribution.banned_ids)) == sorted(sequences)
    assert set(one.distribution.stop_token_ids) == stopping


def sampled_as(batch: Sequence[Row], distribution: Distribution) -> list[Row]:
    return [msgspec.structs.replace(one, distribution=distribution) for one in batch]


@pytest.fixture
def distributions() -> list[Distribution]:
    unheld = msgspec.structs.replace(made("all together"), grammar=None)
    return [made("a model's card"), made("repetition_penalty"), unheld]


def test_every_layout_makes_the_same_update_under_sampling_settings(
    tiny_model: str, tmp_path: Path, distributions: list[Distribution]
) -> None:
    batch = [
        msgspec.structs.replace(one, distribution=distributions[index % 3])
        for index, one in enumerate(rows())
    ]
    by_every_layout(tiny_model, recipe(), batch, tmp_path)


def test_rows_sampled_from_truncated_distributions_have_no_drift(renew: Renew) -> None:
    """Log-probabilities of the shaped distribution are the policy's own: no ratio is not 1."""
    tiny = renew(recipe())
    card = sampled_as(rows(), made("a model's card"))
    with torch.no_grad():
        own = [score_rows(tiny._model, [one]).logprobs.tolist() for one in card]
    batch = [
        msgspec.structs.replace(one, sampled_logprobs=tuple(values))
        for one, values in zip(card, own, strict=True)
    ]
    found = tiny.update(batch)
    assert found["drift_logp_mean_abs"] < 1e-6
    assert found["effective_sample_size"] == pytest.approx(1.0)


@pytest.mark.parametrize("learner", ["grpo", "ppo"])
def test_kl_to_the_base_compares_distributions_under_the_sampling_settings(
    renew: Renew, learner: str
) -> None:
    kl = KlOptions(coefficient=0.1)
    chosen = ppo_recipe(kl=kl) if learner == "ppo" else recipe().model_copy(update={"kl": kl})
    tiny = renew(chosen)
    card = sampled_as(rows(), made("a model's card"))
    with torch.no_grad():
        base = [score_rows(tiny._model, [one]).logprobs.tolist() for one in card]
    shake(tiny)
    tiny._trainer.prepare(card, tiny._initial_values(card))
    for one, wanted in zip(card, base, strict=True):
        assert tiny._trainer.kl._reference[one.key] == pytest.approx(wanted, abs=1e-5)
    loss = tiny._trainer.loss_of(card)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(gradients(tiny)).all()


def test_episode_with_out_of_vocabulary_settings_is_blamed(renew: Renew) -> None:
    tiny = renew(recipe())
    batch = rows()
    odd = msgspec.structs.replace(PLAIN, logit_bias=((WORDS, 1.0),))
    batch[1] = msgspec.structs.replace(batch[1], distribution=odd)
    with pytest.raises(Unusable, match="another vocabulary") as raised:
        tiny.update(batch)
    assert raised.value.reason == "damaged"
    assert set(raised.value.episodes) == {UUID(int=1)}
