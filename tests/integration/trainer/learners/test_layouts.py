"""Every layout of computing rows equals whole rows, or is passed over with a reason."""

import copy
import math
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from structlog.testing import capture_logs
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from store.values.sampling import Distribution
from tests.support.trainer.families import write_family
from tests.support.trainer.merging import (
    TINY,
    gradient,
    largest_difference,
    make_model,
    random_tree,
    train,
)
from tests.support.training import PLAIN, Renew, by_every_layout, grown, recipe, rows
from trainer.batches import LAYOUTS, Layout, build_tree, pad_tree
from trainer.errors import DriftOutOfBounds, LearnerError, Unusable
from trainer.learners import scoring
from trainer.learners.adapter import attach_adapter
from trainer.learners.kernels.head import CHUNK, Head, head_logprobs
from trainer.learners.kernels.tree_attention import batch_blocks, block_mask, blocks_of
from trainer.learners.layouts import choose_layout
from trainer.learners.learner import Learner
from trainer.learners.processes import Processes
from trainer.learners.replay.shaping import places_of
from trainer.learners.scoring import score_rows, set_attention
from trainer.recipes.recipe import LoraOptions, OffPolicyOptions

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def merging() -> Any:
    """A model with light layers, in float64."""
    return make_model(TINY, torch.float64)


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same in transformers' and PEFT's own code."""
    return make_model(TINY, torch.float64, lean=False)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), layout=st.sampled_from(LAYOUTS))
def test_gradient_and_scores_of_each_way_of_computing_equal_whole_rows(
    merging: Any, plain: Any, seed: int, layout: Layout
) -> None:
    made = random_tree(seed, TINY.vocab_size)
    set_attention(merging, layout)
    with torch.no_grad():
        ours = score_rows(merging, made, layout=layout, hidden=True)
        theirs = score_rows(plain, made, layout="whole", hidden=True)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    train(merging, [made], layout=layout)
    train(plain, [made], layout="whole")
    # Norms and rotary positions are computed in float32 inside.
    assert largest_difference(gradient(merging), gradient(plain)) < 1e-6


@given(seed=st.integers(0, 10_000), size=st.integers(1, 9), most=st.integers(1, 400))
def test_every_token_attends_to_exactly_its_ancestors_in_the_prefix_tree(
    seed: int, size: int, most: int
) -> None:
    tree = build_tree([row.inputs for row in random_tree(seed, 3)])
    ancestors = {node: set(path[: i + 1]) for path in tree.paths for i, node in enumerate(path)}
    queries = []
    for batch in batch_blocks(blocks_of(tree, size), most):
        assert len(batch.keys) == 1 or batch.mask.numel() <= most
        for nodes, keys, mask in zip(batch.queries, batch.keys, batch.mask, strict=True):
            queries += nodes.tolist()
            for node, biases in zip(nodes.tolist(), mask, strict=True):
                assert keys[biases == 0].tolist() == sorted(ancestors[node])
                assert set(biases.tolist()) <= {0.0, -math.inf}
    assert sorted(queries) == list(range(len(tree.tokens)))


@given(seed=st.integers(0, 10_000), size=st.integers(1, 9))
def test_key_runs_of_an_attention_batch_cover_exactly_the_visible_keys(
    seed: int, size: int
) -> None:
    tree = build_tree([row.inputs for row in random_tree(seed, 3)])
    for batch in batch_blocks(blocks_of(tree, size)):
        found: list[list[int]] = [[] for _ in batch.keys]
        for place, start, stop, offset in batch.runs:
            assert offset == len(found[place])
            found[place] += range(start, stop)
        for nodes, keys, mask in zip(found, batch.keys, batch.mask, strict=True):
            assert keys[: len(nodes)].tolist() == nodes
            assert (mask[:, len(nodes) :] == -math.inf).all()


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_gpu_attention_mask_equals_the_prefix_trees_mask(seed: int) -> None:
    rows = [row.inputs * 12 for row in random_tree(seed, 3)]
    tree = pad_tree(build_tree(rows), 256)
    end, size = torch.tensor(tree.end), len(tree.tokens)

    def seen(_: Any, __: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < end[key])

    wanted = create_block_mask(seen, None, None, size, size, device="cpu")
    found = block_mask(end)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_padding_nodes_of_the_prefix_tree_are_visible_only_to_themselves() -> None:
    tree = build_tree([[1, 2], [1, 3]])
    full = pad_tree(tree, 8)
    assert len(full.tokens) == 8
    assert full.tokens[:3] == tree.tokens
    assert all(full.end[node] == node + 1 for node in range(3, 8))
    assert pad_tree(tree, 3) == tree


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"cap": 2.0},
        {"scale": 0.25},
        {"bias": torch.linspace(-1, 1, 11, dtype=torch.float64), "cap": 3.0},
    ],
    ids=["plain", "capped", "scaled", "biased"],
)
def test_chunked_lm_head_equals_the_whole_lm_head(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 8, dtype=torch.float64)
    parents = [0, 3, 3, 8, 2, 3, 0]
    temperatures = [1.0, 1.0, 0.7, 1.0, 0.5, 1.0, 1.0]
    labels = torch.tensor([1, 2, 2, 10, 0, 5, 1])
    asked = [
        msgspec.structs.replace(
            rows()[0], sampled_ids=(label,), distribution=Distribution(temperature=temperature)
        )
        for label, temperature in zip(labels.tolist(), temperatures, strict=True)
    ]
    places = places_of(asked, parents)
    worth = torch.randn(7, dtype=torch.float64)

    logits = hidden[parents] @ head.T * extra.get("scale", 1.0) + extra.get("bias", 0.0)
    if (cap := extra.get("cap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    whole = torch.log_softmax(logits / torch.tensor(temperatures)[:, None], -1)
    chosen = whole[torch.arange(7), labels]
    (wanted,) = torch.autograd.grad((chosen * worth).sum(), hidden)
    for entries in (1, 22, 10_000):
        monkeypatch.setitem(CHUNK, "cpu", entries)
        found, entropies = head_logprobs(hidden, Head(head, **extra), places, asked, labels)
        (got,) = torch.autograd.grad((found * worth).sum(), hidden)
        assert torch.allclose(found, chosen, atol=1e-12)
        assert torch.allclose(entropies, -(whole.exp() * whole).sum(-1), atol=1e-12)
        assert torch.allclose(got, wanted, atol=1e-12)


def adapted(base: Any) -> Any:
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, config).eval()


def test_model_with_a_sliding_window_is_computed_by_stretches_instead_of_a_tree() -> None:
    shape = TINY.to_dict() | {"model_type": "mistral"}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    config = MistralConfig(**{name: shape[name] for name in names}, sliding_window=4)
    model = adapted(MistralForCausalLM(config))
    with capture_logs() as logs:
        assert choose_layout(model, Processes()) == "stretches"
    assert [(line["layout"], line["reason"]) for line in logs] == [
        ("tree", "its attention has a window of 4 tokens")
    ]
    made = random_tree(1, 97)
    with pytest.raises(LearnerError, match="takes no tree"):
        score_rows(model, made)
    with torch.no_grad():
        together = score_rows(model, made, layout="stretches").logprobs
        alone = torch.cat([score_rows(model, [row], layout="whole").logprobs for row in made])
    assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "window"), [("gemma3_text", "sliding_window"), ("llama4", "attention_chunk_size")]
)
def test_way_of_computing_that_ignores_a_long_attention_window_is_not_chosen(
    family: str, window: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(write_family(tmp_path, family))
    model = attach_adapter(base, LoraOptions(), None, 0)
    config = model.config.get_text_config()
    setattr(config, window, 4096)
    assert choose_layout(model, Processes(), ["stretches", "whole"]) == "stretches"
    chains = scoring._chain_states

    def without_window(model: Any, rows: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(config, window, 10_000)
            return chains(model, rows)

    monkeypatch.setattr(scoring, "_stretch_states", without_window)
    assert choose_layout(model, Processes(), ["stretches", "whole"]) == "whole"
    assert getattr(config, window) == 4096


def test_unknown_lm_head_is_computed_by_the_model_itself() -> None:
    """A head that is scaled behind the matrix: nothing in the configuration says so."""
    base = LlamaForCausalLM(copy.deepcopy(TINY))
    base.lm_head.register_forward_hook(lambda _, __, logits: logits * 3.0)
    with capture_logs() as logs:
        assert choose_layout(adapted(base), Processes()) == "whole"
    assert all("differs from whole rows by" in line["reason"] for line in logs)
    assert base.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("broken", "error", "layout"),
    [
        ("attention_tree", RuntimeError("attention failed"), "stretches"),
        ("attention_tree", torch.OutOfMemoryError("CUDA out of memory"), "stretches"),
        ("_tree_states", RuntimeError("Failed to find C compiler"), "stretches"),
        ("_chain_states", NotImplementedError("no such kernel"), "tree"),
        ("head_logprobs", AssertionError("head failed"), "whole"),
    ],
    ids=["attention", "memory", "compiler", "chain", "head"],
)
def test_failing_way_of_computing_is_logged_and_the_next_way_trains(
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    error: Exception,
    layout: Layout,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(scoring, broken, fail)
    with capture_logs() as logs:
        made = Learner(tiny_model, recipe(), seed=0, scratch=tmp_path)
        assert made.update(rows())["optimizer_steps"] == 1
    passed_over = [line["layout"] for line in logs if line["event"] == "layout_passed_over"]
    assert passed_over == list(LAYOUTS[: LAYOUTS.index(layout)])
    assert all(str(error) in line["reason"] for line in logs if "layout" in line)


def test_every_way_of_computing_rows_makes_the_same_update(tiny_model: str, tmp_path: Path) -> None:
    system = range(2, 72)
    alike = [msgspec.structs.replace(r, prompt_ids=(*system, *r.prompt_ids)) for r in rows()]
    roomy = recipe(micro_batch_tokens=256)
    metrics = by_every_layout(tiny_model, roomy, [*alike, *grown(8, 3)], tmp_path)
    tokens = [metrics[layout]["computed_tokens"] for layout in LAYOUTS]
    assert tokens[0] < tokens[1] < tokens[2] < tokens[3] < metrics["tree"]["row_tokens"]


def test_drift_out_of_bounds_is_raised_and_changes_no_weight(renew: Renew) -> None:
    narrow = recipe().model_copy(update={"off_policy": OffPolicyOptions(max_drift=1e-5)})
    made = renew(narrow)
    before = [p.detach().clone() for p in made._model.parameters()]
    with pytest.raises(DriftOutOfBounds, match="max_drift is 1e-05") as raised:
        made.update(rows())
    assert raised.value.reason == "drift"
    assert raised.value.metrics["drift_kl"] > 1e-5
    for one, other in zip(before, made._model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_rows_of_an_older_version_are_not_judged_for_drift(renew: Renew) -> None:
    narrow = recipe().model_copy(update={"off_policy": OffPolicyOptions(max_drift=1e-9)})
    made = renew(narrow)
    older = [msgspec.structs.replace(row, version=-1) for row in rows()]
    found = made.update(older)
    assert found["drift_kl"] is None
    assert found["staleness_kl"] is None
    assert 0 < found["effective_sample_size"] <= 1


def test_off_policy_sequence_carries_no_loss(renew: Renew) -> None:
    masking = recipe().model_copy(update={"off_policy": OffPolicyOptions(max_drift=1e9)})
    made = renew(masking)
    near, *_ = rows()
    own = tuple(made.logprobs([near])[0])
    near = msgspec.structs.replace(near, sampled_logprobs=own, distribution=PLAIN)
    far = msgspec.structs.replace(
        near,
        episode_id=UUID(int=9),
        version=-1,
        sampled_logprobs=tuple(value + 3 for value in own),
    )
    alone = made.update([near])
    assert alone["masked_share"] == 0.0
    made.restore(None)
    both = made.update([near, far])
    assert both["masked_share"] == 0.5
    assert both["grad_norm"] == pytest.approx(alone["grad_norm"] / 2)
    made.restore(None)
    with pytest.raises(Unusable, match="no call carries loss") as refused:
        made.update([far])
    assert refused.value.reason == "off_policy"
    assert list(refused.value.episodes) == [far.episode_id]
