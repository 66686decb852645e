"""The trainer's distributions are the server's: vLLM's own sampler and a plain loop say so."""

import math
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from store.values.grammars import Grammar
from store.values.sampling import Distribution
from tests.support.training import PLAIN, rows
from trainer.batches import Row
from trainer.learners.kernels.head import CHUNK, Head, head_logprobs
from trainer.learners.kernels.process import be_deterministic
from trainer.learners.replay.shaping import (
    History,
    places_of,
    score_for_autograd,
    score_shaped,
    shape,
)

# Importing vLLM takes its time.
pytestmark = pytest.mark.timeout(240)

WORDS = 97
EACH: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "a narrow top_p": {"top_p": 0.01},
    "top_k": {"top_k": 7},
    "top_k of one": {"top_k": 1},
    "top_k of all": {"top_k": 1000},
    "min_p": {"min_p": 0.05},
    "logit_bias": {"logit_bias": ((3, 2.5), (11, -100.0), (40, 4.0))},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(2, 60))},
    "bad_words": {"bad_words": ("w",), "banned_ids": ((5,), (7, 8), (2, 2, 9))},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": (1, 4)},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "a negative penalty": {"frequency_penalty": -1.1, "presence_penalty": -0.4},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "a repetition reward": {"repetition_penalty": 0.8},
    "a model's card": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
}
# The masks that a grammar may have had before each of a reply's tokens.
GRAMMAR = Grammar(kind="regex", text="(w[0-9])+")
EACH["grammar"] = {"grammar": GRAMMAR}
EACH["all together"] = {
    name: value for one in EACH.values() for name, value in one.items() if name != "top_k"
} | {"top_k": 25, "top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.2}


def made(name: str) -> Distribution:
    return msgspec.structs.replace(PLAIN, **EACH[name])


def able_after(sampled: Sequence[int], count: int) -> list[set[int]]:
    """Tokens that a made-up grammar allows at each place: they depend on all before them."""
    always = {*range(2, 10), 90}
    return [
        {*always, *(t for t in range(WORDS) if (t * 7 + sum(sampled[:n]) * 3 + n) % 5)}
        for n in range(count)
    ]


def packed(able: set[int]) -> bytes:
    return sum(1 << token for token in able).to_bytes(16, "little")


def row(prompt: Sequence[int], sampled: Sequence[int], distribution: Distribution) -> Row:
    able = able_after(sampled, len(sampled)) if distribution.grammar else []
    return msgspec.structs.replace(
        rows()[0],
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        sampled_logprobs=(-1.0,) * len(sampled),
        distribution=distribution,
        masks=tuple(map(packed, able)),
    )


def history_of(one: Row) -> History:
    places = [(0, sampled) for sampled in range(len(one.sampled_ids))]
    return History.at_places([one], places, torch.device("cpu"))


@pytest.fixture(scope="module")
def vllm_logprobs() -> Callable[[Tensor, Row, int], Tensor]:
    """The log-probabilities (V,) that vLLM's sampler makes of logits (V,) for a row's token."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import SamplingParams
        from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
        from vllm.v1.sample.logits_processor.builtin import (
            LogitBiasLogitsProcessor,
            MinPLogitsProcessor,
            MinTokensLogitsProcessor,
        )
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.sampler import Sampler
        from xgrammar import apply_token_bitmask_inplace

    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))

    def logprobs(logits: Tensor, one: Row, before: int) -> Tensor:
        wanted, output = one.distribution, list(one.sampled_ids[:before])
        params = SamplingParams(
            temperature=wanted.temperature,
            min_p=wanted.min_p,
            logit_bias=dict(wanted.logit_bias) or None,
            min_tokens=wanted.min_tokens,
            stop_token_ids=list(wanted.stop_token_ids),
        )
        kinds = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
        processors = [kind(config, torch.device("cpu"), False) for kind in kinds]  # type: ignore[arg-type]
        added = [(0, params, list(one.prompt_ids), output)]
        for processor in processors:
            processor.update_state(BatchUpdate(batch_size=1, removed=[], moved=[], added=added))
        mask = torch.ones(1, len(logits), dtype=torch.bool)
        mask[0, list(wanted.allowed_token_ids)] = False
        limited = 0 < wanted.top_k < len(logits)
        metadata = SamplingMetadata(
            temperature=torch.tensor([wanted.temperature]),
            all_greedy=False,
            all_random=True,
            top_p=torch.tensor([wanted.top_p]) if wanted.top_p < 1 else None,
            top_k=torch.tensor([wanted.top_k], dtype=torch.int32) if limited else None,
            generators={},
            max_num_logprobs=0,
            no_penalties=False,
            prompt_token_ids=torch.tensor([one.prompt_ids]),
            frequency_penalties=torch.tensor([wanted.frequency_penalty]),
            presence_penalties=torch.tensor([wanted.presence_penalty]),
            repetition_penalties=torch.tensor([wanted.repetition_penalty]),
            output_token_ids=[output],
            allowed_token_ids_mask=mask if wanted.allowed_token_ids else None,
            bad_words_token_ids={0: [list(ids) for ids in wanted.banned_ids]}
            if wanted.banned_ids
            else {},
            logitsprocs=LogitsProcessors(processors),
        )
        if one.masks:
            # The model runner applies a grammar's mask before it calls the sampler.
            bits = torch.frombuffer(bytearray(one.masks[before]), dtype=torch.int32)[None]
            logits = logits[None].clone()
            apply_token_bitmask_inplace(logits, bits)
            logits = logits[0]
        sampler = Sampler("processed_logprobs")
        shaped = sampler.apply_logits_processors(logits[None].clone(), metadata, False)
        _, found = sampler.sample(shaped, metadata)
        assert found is not None
        return found[0]

    return logprobs


@pytest.mark.parametrize("name", EACH)
def test_trainer_recomputes_the_servers_distribution(
    vllm_logprobs: Callable[[Tensor, Row, int], Tensor], name: str
) -> None:
    """For every token that could be sampled next, after replies of 0 to 5 tokens."""
    torch.manual_seed(0)
    wanted, differences = made(name), []
    for _ in range(40):
        one = row(torch.randint(2, WORDS, (6,)).tolist(), [2, 2, 9, 7, 8, 5], wanted)
        logits = torch.randn(6, WORDS) * 3
        for before in range(6):
            served = vllm_logprobs(logits[before], one, before)
            able = torch.nonzero(served > -math.inf)[:, 0]
            at = torch.zeros(len(able), dtype=torch.long)
            history = history_of(one).part(before, before + 1)
            shaped = shape(logits[before][None].clone(), wanted, history, at, able)
            assert torch.equal(shaped.logits[0] > -math.inf, served > -math.inf)
            found = score_shaped(shaped, at, able).logprobs
            differences.append((found - served[able]).abs())
    assert float(torch.cat(differences).mean()) < 1e-6
    assert float(torch.cat(differences).max()) < 1e-4


def plain_shaping(
    logits: Tensor, one: Row, before: int, able: Callable[..., list[set[int]]] = able_after
) -> Tensor:
    """One token's log-probability by the settings' definitions, in autograd's plain operations."""
    label = one.sampled_ids[before]
    z, kept = plain_survivors(logits, one, before, able)
    return z[label] - torch.logsumexp(z[sorted({*kept, label})], 0)


def plain_survivors(
    logits: Tensor, one: Row, before: int, able_after: Callable[..., list[set[int]]]
) -> tuple[Tensor, list[int]]:
    """The shaped logits of all tokens, and which of them the next one could be."""
    wanted = one.distribution
    reply = one.sampled_ids[:before]
    scales, offsets = torch.ones_like(logits), torch.zeros_like(logits)
    for token, bias in wanted.logit_bias:
        offsets[token] += bias
    biased = logits + offsets
    for token in {*one.prompt_ids, *reply}:
        above = float(biased[token].detach()) > 0
        scales[token] = 1 / wanted.repetition_penalty if above else wanted.repetition_penalty
    lowered = torch.zeros_like(logits)
    for token in set(reply):
        lowered[token] = wanted.presence_penalty + wanted.frequency_penalty * reply.count(token)
    z = (biased * scales - lowered) / wanted.temperature
    able = set(wanted.allowed_token_ids or range(len(logits)))
    if wanted.grammar:
        able &= able_after(one.sampled_ids, before + 1)[before]
    for *begun, last in wanted.banned_ids:
        if not begun or reply[-len(begun) :] == tuple(begun):
            able.discard(last)
    if before < wanted.min_tokens:
        able -= set(wanted.stop_token_ids)
    order = sorted(able, key=lambda token: -float(z[token].detach()))
    best = float(z[order[0]].detach())
    kept = [t for t in order if float(z[t].detach()) >= best + math.log(wanted.min_p or 1e-300)]
    kept = kept[: wanted.top_k or None]
    shares = torch.softmax(z[kept].detach(), 0).cumsum(0).tolist()
    above = [0.0, *shares[:-1]]
    return z, [t for t, share in zip(kept, above, strict=True) if share < wanted.top_p]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EACH)
def test_scores_and_gradient_under_sampling_settings_equal_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    be_deterministic()
    torch.manual_seed(1)
    wanted = made(name)
    batch = [
        row([3, 4, 5], [2, 2, 9, 7, 8, 5], wanted),
        row([3, 4, 5], [6, 5], PLAIN),
        row([3, 4, 5, 2], [2, 9, 90], wanted),
        row([3, 4, 5], [2, 2, 3], wanted),
    ]
    parents = [0, 1, 2, 3, 4, 5, 0, 6, 1, 2, 7, 0, 1, 2]
    hidden = torch.randn(8, 12, dtype=dtype, requires_grad=True)
    head = torch.randn(WORDS, 12, dtype=dtype)
    labels = torch.tensor([token for one in batch for token in one.sampled_ids])
    worth = torch.randn(len(labels), dtype=dtype)

    logits = hidden[parents] @ head.T
    places = [(one, t) for one in batch for t in range(len(one.sampled_ids))]
    whole = torch.stack(
        [plain_shaping(z, one, t) for z, (one, t) in zip(logits, places, strict=True)]
    )
    (aim,) = torch.autograd.grad((whole * worth).sum(), hidden, retain_graph=True)
    dense = torch.cat(
        [
            score_for_autograd(
                part, one.distribution, history_of(one), torch.tensor(one.sampled_ids)
            )[0]
            for one, part in zip(batch, logits.split([6, 2, 3, 3]), strict=True)
        ]
    )
    (beside,) = torch.autograd.grad((dense * worth).sum(), hidden)
    assert torch.allclose(dense, whole, atol=1e-5)
    assert largest(beside, aim) < 1e-5
    for entries in (1, 3 * WORDS, 10_000):
        monkeypatch.setitem(CHUNK, "cpu", entries)
        found, _ = head_logprobs(hidden, Head(head), places_of(batch, parents), batch, labels)
        (got,) = torch.autograd.grad((found * worth).sum(), hidden)
        assert torch.allclose(found, whole, atol=1e-5)
        assert largest(got, aim) < 1e-5


def largest(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest entry."""
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize(
    ("settings_", "least"), [({"top_k": 2}, 2), ({"top_p": 0.4}, 1), ({"min_p": 0.9}, 2)]
)
def test_sampled_token_just_outside_top_k_top_p_or_min_p_keeps_a_probability(
    settings_: dict[str, Any], least: int
) -> None:
    """Server and trainer round differently: what was sampled had a probability."""
    logits = torch.tensor([[3.0, 2.9, 0.5, 0.0]])
    one = row([0], [2], msgspec.structs.replace(PLAIN, **settings_))
    at, label = torch.tensor([0]), torch.tensor([2])
    shaped = shape(logits.clone(), one.distribution, history_of(one), at, label)
    found = score_shaped(shaped, at, label)
    among = logits[0, [*range(least), 2]]
    assert float(found.logprobs) == pytest.approx(float(torch.log_softmax(among, 0)[-1]))
    assert float(found.shares) == pytest.approx(1 - float(found.logprobs.exp()))


def test_tokens_with_equal_logits_at_the_cutoff_of_top_k_top_p_or_min_p_all_stay() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    for settings_ in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 1.0}):
        one = row([0], [2], msgspec.structs.replace(PLAIN, **settings_))
        at, label = torch.tensor([0]), torch.tensor([2])
        shaped = shape(logits.clone(), one.distribution, history_of(one), at, label)
        found = score_shaped(shaped, at, label)
        assert float(found.logprobs) == pytest.approx(-math.log(3))
        assert float(found.entropies) == pytest.approx(math.log(3))


def test_sampled_token_has_probability_1_if_the_settings_exclude_all_tokens() -> None:
    """A ledger may say so; nothing becomes infinite or NaN of it."""
    only = msgspec.structs.replace(
        PLAIN, allowed_token_ids=(1,), min_tokens=5, stop_token_ids=(1,), top_p=0.9
    )
    one, at, label = row([0], [1], only), torch.tensor([0]), torch.tensor([1])
    shaped = shape(torch.randn(1, 4), only, history_of(one), at, label)
    found = score_shaped(shaped, at, label)
    assert float(found.logprobs) == 0.0
    assert all(torch.isfinite(value).all() for value in found)
    assert float(found.shares) == 0.0
