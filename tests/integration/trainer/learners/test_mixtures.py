"""The learner on tiny mixtures of experts: neither routers nor experts are trained."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from tests.support.mixtures import tiny_model
from tests.support.training import PLAIN, recipe, rows, write_words
from trainer.batches import Row
from trainer.learners.learner import Learner
from trainer.publishing.adapters import SERVED

KINDS = ("qwen3_moe", "qwen2_moe", "mixtral")


@pytest.fixture(scope="module", params=KINDS)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(folder)
    write_words(folder)
    return str(folder)


def save(made: Learner, folder: Path) -> Path:
    folder.mkdir()
    made.save(folder)
    return folder


def same(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in SERVED)


def names_in(adapter: Path) -> set[str]:
    weights = load_file(adapter / SERVED[1])
    # A new adapter's second matrices are zero, and not one of them stays so.
    assert all(bool(tensor.any()) for name, tensor in weights.items() if "lora_B" in name)
    return set(weights)


def test_an_update_trains_what_was_chosen_and_goes_on_from_its_files(
    mixture: str, tmp_path: Path
) -> None:
    made = Learner(mixture, recipe(), seed=0, scratch=tmp_path)
    probed = plain(rows(5))
    base = made.version_logprobs(None, probed)
    made.restore(None)
    made.update(rows(0))
    first = save(made, tmp_path / "1")
    names = names_in(first)
    assert not [name for name in names if re.search(r"\.gate\.|_gate\.|\.experts\.", name)]
    made.update(rows(1))
    second = save(made, tmp_path / "2")
    # As versions are computed: row by row, rounding differs.
    trained = made._survey(probed)
    assert differ(trained, base) > 1e-3

    again = Learner(mixture, recipe(), seed=0, scratch=tmp_path)
    again.restore(first)
    again.update(rows(1))
    assert same(save(again, tmp_path / "again"), second)
    # Switched off, taken off, and read back.
    assert differ(again.version_logprobs(None, probed), base) == 0
    assert differ(again.version_logprobs(second, probed), trained) < 1e-5


def plain(told: Sequence[Row]) -> list[Row]:
    return [msgspec.structs.replace(row, distribution=PLAIN) for row in told]


def differ(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    pairs = [
        pair for row, own in zip(one, other, strict=True) for pair in zip(row, own, strict=True)
    ]
    return max(abs(left - right) for left, right in pairs)
