"""A real vLLM whose chat template takes no system message between turns: Claude Code's calls."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import answers, free_port, running, wait_for
from pawl.stack.vllm import vllm_environment
from store.values.packing import unpack_ids
from tests.integration.conftest import Proxy, StartProxy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
READ = {"name": "read", "input_schema": {"type": "object", "properties": {"path": {}}}}
EDIT = READ | {"name": "edit"}
USED = {"type": "tool_use", "id": "call_0001", "name": "read", "input": {"path": "a.py"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_0001", "content": "x = 1"}
ADDED = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": EDIT}}


def system(text: str, *blocks: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": text}, *blocks]}


FIRST = [{"role": "user", "content": "Mend a.py."}, system("It is Monday.")]
SECOND = [
    *FIRST,
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, USED],
    },
    {"role": "user", "content": [RESULT]},
    system("One task is open."),
]


@pytest.fixture(scope="module")
def server(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM whose template raises an error at such a message (Qwen3.5's)."""
    folder, port = tmp_path_factory.mktemp("vllm"), free_port()
    model = folder / "model"
    model.mkdir()
    # Neither is installed where the serving role is tested alone.
    import trl

    from tests.support.shallow import write_shallow

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_5_think.jinja"
    arguments = ["--model", write_shallow(Path(model_dir), model, 1), "--served-model-name", "m"]
    arguments += ["--chat-template", template, "--enforce-eager"]
    arguments += ["--dtype", "float32", "--max-model-len", "2048", "--host", "127.0.0.1"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command = [sys.executable, "-m", "pawl.stack.vllm", "--port", port, *arguments]
    environment = vllm_environment(2) | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    url, log = f"http://127.0.0.1:{port}", folder / "vllm.log"
    with running([str(one) for one in command], log, environment) as process:
        wait_for(lambda: answers(f"{url}/health"), process, log, within_s=300.0)
        yield url


async def requests_answered(proxy: Proxy, url: str) -> dict[str, float]:
    """How many requests the server was sent for a reply, by status and path."""
    async with proxy.session.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    counted = [line for line in lines if line.startswith("http_requests_total{")]
    return {
        labels: float(count)
        for labels, _, count in (line.rpartition(" ") for line in counted)
        if "/v1/chat/completions" in labels or "/v1/messages" in labels
    }


async def test_calls_with_system_messages_between_turns_are_trainable_and_extend_the_last_prompt(
    server: str, start_proxy: StartProxy
) -> None:
    async with start_proxy(upstream_url=f"{server}/v1") as proxy:
        before = sum((await requests_answered(proxy, server)).values())
        asked = {"model": "m", "max_tokens": 2, "system": "Be brief.", "tools": [READ]}
        for messages in (FIRST, SECOND):
            body = asked | {"messages": messages}
            headers = {"x-pawl-episode": "session"}
            reply = await proxy.ask("POST", "/v1/messages", headers, **body)
            assert reply.status == 200
            assert "x-pawl-warning" not in reply.headers
        assert sum((await requests_answered(proxy, server)).values()) - before == 2
        [episode] = await proxy.episodes(2)
        assert [(call.trainable, call.reason) for call in episode.calls] == [(True, None)] * 2
        one, two = (unpack_ids(call.tokens.prompt_ids) for call in episode.calls)
        assert two[: len(one)] == one
        text = await prompt_of(proxy, server, two)
        assert [text.count(said) for said in ("It is Monday.", "One task is open.")] == [1, 1]
        assert "<system-reminder>" in text


async def prompt_of(proxy: Proxy, url: str, ids: Any) -> str:
    body = {"model": "m", "tokens": list(ids)}
    async with proxy.session.post(f"{url}/detokenize", json=body) as reply:
        return str((await reply.json())["prompt"])


async def test_tool_of_a_tool_addition_block_is_in_the_prompt(
    server: str, start_proxy: StartProxy
) -> None:
    async with start_proxy(upstream_url=f"{server}/v1") as proxy:
        messages = [*FIRST, {"role": "system", "content": [ADDED]}]
        asked = {"model": "m", "max_tokens": 2, "tools": [READ], "messages": messages}
        assert (await proxy.ask("POST", "/v1/messages", **asked)).status == 200
        call = await proxy.only_call()
        assert (call.trainable, call.reason) == (True, None)
        assert '"edit"' in await prompt_of(proxy, server, unpack_ids(call.tokens.prompt_ids))
