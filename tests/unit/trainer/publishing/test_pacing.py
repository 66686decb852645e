"""The adapter slots that a model server tells."""

from trainer.publishing.pacing import slots_named_in

TOLD = (
    "# HELP vllm:lora_requests_info Running stats on lora requests.\n"
    "# TYPE vllm:lora_requests_info gauge\n"
    'vllm:lora_requests_info{max_lora="4",running_lora_adapters="m@1",waiting_lora_adapters=""}'
    " 1.7e+09\n"
)


def test_vllm_names_them_with_its_lora_requests() -> None:
    assert slots_named_in(TOLD) == 4
    assert slots_named_in('vllm:lora_requests_info{a="",max_lora="12",b=""} 1.0') == 12


def test_before_the_first_request_nothing_is_known() -> None:
    assert slots_named_in("") is None
    assert slots_named_in(TOLD.splitlines()[0]) is None
    assert slots_named_in('vllm:cache_config_info{max_lora="4"} 1.0\n') is None
