"""Run the local stack as it is configured, until it is stopped (`pawl up`)."""

import asyncio

from rich.console import Console

from pawl.settings import JudgeSettings, StackSettings, StewardSettings, read_settings
from pawl.signals import stop_event
from pawl.stack.model import unpacked_model
from pawl.stack.stack import Stack, StackPlan, running_stack
from pawl.stack.vllm import USUAL_TOOL_PARSER, VllmOptions
from proxy.settings import ProxySettings
from store.policy_table import open_policies
from trainer.policies import chosen_policies, load_recipes
from trainer.settings import USUAL_SLOTS, TrainerSettings

DEFAULT_POLICY = "smollm2"
CHECK_S = 1.0


async def run_stack(settings: StackSettings) -> None:
    """Start the stack, print how it is used, and wait for SIGINT or SIGTERM.

    Raises:
        NotReady: the machine cannot run the stack; nothing was started.
        ProcessFailed: a process cannot be kept running.
    """
    stop = stop_event()
    console = Console(stderr=True)
    plan = await asyncio.to_thread(_plan, settings)
    with console.status("starting") as status:
        async with running_stack(
            plan, lambda waiting: status.update(f"waiting for {waiting}")
        ) as stack:
            status.stop()
            _print_usage(console, stack)
            while not stop.is_set():
                stack.check()
                await _pause(stop)


async def _pause(stop: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(stop.wait(), CHECK_S)
    except TimeoutError:
        return


def _plan(settings: StackSettings) -> StackPlan:
    proxy = read_settings(ProxySettings)
    trainer = read_settings(TrainerSettings)
    outside = "upstream_url" in proxy.model_fields_set
    model = settings.model
    if model is None and not outside:
        model = str(unpacked_model(settings.data_dir / "models"))
    # One trainer trains them all; they have one base model.
    chosen = chosen_policies(trainer, open_policies(trainer.policies))
    policy = trainer.policy
    if trainer.policies is None and not outside:
        policy = policy or settings.model or DEFAULT_POLICY
    return StackPlan(
        vllm=VllmOptions(
            model=model or "",
            served_name=chosen[0].base or policy or "",
            port=settings.vllm_port,
            dtype=settings.vllm_dtype,
            max_model_len=settings.max_model_len,
            max_lora_rank=max(recipe.lora.rank for recipe in load_recipes(chosen)),
            tool_parser=proxy.tool_parser or USUAL_TOOL_PARSER,
            sampling_defaults=proxy.sampling_defaults,
            adapter_slots=trainer.adapter_slots or USUAL_SLOTS,
        ),
        database_url=settings.database_url.get_secret_value() if settings.database_url else None,
        upstream_url=str(proxy.upstream_url) if outside else None,
        listen=proxy.listen,
        admin_listen=proxy.admin_listen,
        trainer_listen=trainer.trainer_listen,
        steward_listen=read_settings(StewardSettings).steward_listen,
        data_dir=settings.data_dir,
        spool_dir=proxy.spool_dir,
        adapter_dir=trainer.adapter_dir,
        log_dir=settings.log_dir,
        recipe=trainer.recipe,
        policy=policy,
        policies=trainer.policies,
        model=model,
        seed=trainer.seed,
        judge=read_settings(JudgeSettings).judge_command is not None,
    )


def _print_usage(console: Console, stack: Stack) -> None:
    console.print(f"[bold]Pawl is up.[/] Run your agent with  OPENAI_BASE_URL={stack.base_url}")
    console.print(f"Rewards go to   POST http://{stack.plan.listen}/feedback")
    admin = f"http://{stack.plan.admin_listen}"
    console.print(f"Health: {admin}/readyz   Metrics: {admin}/metrics")
    console.print("Ctrl-C stops everything.")
