"""Memory is planned from a configuration: what a hand calculation gives, and what torch keeps."""

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from pawl.cli import app
from pawl.commands.plan import MemoryPlan, memory_plan
from tests.support.trainer.families import ALL, LONG, write_family
from tests.support.training import ppo_recipe, recipe, rows, sft_recipe
from trainer.batches import Row, computed_tokens
from trainer.errors import TOO_LONG, LearnerError, ShortOfMemory, Unusable
from trainer.learners import memory
from trainer.learners.adapter import attach_adapter
from trainer.learners.kernels import process
from trainer.learners.kernels.layers import make_base_lean
from trainer.learners.learner import Learner
from trainer.learners.memory import GIB, Footprint, LivingBytes
from trainer.learners.model import Base, is_checkpointed
from trainer.learners.processes import Processes
from trainer.recipes.recipe import Recipe

pytestmark = pytest.mark.usefixtures("measured_once")

MIB = 2**20
ON_A_CARD = ("--gpu-gib", "80")
# Families with one of each kind of layers, among them some that share keys and values.
KINDS_OF_LAYERS = [
    *("bloom", "deepseek_v2", "exaone_moe", "gemma3n_text", "gemma4_text", "jamba", "lfm2_moe"),
    *("minimax", "olmo_hybrid", "persimmon", "zamba2"),
]


@pytest.fixture(scope="module")
def base(tiny_model: str) -> Base:
    """The base of all learners, each of which takes it from the one before."""
    return Base(tiny_model, recipe())


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


def test_memory_plan_of_a_model_of_8b_agrees_with_the_hand_calculation(qwen3_8b: Path) -> None:
    """The figures of docs/howto/plan-memory.md."""
    asked = ["plan", str(qwen3_8b), *ON_A_CARD, "--context", "32768", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    made: dict[str, Any] = msgspec.json.decode(done.output)
    by_hand = {
        "weights_gib": 8.19e9 * 2 / GIB,
        "optimizer_gib": 43.6e6 * 20 / GIB,
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
    assert (made["server_gib"], made["layout"], made["advice"]) == (
        40.0,
        "tree",
        [],
    )
    assert (made["unique_tokens"], made["row_tokens"]) == (32768, 32768 * 21 // 2)


def test_packed_model_of_32b_trains_beside_its_server_of_8_bits(tmp_path: Path) -> None:
    """The figures of docs/howto/plan-memory.md."""
    Qwen3Config(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
    ).save_pretrained(tmp_path)
    for bits, weights, longest in (
        ("", 61.0, 0),
        ("base_bits = 8", 32.2, 3_200),
        ("base_bits = 4", 18.1, 18_000),
    ):
        (tmp_path / "recipe.toml").write_text(f'dtype = "auto"\n{bits}')
        recipe_file = str(tmp_path / "recipe.toml")
        asked = ["plan", str(tmp_path), *ON_A_CARD, "--recipe", recipe_file, "--json"]
        done = CliRunner().invoke(app, asked)
        made: dict[str, Any] = msgspec.json.decode(done.output)
        assert made["weights_gib"] == pytest.approx(weights, rel=0.02)
        assert made["longest"] == pytest.approx(longest, rel=0.1)
        assert '(PAWL_VLLM_ARGS="--quantization fp8")' in made["advice"][0]
        assert ("base_bits = 4" in made["advice"][1]) is (not bits)


def test_planned_activations_match_a_real_forward_pass(tiny_model: str) -> None:
    planned = memory.footprint(tiny_model, recipe(), "cpu").plain
    base = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="sdpa")
    make_base_lean(base)
    model = attach_adapter(base, recipe().lora, None, 0)
    tokens = 200
    with LivingBytes([*model.parameters(), *model.buffers()]) as living:
        out = base.get_decoder()(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)[0]
        kept = living.now / tokens
    assert out.requires_grad
    # What the last layer's backward pass adds is planned, too.
    assert kept <= planned <= 1.25 * kept


def test_plan_counts_activations_of_used_experts_only(tmp_path: Path) -> None:
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
        takes.append(memory.footprint(str(folder), recipe()))
    few, many, more_used = takes
    assert few.weights < many.weights == more_used.weights
    assert few.plain == pytest.approx(many.plain, rel=0.1)
    assert more_used.plain > 1.5 * many.plain


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--serve-share", "0.9"], "the weights do not fit beside vLLM"),
        (["--serve-share", "0.1"], "vLLM's share does not hold the weights in 16 bits"),
        # 36 layers of 2 x 8 heads of 128, in 16 bits: 4.5 GiB for the whole context.
        (["--serve-share", "0.22"], "vLLM's share does not hold the weights and a call of 40960"),
        (["--gpu-gib", "16", "--serve-share", "0"], "do not fit: pack the weights (base_bits = 4"),
        (["--context", "100000"], "would not be trained (too_long): lower"),
    ],
)
def test_plan_advises_how_to_make_training_fit(qwen3_8b: Path, more: list[str], said: str) -> None:
    asked = ["plan", str(qwen3_8b), *ON_A_CARD, "--json", *more]
    done = CliRunner().invoke(app, asked)
    assert said in msgspec.json.decode(done.output)["advice"][0]


# Of 42 GiB, 40 of them in as many layers; a token takes 1 MiB, or 2, and as much in a server.
LARGE = Footprint(
    family="f",
    architecture="F",
    why_no_tree=None,
    context=None,
    parameters=21 * GIB,
    trained=1,
    weights=42 * GIB,
    packed=14 * GIB,
    layers=(GIB,) * 40,
    quantised=None,
    served=42 * GIB,
    cached=MIB,
    optimizer=GIB,
    head=GIB,
    plain=2 * MIB,
    checkpointed=MIB,
)
MIXTURE = {"packed": None}
IN_FP8 = {"packed": None, "quantised": "fp8", "served": 21 * GIB}
# By `base_bits = 4` in the recipe: whole in each process.
PACKED = {"weights": 14 * GIB, "layers": ()}
PACK = "pack the weights (base_bits = 4 in the recipe)"
SMALLER = "or train a smaller model"
FP8 = 'serve 8 bits (PAWL_VLLM_ARGS="--quantization fp8")'


def plan_of(
    change: dict[str, Any], gpu_gib: float, share: float, context: int = 1024, **more: Any
) -> MemoryPlan:
    takes = msgspec.structs.replace(LARGE, **change)
    named: dict[str, Any] = {"model": "m", "device": "cuda", "turns": 1, "context": context}
    named |= {"recipe": recipe(), "memory_gib": gpu_gib, "serve_share": share} | more
    return memory_plan(takes, **named)


def gpus(count: int, own: str = "") -> str:
    return f"give the trainer {count} GPUs{own} (PAWL_TRAIN_GPUS), which share the weights"


@pytest.mark.parametrize(
    ("plan", "advice"),
    [
        (plan_of({}, 180, 0.5), []),
        # A trainer that is alone needs no GPU of its own, and experts cannot be packed.
        (plan_of({}, 40, 0), [f"the weights do not fit: {PACK}, {gpus(2)}, {SMALLER}"]),
        # Room for 102 tokens, which PAWL_MAX_MODEL_LEN would refuse.
        (plan_of(MIXTURE, 45.1, 0), [f"the weights do not fit: {gpus(2)}, {SMALLER}"]),
        (plan_of(MIXTURE, 40, 0), [f"the weights do not fit: {gpus(2)}, {SMALLER}"]),
        (plan_of(MIXTURE, 20, 0, gpus=2), [f"the weights do not fit: {gpus(4)}, {SMALLER}"]),
        (plan_of(MIXTURE, 20, 0, gpus=4), []),
        # No number of GPUs suffices where one layer does not fit, or all are whole in each.
        (plan_of({}, 6, 0), ["the weights do not fit: train a smaller model"]),
        (plan_of(PACKED, 14, 0), ["the weights do not fit: train a smaller model"]),
        (
            plan_of(MIXTURE, 60, 0.8),
            [
                "the weights do not fit beside vLLM: give the trainer a GPU of its own"
                f" (PAWL_TRAIN_GPUS), {SMALLER}"
            ],
        ),
        (
            plan_of({}, 100, 0.3),
            [
                "vLLM's share does not hold the weights in 16 bits: give it more"
                f" (PAWL_SERVE_GPU_SHARE), {FP8}, give it another GPU (PAWL_SERVE_GPUS), or serve"
                " a smaller model"
            ],
        ),
        (
            plan_of(IN_FP8 | {"layers": ()}, 20, 0.5),
            [
                "vLLM's share does not hold the weights: give it several GPUs (PAWL_SERVE_GPUS,"
                " --tensor-parallel-size), or serve a smaller model",
                "the weights do not fit beside vLLM: train a smaller model",
            ],
        ),
        (
            plan_of(MIXTURE, 180, 0.7, context=10_000),
            [
                "calls longer than 9216 tokens would not be trained (too_long): lower"
                " PAWL_MAX_MODEL_LEN to that, give vLLM less (PAWL_SERVE_GPU_SHARE), or give the"
                " trainer a GPU of its own (PAWL_TRAIN_GPUS)"
            ],
        ),
        (
            plan_of({}, 60, 0, context=100_000),
            [
                "calls longer than 15360 tokens would not be trained (too_long): lower"
                " PAWL_MAX_MODEL_LEN to that"
            ],
        ),
        (
            plan_of(
                {}, 46, 0, recipe=recipe(micro_batch_tokens=2048, gradient_checkpointing=False)
            ),
            [
                "leave batch.gradient_checkpointing out: it is switched on where needed",
                "set batch.micro_batch_tokens = 1024 or less",
            ],
        ),
    ],
)
def test_each_memory_plan_gets_its_advice(plan: MemoryPlan, advice: list[str]) -> None:
    assert list(plan.advice) == advice


def test_followed_advice_is_accepted_and_gone_from_the_next_memory_plan() -> None:
    """Whoever follows one of the ways, and plans again, has that line no more."""
    followed = set[str]()
    cases = product(
        ({}, MIXTURE, IN_FP8, PACKED, {"served": 10 * GIB}),
        (6, 16, 40, 80, 141),
        (0, 0.2, 0.5, 0.9),
        (1, 2, 6),
        (64, 1024, 32_768),
    )
    for change, gpu_gib, share, count, context in cases:
        serving = change.get("served", LARGE.served) + context * MIB
        enough = serving / GIB / gpu_gib + 1e-12
        made = plan_of(change, gpu_gib, share, context, gpus=count)
        for line in made.advice:
            again = {
                "base_bits = 4": (change | PACKED, gpu_gib, share, context, count),
                "give vLLM less": (change, gpu_gib, enough, context, count),
                "give it more": (change, gpu_gib, enough, context, count),
                "a GPU of its own": (change, gpu_gib, 0, context, 1),
                "lower PAWL_MAX_MODEL_LEN": (change, gpu_gib, share, made.longest, count),
            }
            for many in re.findall(r"(\d+) GPUs", line):
                again[f"{many} GPUs"] = (change, gpu_gib, 0, context, int(many))
            for way, (*asked, processes) in again.items():
                if way in line:
                    followed.add(way)
                    then = plan_of(*asked, gpus=processes).advice
                    assert line[:12] not in {other[:12] for other in then}, (line, then)
                    if way.endswith((" less", " more")):
                        assert not any("vLLM's share" in other for other in then)
            assert not ("base_bits" in line and {"packed", "layers"} & change.keys())
            assert not (FP8 in line and "quantised" in change)
            in_fp8 = (serving if "a call" in line else change.get("served", LARGE.served)) / GIB
            in_fp8 -= change.get("served", LARGE.served) / 2 / GIB
            assert (FP8 not in line) or in_fp8 < share * gpu_gib
            assert not ("another GPU" in line and serving > 0.9 * gpu_gib * GIB)
    assert followed >= {"base_bits = 4", "give vLLM less", "give it more", "a GPU of its own"}
    assert followed >= {"lower PAWL_MAX_MODEL_LEN", "2 GPUs"}


def test_gpus_of_a_trainer_share_only_the_layers_of_the_model(qwen3_8b: Path) -> None:
    """Embeddings and head are whole in each, and one layer twice while it is computed."""
    plans = []
    for more in ([], ["--gpus", "4"]):
        done = CliRunner().invoke(app, ["plan", str(qwen3_8b), *ON_A_CARD, *more, "--json"])
        plans.append(msgspec.json.decode(done.output))
    one, four = plans
    a_layer = 2 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288) / GIB
    outside = 2 * 2 * 151936 * 4096 / GIB
    assert one["weights_gib"] == pytest.approx(outside + 36 * a_layer, rel=0.01)
    assert four["weights_gib"] == pytest.approx(outside + 36 / 4 * a_layer + 2 * a_layer, rel=0.01)
    saved = one["weights_gib"] - four["weights_gib"]
    longer = (four["longest"] - one["longest"]) * one["checkpointed_mib"] / 1024
    assert (four["gpus"], longer) == (4, pytest.approx(saved, rel=0.01))


def test_plan_for_gpus_without_their_memory_size_is_refused(
    qwen3_8b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["plan", str(qwen3_8b), "--gpus", "2"])
    assert (done.exit_code, "--gpu-gib" in done.output) == (2, True)


@pytest.mark.parametrize(("method", "packs"), [(None, True), ("fp8", False)])
def test_base_that_is_stored_in_few_bits_is_not_packed(
    tmp_path: Path, method: str | None, packs: bool
) -> None:
    write_family(tmp_path, "qwen2")
    path = tmp_path / "config.json"
    stored = msgspec.json.decode(path.read_bytes())
    if method is not None:
        stored["quantization_config"] = {"quant_method": method}
    path.write_bytes(msgspec.json.encode(stored))
    takes = memory.footprint(str(tmp_path), recipe())
    assert (takes.packed is not None, takes.quantised) == (packs, method)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(("kind", "lacks"), [("stablelm", True), ("granitemoeshared", False)])
def test_architecture_without_lora_in_vllm_is_the_first_advice(
    tmp_path: Path, kind: str, lacks: bool
) -> None:
    write_family(tmp_path, kind)
    done = CliRunner().invoke(app, ["plan", str(tmp_path), *ON_A_CARD, "--json"])
    said = ["the vLLM installed here has no LoRA for StableLmForCausalLM: train another model"]
    assert msgspec.json.decode(done.output)["advice"] == (said if lacks else [])


def test_plan_without_a_gpu_uses_this_machines_memory(
    qwen3_8b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(process, "total_memory", lambda _: 200 * GIB)
    done = CliRunner().invoke(app, ["plan", str(qwen3_8b / "config.json"), "--json"])
    made: dict[str, Any] = msgspec.json.decode(done.output)
    assert (made["device"], made["memory_gib"], made["context"]) == ("cpu", 200.0, 2048)
    # In float32, here and there, and a tenth of the memory stays free.
    assert made["weights_gib"] == pytest.approx(8.19e9 * 4 / GIB, rel=0.01)
    assert made["server_gib"] == pytest.approx(8.19e9 * 4 / GIB + 2, rel=0.01)
    needs = made["weights_gib"] + made["optimizer_gib"] + made["head_gib"] + made["overhead_gib"]
    room = 180 - made["server_gib"] - needs
    assert made["longest"] == pytest.approx(room * 1024 / made["checkpointed_mib"], rel=0.01)
    assert made["advice"] == []


def test_plan_of_a_model_without_a_configuration_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"cannot be planned: .*config.json"):
        memory.footprint(str(tmp_path), recipe())


def has_room(monkeypatch: pytest.MonkeyPatch, takes: Footprint, a_token: int, tokens: int) -> None:
    """Let there be memory for so many tokens of so many bytes, once the model is loaded."""
    free = takes.optimizer + takes.head + a_token * tokens
    monkeypatch.setattr("trainer.learners.learner.available_memory", lambda _: free)


def test_trainer_says_at_its_start_which_calls_will_be_too_long(
    tiny_model: str, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the figures of `pawl plan`."""
    takes = memory.footprint(tiny_model, recipe(), "cpu")
    has_room(monkeypatch, takes, takes.checkpointed, 100)
    with capture_logs() as logs:
        Learner(base, recipe(), seed=0, scratch=tmp_path)
    [said] = [line for line in logs if line["event"] == "calls_too_long"]
    assert (said["past_tokens"], said["context"]) == (100, 256)
    assert REGISTRY.get_sample_value("pawl_longest_call_tokens") == 100


def test_only_as_many_layers_are_checkpointed_as_needed(
    tiny_model: str, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = memory.footprint(tiny_model, recipe(), "cpu")
    made = Learner(base, recipe(), seed=0, scratch=tmp_path)
    saved = takes.plain - takes.checkpointed
    for a_token, wanted in (
        (takes.plain, 0),
        (takes.plain - saved // 2, 2),
        (takes.checkpointed, 3),
    ):
        has_room(monkeypatch, takes, a_token, made._budget.tokens)
        made.update(rows())
        decoder = made._model.get_base_model().get_decoder()
        layers = decoder.layers
        assert ["forward" in vars(layer) for layer in layers] == [i < wanted for i in range(3)]
        assert not decoder.get_input_embeddings()._forward_hooks


def test_take_less_halves_the_micro_batch_tokens_and_checkpoints_layers(
    base: Base, tmp_path: Path
) -> None:
    made = Learner(base, recipe(micro_batch_tokens=256), seed=0, scratch=tmp_path)
    assert made.halve_micro_batches(1) == 128
    made.update(rows())
    assert made._budget.tokens == 128
    assert is_checkpointed(made._model.get_base_model())
    assert made.halve_micro_batches(9) == 64


def test_update_on_a_cpu_is_cut_into_micro_batches_that_fit(
    tiny_model: str, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends a trainer that takes too much: there is no second attempt."""
    roomy = Learner(base, recipe(micro_batch_tokens=256), seed=0, scratch=tmp_path)
    roomy.update(rows())
    wanted = [parameter.clone() for parameter in roomy._model.parameters()]
    tight = Learner(base, recipe(micro_batch_tokens=256), seed=0, scratch=tmp_path)
    takes = memory.footprint(tiny_model, recipe(), "cpu")
    loss_of, seen = tight._trainer.loss_of, []

    def noted(batch: Sequence[Row]) -> torch.Tensor:
        seen.append(computed_tokens(batch))
        return loss_of(batch)

    monkeypatch.setattr(tight._trainer, "loss_of", noted)
    has_room(monkeypatch, takes, takes.checkpointed, 30)
    tight.update(rows())
    assert max(seen) <= 30
    for one, other in zip(tight._model.parameters(), wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_calls_too_long_for_a_cpu_are_blamed_on_their_own_episodes_alone(
    tiny_model: str, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Learner(base, recipe(), seed=0, scratch=tmp_path)
    takes, batch = memory.footprint(tiny_model, recipe(), "cpu"), rows()
    longest = max(row.size for row in batch)
    has_room(monkeypatch, takes, takes.checkpointed, longest - 1)
    with pytest.raises(Unusable, match=f"a call of {longest} tokens does not fit") as raised:
        made.update(batch)
    assert set(raised.value.episodes) == {r.episode_id for r in batch if r.size == longest}
    assert raised.value.reason == TOO_LONG
    # What had room before will have it again.
    has_room(monkeypatch, takes, takes.checkpointed, 1000)
    made.update(batch)
    has_room(monkeypatch, takes, takes.checkpointed, longest - 1)
    with pytest.raises(ShortOfMemory):
        made.update(batch)
    # What is too little for all of them is nobody's fault.
    has_room(monkeypatch, takes, takes.checkpointed, 3)
    with pytest.raises(
        ShortOfMemory, match="CPU's memory only has room for calls of 3 tokens: leave"
    ):
        made.update(batch)


def test_free_cpu_memory_is_that_of_the_container_minus_a_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:    700 kB\n")
    monkeypatch.setattr(process, "MEMINFO", meminfo)
    monkeypatch.setattr(process, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    assert process.available_memory(cpu) == 600 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert process.available_memory(cpu) == 600 * 1024
    (tmp_path / "memory.max").write_text(f"{500 * 1024}\n")
    (tmp_path / "memory.current").write_text(f"{300 * 1024}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {50 * 1024}\nslab 2\n")
    assert process.available_memory(cpu) == 200 * 1024
    assert process.total_memory("cpu") == 500 * 1024


def test_model_that_cannot_be_planned_is_trained(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("its kernels want a GPU")

    monkeypatch.setattr("trainer.learners.learner.footprint", fail)
    with capture_logs() as logs:
        Learner(base, recipe(), seed=0, scratch=tmp_path).update(rows())
    [said] = [line for line in logs if line["event"] == "memory_not_planned"]
    assert said["reason"] == "ValueError: its kernels want a GPU"


def test_no_training_process_uses_a_memory_plan_that_another_lacks(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_another(_: Processes, own: object) -> list[object]:
        return [own, False] if own is True else [own]

    monkeypatch.setattr(Processes, "gather", with_another)
    assert Learner(base, recipe(), seed=0, scratch=tmp_path)._memory_plan is None


@pytest.mark.parametrize(
    ("make", "planned", "holds", "tried", "longest"),
    [
        # What is planned for with checkpointing is tried with it, and takes three times as much.
        (recipe, ("checkpointed", 240), (0, 240), [(240, True)], 80),
        # It does not fit: half of it does.
        (sft_recipe, ("checkpointed", 240), (0, 130), [(240, True), (120, True)], 80),
        # It fits without.
        (recipe, ("plain", 800), (256, 256), [(256, False)], None),
        # It should fit without, and only does with.
        (ppo_recipe, ("plain", 400), (130, 256), [(256, False), (256, True)], None),
        # Nothing worth having fits.
        (recipe, ("checkpointed", 240), (0, 0), [(240, True), (120, True)], 60),
    ],
)
def test_rehearsal_of_the_longest_row_corrects_the_plan(
    tiny_model: str,
    base: Base,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Recipe],
    planned: tuple[str, int],
    holds: tuple[int, int],
    tried: list[tuple[int, bool]],
    longest: int | None,
) -> None:
    """A GPU that `holds` so many tokens without and with checkpointing, of thrice the bytes."""
    takes = memory.footprint(tiny_model, make(), "cpu")
    has_room(monkeypatch, takes, getattr(takes, planned[0]), planned[1])
    made = Learner(base, make(), seed=0, scratch=tmp_path)
    seen = []
    loss_of = made._trainer.loss_of

    def with_little_room(batch: Sequence[Row]) -> torch.Tensor:
        saves = is_checkpointed(made._model.get_base_model())
        seen.append((batch[0].size, saves))
        if batch[0].size > holds[saves]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(batch)

    def peak_of(_: torch.device, run: Callable[[], bool]) -> int | None:
        if not run():
            return None
        tokens, saves = seen[-1]
        return takes.head + 3 * (takes.checkpointed if saves else takes.plain) * tokens

    monkeypatch.setattr(made._trainer, "loss_of", with_little_room)
    monkeypatch.setattr("trainer.learners.learner.peak_bytes_of", peak_of)
    made._rehearse_longest(takes)
    assert seen == tried
    with capture_logs() as logs:
        made._plan_memory()
    said = [line["past_tokens"] for line in logs if line["event"] == "calls_too_long"]
    assert said == ([] if longest is None else [longest])
    # Nothing was learned from it.
    monkeypatch.setattr(made._trainer, "loss_of", loss_of)
    loss = made.update(rows())["loss"]
    assert Learner(base, make(), seed=0, scratch=tmp_path).update(rows())["loss"] == loss


def test_failed_rehearsal_of_a_bounded_row_is_logged_and_training_goes_on(
    tiny_model: str, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Learner(base, recipe(), seed=0, scratch=tmp_path)
    takes, seen = memory.footprint(tiny_model, recipe(), "cpu"), []
    loss_of = made._trainer.loss_of

    def fail(batch: Sequence[Row]) -> torch.Tensor:
        seen.append(batch[0].size)
        loss_of(batch).backward()
        raise ValueError("a kernel takes no more tokens")

    monkeypatch.setattr(made._trainer, "loss_of", fail)
    monkeypatch.setattr("trainer.learners.learner.peak_bytes_of", lambda _, run: run())
    monkeypatch.setattr("trainer.learners.learner.LONGEST_TRIED", 100)
    with capture_logs() as logs:
        made._correct_plan(takes)
    [said] = [line["reason"] for line in logs if line["event"] == "longest_row_failed"]
    assert (said, seen) == ("ValueError: a kernel takes no more tokens", [100])
    monkeypatch.setattr(made._trainer, "loss_of", loss_of)
    loss = made.update(rows())["loss"]
    assert Learner(base, recipe(), seed=0, scratch=tmp_path).update(rows())["loss"] == loss


@pytest.mark.usefixtures("short_plan")
@pytest.mark.parametrize("kind", KINDS_OF_LAYERS)
def test_memory_of_each_kind_of_layers_on_a_gpu_is_planned(tmp_path: Path, kind: str) -> None:
    """As test_families.py plans nearly all model families on a CPU."""
    write_family(tmp_path, kind)
    planned = memory.footprint(str(tmp_path), recipe())
    assert planned.plain > planned.checkpointed > 0
    assert planned.context == 4096


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_models_with_longrope_factors_are_planned(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = ALL[kind][0] | LONG
    extra["rope_parameters"] = extra["rope_parameters"] | {"short_mscale": 1.1, "long_mscale": 1.3}
    monkeypatch.setitem(ALL, kind, (extra, "tree"))
    write_family(tmp_path, kind)
    assert memory.footprint(str(tmp_path), recipe()).context == 4096


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "zork9"}, "does not recognize this architecture; name"),
        ({"model_type": "t5gemma"}, "an encoder-decoder, not a causal language model; name"),
        ({"model_type": "clap"}, "for this kind of AutoModel: AutoModelForCausalLM; name"),
        ({"model_type": "bert"}, "BertLMHeadModel has no list of layers"),
    ],
)
def test_unplannable_model_is_refused_with_a_short_reason(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(LearnerError, match=said) as raised:
        memory.footprint(str(tmp_path), recipe())
    assert len(str(raised.value)) < 500
