"""Plan the stack of a scenario: a database, spool and adapters of its own."""

from pathlib import Path

from pawl.scenarios.errors import ScenarioFailed
from pawl.scenarios.places import chat_template, file_of
from pawl.scenarios.scenario import Scenario
from pawl.settings import StackSettings, StewardSettings, read_settings
from pawl.stack.stack import StackPlan
from pawl.stack.vllm import USUAL_TOOL_PARSER, VllmOptions
from proxy.settings import ProxySettings
from store.policy_table import PolicySpec, load_policies
from trainer.settings import USUAL_SLOTS, TrainerSettings


def recipe_file(scenario: Scenario, recipe: str | None) -> str:
    """Return what a trainer's `PAWL_RECIPE` is: a name, or the absolute path of a file.

    `recipe` is what the command line says; None: the scenario's own. The path is absolute because
    the trainer may run in another working directory.
    """
    if recipe is not None:
        return str(Path(recipe).resolve()) if Path(recipe).is_file() else recipe
    own = file_of(scenario, scenario.recipe)
    return scenario.recipe if own is None else str(own)


def policies_of(scenario: Scenario) -> tuple[PolicySpec, ...]:
    """Return the scenario's policies, in the order of its file.

    Raises:
        ScenarioFailed: there is no such file.
        BadPolicies: it cannot be used.
    """
    path = policies_file(scenario)
    if path is None:
        return (PolicySpec(name=scenario.model, base=scenario.model),)
    return load_policies(path).specs


def policies_file(scenario: Scenario) -> Path | None:
    """Return the scenario's file of policies, or None if it has one policy alone.

    Raises:
        ScenarioFailed: there is no such file.
    """
    if scenario.policies is None:
        return None
    path = file_of(scenario, scenario.policies)
    if path is None:
        raise ScenarioFailed(f"{scenario.folder}: policies: there is no {scenario.policies}")
    return path


def stack_plan(
    scenario: Scenario,
    *,
    model: str,
    is_packaged: bool,
    recipe: str,
    rank: int,
    seed: int,
    var: Path,
) -> StackPlan:
    """Return the stack to start.

    Args:
        scenario: what runs on it.
        model: folder or hub name of the base model.
        is_packaged: whether that is the packaged one, for which the scenario has its template.
        recipe: as `PAWL_RECIPE`.
        rank: the recipe's LoRA rank.
        seed: random seed of the adapter.
        var: folder for its data and logs.
    """
    proxy, trainer = read_settings(ProxySettings), read_settings(TrainerSettings)
    policies = policies_file(scenario)
    data = var / "data"
    return StackPlan(
        vllm=_vllm_options(scenario, model, is_packaged=is_packaged, rank=rank),
        database_url=None,
        upstream_url=None,
        listen=proxy.listen,
        admin_listen=proxy.admin_listen,
        trainer_listen=trainer.trainer_listen,
        steward_listen=read_settings(StewardSettings).steward_listen,
        data_dir=data,
        spool_dir=data / "spool",
        adapter_dir=data / "adapters",
        log_dir=data / "logs",
        recipe=recipe,
        policy=None if policies else scenario.model,
        policies=policies,
        model=model,
        seed=seed,
        tool_results=scenario.tool_results,
    )


def _vllm_options(scenario: Scenario, model: str, *, is_packaged: bool, rank: int) -> VllmOptions:
    """Return how the scenario's model server is started; another model has its own template."""
    settings, proxy = read_settings(StackSettings), read_settings(ProxySettings)
    own_parser = scenario.tool_parser if is_packaged else None
    return VllmOptions(
        model=model,
        served_name=scenario.model,
        port=settings.vllm_port,
        dtype=settings.vllm_dtype,
        max_model_len=settings.max_model_len,
        max_lora_rank=rank,
        tool_parser=own_parser or proxy.tool_parser or USUAL_TOOL_PARSER,
        chat_template=chat_template(scenario) if is_packaged else None,
        sampling_defaults=proxy.sampling_defaults,
        adapter_slots=read_settings(TrainerSettings).adapter_slots or USUAL_SLOTS,
    )
