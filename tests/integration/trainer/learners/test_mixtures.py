"""The learner on tiny mixtures: experts are trained where they are served, routers never."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from aiohttp import web
from peft import PeftModel
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from tests.integration.trainer.learners.conftest import short_plans
from tests.support.mixtures import tiny_model
from tests.support.servers.computing_server import Server
from tests.support.trainer.reference import shake
from tests.support.training import PLAIN, recipe, renewed, rows, write_words
from trainer.batches import Row
from trainer.learners.learner import Learner
from trainer.learners.model import is_checkpointed, save_merged
from trainer.publishing.adapters import SERVED_FILES
from trainer.publishing.model_server import Replicas
from trainer.recipes.recipe import Recipe
from trainer.updates.self_test import ServerSelfTest

WITH_TEXTS = ("qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss")
# Whatever a folder says, transformers reads Qwen3.5's own tokenizer there, which has no words of a
# tiny model.
KINDS = (*WITH_TEXTS, "qwen3_5_moe_text")


@pytest.fixture(scope="module", params=KINDS)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(folder)
    write_words(folder)
    return str(folder)


@pytest.fixture(scope="module")
def learner(mixture: str, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    with short_plans():
        return Learner(mixture, recipe(), seed=0, scratch=tmp_path_factory.mktemp("learner"))


@pytest.fixture
def made(learner: Learner) -> Learner:
    """The mixture's one learner, with a new adapter."""
    return renewed(learner, recipe())


def save(made: Learner, folder: Path) -> Path:
    folder.mkdir()
    made.save(folder)
    return folder


def same(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in SERVED_FILES)


def names_in(adapter: Path) -> set[str]:
    weights = load_file(adapter / SERVED_FILES[1])
    # A new adapter's second matrices are zero, and not one of them stays so.
    assert all(bool(tensor.any()) for name, tensor in weights.items() if "lora_B" in name)
    return set(weights)


def test_update_trains_experts_without_routers_and_resumes_from_files(
    made: Learner, tmp_path: Path
) -> None:
    probed = plain(rows(5, groups=1))
    base = made.version_logprobs(None, probed)
    made.restore(None)
    made.update(rows(0, groups=2))
    first = save(made, tmp_path / "1")
    names = names_in(first)
    assert not [name for name in names if re.search(r"\.gate\.|_gate\.|\.router\.", name)]
    # As vLLM reads them: those of `gate_up_proj` are inside.
    of_experts = {name.partition(".experts.")[2] for name in names} - {""}
    sides = ("lora_A.weight", "lora_B.weight")
    assert of_experts == {*sides, *(f"base_layer.{side}" for side in sides)}
    made.update(rows(1, groups=2))
    second = save(made, tmp_path / "2")
    # As versions are computed: row by row, rounding differs.
    trained = made._row_logprobs(probed)
    assert differ(trained, base) > 1e-3

    again = renewed(made, recipe())
    again.restore(first)
    again.update(rows(1, groups=2))
    assert same(save(again, tmp_path / "again"), second)
    # Switched off, taken off, and read back.
    assert differ(again.version_logprobs(None, probed), base) == 0
    assert differ(again.version_logprobs(second, probed), trained) < 1e-5


def test_checkpointing_changes_no_gradient_of_experts(made: Learner) -> None:
    found = []
    for checkpointing in (False, True):
        renewed(made, recipe(gradient_checkpointing=checkpointing))
        shake(made, 0.1)
        made._trainer.loss_of(rows(0)).backward()
        policy, _ = made._trainer.trained_parameters()
        found.append(torch.cat([parameter.grad.flatten() for parameter in policy]))
        assert is_checkpointed(made._model.get_base_model()) is checkpointing
    assert (found[0] - found[1]).norm() < 1e-5 * found[0].norm()


def plain(told: Sequence[Row]) -> list[Row]:
    return [msgspec.structs.replace(row, distribution=PLAIN) for row in told]


def differ(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    pairs = [
        pair for row, own in zip(one, other, strict=True) for pair in zip(row, own, strict=True)
    ]
    return max(abs(left - right) for left, right in pairs)


def shaken(made: Learner, tmp_path: Path) -> Path:
    """Give the learner's adapter an effect; return the adapter's folder."""
    shake(made, 0.1)
    return save(made, tmp_path / "1")


def test_peft_and_merged_weights_compute_the_same_experts(mixture: str, tmp_path: Path) -> None:
    # It computes in double precision from here on.
    with short_plans():
        made = Learner(mixture, recipe(), seed=0, scratch=tmp_path, layouts=("whole",))
    folder = shaken(made, tmp_path)
    ids = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    save_merged(mixture, folder, tmp_path / "merged")
    merging = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    # In float64: in float32 products of another shape differ by 1e-5 on some processors.
    for model in (made._model.get_base_model(), base, merging):
        model.set_experts_implementation("eager")
        model.double()
    with torch.no_grad():
        own, plain = made._model(ids).logits, base(ids).logits
        loaded = PeftModel.from_pretrained(base, str(folder)).double()(ids).logits
        merged = merging(ids).logits
    assert (own - plain).abs().max() > 0.01
    assert (own - loaded).abs().max() < 1e-5
    assert (own - merged).abs().max() < 1e-4


def test_adapter_of_experts_is_imported(made: Learner, tmp_path: Path) -> None:
    folder = shaken(made, tmp_path)
    probed = plain(rows(5))
    own = made._row_logprobs(probed)
    made.adopt(folder)
    assert differ(made._row_logprobs(probed), own) == 0


@pytest.mark.vllm
def test_vllm_reads_experts_as_they_were_trained(made: Learner, tmp_path: Path) -> None:
    """By its own code, of both forms that it keeps experts in; its kernels need a GPU."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    folder = shaken(made, tmp_path)
    modules = dict(made._model.get_base_model().named_modules())
    name = "model.layers.1.mlp.experts"
    down, gate_up = (modules[path] for path in (name, f"{name}.base_layer"))
    wanted = [layer.get_delta_weight("default") for layer in (gate_up, down)]
    wanted = [delta.mT if gate_up.get_base_layer().is_transposed else delta for delta in wanted]
    helper = PEFTHelper.from_local_dir(str(folder), None)
    architecture = type(made._model.get_base_model()).__name__
    manager = SimpleNamespace(
        _is_3d_moe_model=True,
        _get_lora_layer_weights=LoRAModel.get_lora,
        model=SimpleNamespace(config=SimpleNamespace(architectures=[architecture])),
    )
    module = SimpleNamespace(
        local_num_experts=4, global_num_experts=4, ep_rank=0, w13_lora_a_stacked=[torch.empty(1, 4)]
    )
    for form in ("_stack_moe_lora_weights", "_convert_3d_to_2d_moe_lora"):
        read = LoRAModel.from_local_checkpoint(
            str(folder),
            {path.rpartition(".")[2] for path in modules},
            helper,
            lora_model_id=1,
            device="cpu",
        )
        for weights in read.loras.values():
            weights.optimize()
        getattr(LoRAModelManager, form)(manager, read, module, name)
        pairs = zip(read.loras[name].lora_a, read.loras[name].lora_b, strict=True)
        found = [b @ a for a, b in pairs]
        if form == "_convert_3d_to_2d_moe_lora":
            gate, down_delta, up = found
            halves = torch.stack((gate, up), 2 if architecture == "GptOssForCausalLM" else 1)
            found = [halves.flatten(1, 2), down_delta]
        for own, vllms in zip(wanted, found, strict=True):
            assert (own - vllms).abs().max() < 1e-6 < own.abs().max()


class Refusing(Server):
    """Keep the newest adapter alone; refuse those of experts, as vLLM on a CPU does, if told so."""

    refuses = True

    async def _load(self, request: web.Request) -> web.Response:
        adapter = Path((await request.json())["lora_path"]) / SERVED_FILES[1]
        if self.refuses and any(".experts" in name for name in load_file(adapter)):
            return web.Response(status=400, text="expected target modules in {…}")
        if self._adapted is not None:
            self._base, self._adapted = self._adapted.unload(), None
        self._bytes.clear()
        return await super()._load(request)


@asynccontextmanager
async def serving(mixture: str, *, refuses: bool) -> AsyncIterator[Replicas]:
    server = Refusing("m", Path(mixture))
    server.refuses = refuses
    runner = web.AppRunner(server.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Replicas([f"http://127.0.0.1:{runner.addresses[0][1]}/v1"]) as servers:
            yield servers
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("mixture", WITH_TEXTS, indirect=True)
async def test_experts_are_trained_if_the_server_loads_them(
    mixture: str, made: Learner, tmp_path: Path
) -> None:
    async with serving(mixture, refuses=False) as servers:
        with capture_logs() as logs:
            assert await why_update_fails(made, tmp_path, servers) is None
    assert not [line for line in logs if line["event"] == "layers_left_out"]
    kinds = made.layer_kinds()
    assert len([kind for kind in kinds if kind.endswith(".experts")]) == 1
    assert any(kind.endswith("v_proj") for kind in kinds)
    made.update(rows(0, groups=1))


# One with layers beside the experts whose names are alike: those of the shared expert.
@pytest.mark.parametrize("mixture", ["qwen2_moe"], indirect=True)
async def test_experts_are_left_out_if_the_server_refuses_them(
    mixture: str, tmp_path: Path
) -> None:
    made = Learner(mixture, recipe(), seed=0, scratch=tmp_path)
    [experts] = [kind for kind in made.layer_kinds() if kind.endswith(".experts")]
    async with serving(mixture, refuses=True) as servers:
        with capture_logs() as logs:
            assert await why_update_fails(made, tmp_path, servers) is None
    [whys] = [line["layers"] for line in logs if line["event"] == "layers_left_out"]
    assert "expected target modules" in whys.pop(experts)
    # This model does not attend to anything: its texts are one word.
    assert all("changes nothing" in why for why in whys.values())
    rest = made.layer_kinds()
    assert experts not in rest
    assert any(kind.endswith("v_proj") for kind in rest)
    made.update(rows(0, groups=1))


async def why_update_fails(made: Learner, folder: Path, servers: Replicas) -> str | None:
    return await ServerSelfTest(made, folder, servers, "m", recipe()).why_update_fails()


def test_recipe_can_leave_experts_untrained(made: Learner) -> None:
    lora = recipe().lora.model_copy(update={"experts": False})
    without: Recipe = recipe().model_copy(update={"lora": lora})
    kinds = renewed(made, without).layer_kinds()
    assert kinds
    assert not [kind for kind in kinds if kind.endswith(".experts")]
