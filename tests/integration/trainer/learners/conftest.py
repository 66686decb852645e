"""What tests of learners share: short plans, a tokenizer, our masks, and parts of vLLM's own."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from trainer.learners import memory
from trainer.learners.memory import Footprint, footprint
from trainer.learners.replay.grammars import Grammars
from trainer.recipes.recipe import Recipe


@contextmanager
def short_plans() -> Iterator[None]:
    """Plan with few tokens: recurrent layers take milliseconds of Python for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.learners.memory.MEASURED_TOKENS", 64)
        yield


@pytest.fixture
def short_plan() -> Iterator[None]:
    with short_plans():
        yield


@pytest.fixture(scope="module")
def measured_once() -> Iterator[None]:
    """Let plans of the same model by the same recipe share its footprint."""
    known: dict[tuple[str, str, str], Footprint] = {}

    def measured(model: str, chosen: Recipe, device: str = "cuda") -> Footprint:
        key = (model, chosen.model_dump_json(), device)
        if key not in known:
            known[key] = footprint(model, chosen, device)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        # `pawl plan` imports it when it runs.
        patch.setattr(memory, "footprint", measured)
        patch.setattr("trainer.learners.learner.footprint", measured)
        yield


@pytest.fixture(scope="module")
def tokenizer(model_dir: str) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, 49152)


@pytest.fixture(scope="module")
def vllm_own() -> Any:
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.structured_output import backend_xgrammar, utils
        from vllm.v1.structured_output.request import get_structured_output_key
    return SimpleNamespace(
        backend=backend_xgrammar,
        utils=utils,
        SamplingParams=SamplingParams,
        Params=StructuredOutputsParams,
        key=get_structured_output_key,
    )
