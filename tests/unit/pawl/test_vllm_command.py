"""The vLLM that Pawl starts samples with the defaults that its proxy records."""

import json

from pawl.stack.vllm import VllmOptions, vllm_command


def command(**options: float) -> list[str]:
    return vllm_command(
        VllmOptions(
            model="m",
            served_name="m",
            port=1,
            dtype=None,
            max_model_len=128,
            max_lora_rank=8,
            sampling_defaults=options,
        )
    )


def test_the_model_cards_settings_are_never_used() -> None:
    without = command()
    assert without[without.index("--generation-config") + 1] == "vllm"
    assert "--override-generation-config" not in without


def test_the_proxys_defaults_are_the_servers() -> None:
    given = command(temperature=0.6, top_p=0.95, top_k=20)
    said = json.loads(given[given.index("--override-generation-config") + 1])
    assert said == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
