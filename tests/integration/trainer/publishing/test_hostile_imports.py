"""Whatever an adapter's files hold, an import takes it, or refuses it and leaves nothing."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.trainer.importing import WEIGHTS, Bench, adapter, bench, learner, with_config
from trainer.errors import TrainerError

__all__ = ["adapter", "bench", "learner"]

CONFIG = "adapter_config.json"
HUGE = 10**400
Change = Callable[[Path, str], object]


def config_text(text: bytes) -> Change:
    return lambda folder, _: (folder / CONFIG).write_bytes(text)


def config_value(key: str, value: str) -> Change:
    """Write a value that Python's own `json` would not: NaN, infinities, a key twice."""

    def change(folder: Path, _: str) -> None:
        text = (folder / CONFIG).read_text()
        (folder / CONFIG).write_text(text[: text.rindex("}")] + f', "{key}": {value}}}')

    return change


def weights_bytes(header: bytes, rest: bytes = b"", length: int | None = None) -> Change:
    size = struct.pack("<Q", len(header) if length is None else length)
    return lambda folder, _: (folder / WEIGHTS).write_bytes(size + header + rest)


def tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(folder: Path, _: str) -> None:
        weights = load_file(folder / WEIGHTS)
        save_file(
            {name: change(one).contiguous() for name, one in weights.items()}, folder / WEIGHTS
        )

    return changed


def renamed(name: str) -> Change:
    def changed(folder: Path, _: str) -> None:
        weights = load_file(folder / WEIGHTS)
        weights[name] = weights.pop(sorted(weights)[0])
        save_file(weights, folder / WEIGHTS)

    return changed


def instead_of(name: str, make: Callable[[Path], object]) -> Change:
    def changed(folder: Path, _: str) -> None:
        (folder / name).unlink()
        make(folder / name)

    return changed


def one_tensor(dtype: str, shape: list[int], end: int) -> Change:
    about = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}
    return weights_bytes(json.dumps(about).encode(), bytes(min(end, 64)))


NUMBERS: tuple[Any, ...] = ("4", None, [4], {"a": 4}, -1, 0, 2.5, True, HUGE, 1e308)
CONFIGS: dict[str, Change] = {
    **{f"r {n}": with_config(r=one) for n, one in enumerate(NUMBERS)},
    **{f"alpha {n}": with_config(lora_alpha=one) for n, one in enumerate(NUMBERS) if one != 2.5},
    **{f"rslora {n}": with_config(use_rslora=one) for n, one in enumerate(("yes", 1, [True], {}))},
    **{
        f"{key} {value}": config_value(key, value)
        for key in ("r", "lora_alpha", "lora_dropout")
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "")
    },
    **{
        f"kind {kind}": with_config(peft_type=kind)
        for kind in ("LOHA", "IA3", "PREFIX_TUNING", "lora", "", None, 5, ["LORA"], {"LORA": 1})
    },
    **{f"task {task}": with_config(task_type=task) for task in ("SEQ_CLS", 5, ["CAUSAL_LM"], {})},
    **{f"bias {bias}": with_config(bias=bias) for bias in ("all", "lora_only", None, 5, ["none"])},
    **{
        f"{key} set": with_config(**{key: value})
        for key, value in {
            "rank_pattern": {"(a+)+$": 4},
            "alpha_pattern": {"q_proj": "x"},
            "modules_to_save": ["lm_head"],
            "loftq_config": {"a": 1},
            "use_dora": "no",
            "a\nkey\x1b[2J": "a\nvalue" * 10_000,
        }.items()
    },
    **{
        f"base {n}": with_config(base_model_name_or_path=one)
        for n, one in enumerate(
            ("../../../etc", "/", "a\0b", "a/b/c", "", " ", "x" * 5000, None, 5, ["m"], {"m": 1})
        )
    },
    "no object": config_text(b"[1]"),
    "nothing": config_text(b""),
    "half": config_text(b'{"r": 4'),
    "no text": config_text(b'{"r": "\xff"}'),
    "deep": config_text(b'{"r": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "config a folder": instead_of(CONFIG, Path.mkdir),
    "config a loop": instead_of(CONFIG, lambda path: path.symlink_to(path)),
    "config gone": lambda folder, _: (folder / CONFIG).unlink(),
    "config a pipe": instead_of(CONFIG, os.mkfifo),
    "config a device": instead_of(CONFIG, lambda path: path.symlink_to("/dev/zero")),
}
FILES: dict[str, Change] = {
    "weights gone": lambda folder, _: (folder / WEIGHTS).unlink(),
    "weights a folder": instead_of(WEIGHTS, Path.mkdir),
    "weights a pipe": instead_of(WEIGHTS, os.mkfifo),
    "weights a device": instead_of(WEIGHTS, lambda path: path.symlink_to("/dev/zero")),
    "weights of text": instead_of(WEIGHTS, lambda path: path.symlink_to("/etc/passwd")),
    "truncated": lambda folder, _: os.truncate(folder / WEIGHTS, 2000),
    "longer": lambda folder, _: (folder / WEIGHTS).write_bytes(
        (folder / WEIGHTS).read_bytes() + b"more"
    ),
    "empty": lambda folder, _: (folder / WEIGHTS).write_bytes(b""),
    "huge header": weights_bytes(b"{}", length=2**63),
    "long header": weights_bytes(b"{}", length=99 * 2**20),
    "no header": weights_bytes(b"", length=0),
    "header of no object": weights_bytes(b"[]"),
    "header of no text": weights_bytes(b'{"\xff": 1}'),
    "no tensors": weights_bytes(b"{}"),
    "a name twice": weights_bytes(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        bytes(8),
    ),
    "overlapping": weights_bytes(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "endless shape": one_tensor("F32", [2**62, 2**62], 4),
    "negative shape": one_tensor("F32", [-1], 4),
    "unknown dtype": one_tensor("X9", [1], 4),
    "dtype without a tensor": one_tensor("F4", [8], 4),
    "too little data": one_tensor("F32", [10**6], 4 * 10**6),
    "NaN": tensors(lambda one: one * float("nan")),
    "infinite": tensors(lambda one: one * float("inf")),
    "integers": tensors(lambda one: one.to(torch.int64)),
    "bool": tensors(lambda one: one.bool()),
    "8 bits": tensors(lambda one: one.to(torch.float8_e4m3fn)),
    "complex": tensors(lambda one: one.to(torch.complex64)),
    "transposed": tensors(lambda one: one.T),
    "a line": tensors(lambda one: one.flatten()),
    "no rows": tensors(lambda one: one[:0]),
    "zero": tensors(torch.zeros_like),
    "1e38": tensors(lambda one: torch.full_like(one, 1e38)),
    "beyond float32": tensors(lambda one: torch.full_like(one, 1e300, dtype=torch.float64)),
    "another name": renamed("base_model.model.nowhere.lora_A.weight"),
    "a path as a name": renamed("../../etc/passwd.lora_A.weight"),
    "lines as a name": renamed("a\nb\x1b[2J"),
    "a long name": renamed("a" * 100_000),
    "another base": lambda folder, _: (folder / "base.json").write_bytes(b'{"base": "\xff"}'),
    "base of no text": lambda folder, _: (folder / "base.json").write_bytes(b"[" * 100_000),
    "base a folder": lambda folder, _: (folder / "base.json").mkdir(),
}


@pytest.mark.parametrize("table", [CONFIGS, FILES], ids=["configuration", "files"])
async def test_hostile_adapter_is_refused_in_a_line_and_leaves_nothing(
    bench: Bench, table: dict[str, Change]
) -> None:
    whole, wrong = bench.adapter.rename(bench.adapter.with_name("whole")), []
    for name, change in table.items():
        shutil.copytree(whole, bench.adapter)
        change(bench.adapter, bench.model)
        try:
            wrong.append(f"{name}: {await bench.imports()}")
        except TrainerError as error:
            if "\n" in str(error) or "\x1b" in str(error) or len(str(error)) > 2000:
                wrong.append(f"{name}: not in a line: {str(error)[:300]!r}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]!r}")
        if {*(await bench.states()).values()} - {"serving", "retired", "rejected"}:
            wrong.append(f"{name}: leaves {await bench.states()}")
        shutil.rmtree(bench.adapter)
    assert wrong == []
    assert await bench.running() is None
    assert set(await bench.states()) <= {0}


@pytest.mark.parametrize(
    "harmless",
    [
        {"target_modules": r"(\w+\.?)+!|(.*)*[qv]_proj|.*x"},
        {"exclude_modules": r"(\w+[._]?)+!"},
        {"layers_pattern": ["(.*)*!"], "layers_to_transform": [0, "x", {}]},
        {"target_modules": "all-linear", "exclude_modules": 5, "lora_dropout": ["much"]},
        {"target_modules": ["q_proj", "(a+)+$", 5, None, {"a": 1}]},
        {
            "target_modules": {"q_proj": 1},
            "revision": {"a": 1},
            "auto_mapping": "x",
            "peft_version": 9,
        },
    ],
)
async def test_layer_patterns_in_an_imported_adapters_config_are_ignored(
    bench: Bench, harmless: dict[str, Any]
) -> None:
    before = load_file(bench.adapter / WEIGHTS)
    with_config(**harmless)(bench.adapter, bench.model)

    assert await bench.imports() == "m@1 serving"

    after, made = bench.weights(1), json.loads((bench.version(1) / CONFIG).read_text())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (made["r"], made["lora_alpha"], made["layers_pattern"]) == (4, 8, None)
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in before}
    assert set(made["target_modules"]) == layers
