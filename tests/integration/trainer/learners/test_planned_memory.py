"""Memory is planned from a configuration: what a hand calculation gives, and what torch keeps."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from pawl.cli import app
from tests.support.training import recipe
from trainer.errors import LearnerError
from trainer.learners.adapter import attach_adapter
from trainer.learners.kernels.layers import make_base_lean
from trainer.learners.learner import Learner
from trainer.learners.memory import GIB, LivingBytes, footprint

MIB = 2**20


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-8b")
    Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
    ).save_pretrained(folder)
    return folder


def test_plan_of_a_model_of_8b_agrees_with_the_hand_calculation(qwen3_8b: Path) -> None:
    """The figures of docs/howto/plan-memory.md."""
    done = CliRunner().invoke(app, ["plan", str(qwen3_8b), "--context", "32768", "--json"])
    assert done.exit_code == 0, done.output
    made: dict[str, Any] = msgspec.json.decode(done.output)
    by_hand = {
        "weights_gib": 8.19e9 * 2 / GIB,
        "optimizer_gib": 43.6e6 * 16 / GIB,
        # Seven vectors of the width, four of the keys' and values', and
        # three of the unit's; two bytes each, in 36 layers.
        "plain_mib": 36 * 2 * (7 * 4096 + 4 * 1024 + 3 * 12288) / MIB,
        # A layer's input, 36 times; one layer, computed again; its gradients.
        "checkpointed_mib": 2 * (36 * 4096 + 70_000 + 4096 + 2 * 12288) / MIB,
        "longest": 47_000,
        "longest_plain": 4_700,
    }
    for name, wanted in by_hand.items():
        assert made[name] == pytest.approx(wanted, rel=0.1), name
    assert made["longest"] >= 32_000
    assert (made["server_gib"], made["way"], made["advice"]) == (
        40.0,
        "tree",
        [],
    )
    assert (made["unique_tokens"], made["row_tokens"]) == (32768, 32768 * 21 // 2)


def test_planned_activations_are_those_of_a_real_forward_pass(tiny_model: str) -> None:
    planned = footprint(tiny_model, recipe(), "cpu").plain
    base = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="sdpa")
    make_base_lean(base)
    model = attach_adapter(base, recipe().lora, None, 0).train()
    tokens = 200
    with LivingBytes([*model.parameters(), *model.buffers()]) as living:
        out = base.get_decoder()(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)[0]
        kept = living.now / tokens
    assert out.requires_grad
    # What the last layer's backward pass adds is planned, too.
    assert kept <= planned <= 1.25 * kept


def test_experts_count_as_far_as_a_token_uses_them(tmp_path: Path) -> None:
    takes = []
    for experts, used in ((8, 2), (16, 2), (16, 4)):
        folder = tmp_path / f"{experts}-{used}"
        Qwen3MoeConfig(
            vocab_size=97,
            hidden_size=32,
            moe_intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=experts,
            num_experts_per_tok=used,
        ).save_pretrained(folder)
        takes.append(footprint(str(folder), recipe()))
    few, many, more_used = takes
    assert few.weights < many.weights == more_used.weights
    assert few.plain == pytest.approx(many.plain, rel=0.1)
    assert more_used.plain > 1.5 * many.plain


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--serve-share", "0.9"], "the weights do not fit beside vLLM"),
        (["--serve-share", "0.1"], "vLLM's share does not hold the weights"),
        (["--context", "100000"], "would not be trained (too_long): lower"),
    ],
)
def test_plan_says_what_to_change(qwen3_8b: Path, more: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", str(qwen3_8b / "config.json"), "--json", *more])
    assert said in msgspec.json.decode(done.output)["advice"][0]


def test_model_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"cannot be planned: .*config.json"):
        footprint(str(tmp_path), recipe())


def test_trainer_says_at_its_start_which_calls_will_be_too_long(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.learners.learner.free_memory", lambda _: 2**18)
    with capture_logs() as logs:
        Learner(tiny_model, recipe(), seed=0, scratch=tmp_path)
    [said] = [line for line in logs if line["event"] == "calls_too_long"]
    assert 0 < said["past_tokens"] < said["context"] == 256
