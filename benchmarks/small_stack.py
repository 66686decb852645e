"""Plan a whole stack with the packaged model, on free ports, in a folder of its own."""

from pathlib import Path
from typing import Final

from benchmarks.vllm_server import free_port
from pawl.scenarios.places import packaged_template
from pawl.stack.stack import StackPlan
from pawl.stack.vllm import VllmOptions

TEMPLATE: Final = "smollm2_tools"
# It holds calls to no syntax of its own.
TOOL_PARSER: Final = "pythonic"


def small_plan(
    folder: Path, model: str, policy: str, recipe: str, *, tool_parser: str = TOOL_PARSER
) -> StackPlan:
    """Return a plan for PostgreSQL, vLLM, proxy and trainer.

    `folder` holds all that they write, `model` is the packaged model's folder, and `recipe` a
    recipe's name or file. The template writes calls as the usual `tool_parser` reads them.
    """
    return StackPlan(
        vllm=VllmOptions(
            model=model,
            served_name=policy,
            port=free_port(),
            dtype="float32",
            max_model_len=1024,
            max_lora_rank=16,
            tool_parser=tool_parser,
            chat_template=packaged_template(TEMPLATE),
        ),
        database_url=None,
        upstream_url=None,
        listen=f"127.0.0.1:{free_port()}",
        admin_listen=f"127.0.0.1:{free_port()}",
        trainer_listen=f"127.0.0.1:{free_port()}",
        steward_listen=f"127.0.0.1:{free_port()}",
        data_dir=folder,
        spool_dir=folder / "spool",
        adapter_dir=folder / "adapters",
        log_dir=folder / "logs",
        recipe=recipe,
        policy=policy,
        model=model,
    )
