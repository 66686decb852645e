"""An adapter that cannot be a version of the policy is refused with the reason; nothing changes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from store import claims, version_states
from tests.support.trainer.importing import (
    NOWHERE,
    WEIGHTS,
    Bench,
    adapter,
    bench,
    learner,
    with_config,
)
from tests.support.training import write_adapter, write_tiny_model
from trainer.errors import AdapterError, TrainerError
from trainer.importing import import_adapter
from trainer.publishing.adapters import export_adapter

__all__ = ["adapter", "bench", "learner"]


async def test_import_without_a_known_base_model_is_refused(bench: Bench) -> None:
    with pytest.raises(
        TrainerError, match=r"does not answer .*base model of policy 'm'.*PAWL_MODEL"
    ):
        await bench.imports(bench.at(upstream_url=NOWHERE))
    assert await bench.states() == {}


async def test_import_for_a_base_model_that_is_not_served_is_refused(bench: Bench) -> None:
    with pytest.raises(TrainerError, match="policy 'n' is 'n', but the model server serves m: "):
        await import_adapter(bench.settings, bench.engine, "n", bench.adapter)


async def test_import_is_refused_while_a_trainer_works_on_the_policy(bench: Bench) -> None:
    async with bench.engine.connect() as guard:
        assert await claims.hold_policy(guard, "m")
        with pytest.raises(
            TrainerError, match=r"'m' is in use by its trainer.*: stop that process"
        ):
            await bench.imports()
        await guard.invalidate()
    assert await bench.imports() == "m@1 serving"
    # It holds nothing back itself.
    async with bench.engine.connect() as guard:
        assert await claims.hold_policy(guard, "m")
        await guard.invalidate()


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[..., None]:
    def changed(folder: Path, model: str) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return changed


def anew(**config: Any) -> Callable[[Path, str], None]:
    def write(folder: Path, model: str) -> None:
        shutil.rmtree(folder)
        write_adapter(model, folder, **config)

    return write


def of_another_width(folder: Path, model: str) -> None:
    other = write_tiny_model(folder.parent / "wide", hidden_size=64)
    shutil.rmtree(folder)
    write_adapter(other, folder)
    with_config(base_model_name_or_path=model)(folder, model)


def first(weights: dict[str, torch.Tensor]) -> str:
    return sorted(weights)[0]


REFUSED = {
    r"its rank \(r\) is 8, and the recipe's lora\.rank is 4": anew(r=8),
    "it has use_dora = True": anew(use_dora=True),
    r"lm_head\.lora_A\.weight is of a layer that the recipe's lora\.target_modules does not": anew(
        target_modules=["q_proj", "lm_head"]
    ),
    "its base model is 'org/other', and the policy's is": with_config(
        base_model_name_or_path="org/other"
    ),
    r"is \[4, 64\] and \[4, 32\] is needed": of_another_width,
    "has values that are not finite": with_weights(lambda w: w[first(w)].fill_(float("nan"))),
    "all its lora_B are zero": with_weights(lambda w: [one.zero_() for one in w.values()]),
    r"lora_A\.weight is missing": with_weights(lambda w: w.pop(first(w))),
    "save it in 16 or 32 bits": with_weights(lambda w: w.update({first(w): w[first(w)].char()})),
    r"adapter_model\.safetensors cannot be read": lambda folder, _: (folder / WEIGHTS).write_bytes(
        b"half"
    ),
}


@pytest.mark.parametrize("said", REFUSED)
async def test_unusable_adapter_is_refused_and_nothing_changes(bench: Bench, said: str) -> None:
    REFUSED[said](bench.adapter, bench.model)
    with pytest.raises(AdapterError, match=said):
        await bench.imports()
    assert await bench.states() == {}
    assert await bench.running() is None
    assert not (bench.adapters / "m").exists()


async def test_base_model_of_an_exported_version_is_recognised_by_its_hash_at_import(
    bench: Bench, tmp_path: Path
) -> None:
    await bench.imports()
    export_adapter(bench.version(1), tmp_path / "out")
    bench.adapter = tmp_path / "out"
    # Elsewhere the same model is in another folder.
    with_config(base_model_name_or_path="/models/moved")(bench.adapter, "")
    with pytest.raises(AdapterError, match="m@1 already serves these weights"):
        await bench.imports()
    base_file = bench.adapter / "base.json"
    base_file.write_text(json.dumps(json.loads(base_file.read_text()) | {"base": "another"}))
    with pytest.raises(AdapterError, match=r"on another base model, says its base\.json"):
        await bench.imports()


async def test_import_for_another_tenants_policy_is_refused(bench: Bench, tmp_path: Path) -> None:
    async with bench.engine.begin() as connection:
        await version_states.ensure_base(connection, "m", None, "a")
    file = tmp_path / "policies.toml"
    file.write_text('[[policy]]\nname = "m"\nbase = "m"\ntrained = true\ntenant = "b"\n')
    with pytest.raises(TrainerError, match="of tenant 'a', and stay so"):
        await bench.imports(bench.at(policies=file))
    assert await bench.states() == {0: "serving"}
    assert await bench.running() is None
    assert not bench.version(1).exists()
