"""The adapter slots that a model server tells."""

from trainer.publishing.pacing import told_slots

TOLD = (
    "# HELP vllm:lora_requests_info Running stats on lora requests.\n"
    "# TYPE vllm:lora_requests_info gauge\n"
    'vllm:lora_requests_info{max_lora="4",running_lora_adapters="m@1",waiting_lora_adapters=""}'
    " 1.7e+09\n"
)


def test_vllm_names_them_with_its_lora_requests() -> None:
    assert told_slots(TOLD) == 4
    assert told_slots('vllm:lora_requests_info{a="",max_lora="12",b=""} 1.0') == 12


def test_before_the_first_request_nothing_is_known() -> None:
    assert told_slots("") is None
    assert told_slots(TOLD.splitlines()[0]) is None
    assert told_slots('vllm:cache_config_info{max_lora="4"} 1.0\n') is None
