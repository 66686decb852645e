"""Choose the policies that a trainer trains, their base model and their recipes.

The policies share one base model in memory, so their recipes must agree on its settings.
"""

from collections.abc import Sequence
from operator import attrgetter

from sqlalchemy.ext.asyncio import AsyncConnection

from store import claims
from store.policy_table import PolicyTable, open_policies
from store.records import Record
from store.tenants import DEFAULT
from trainer.errors import RecipeError, TrainerError, UpstreamAway
from trainer.publishing.model_server import Replicas
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.settings import TrainerSettings


class ChosenPolicy(Record, frozen=True, kw_only=True):
    """A policy that this trainer trains.

    `policy` is None if the policy is named after the model server's base model. `base` is the model
    server's name for the base model; None: the policy's name. `together` are the policies that must
    go live together, this one included (empty: none). `known` are all trained policies in the file
    of policies, including those of other trainers; empty without a file.
    """

    policy: str | None
    base: str | None
    recipe: str
    together: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    tenant: str = DEFAULT


def chosen_policies(
    settings: TrainerSettings, table: PolicyTable | None
) -> tuple[ChosenPolicy, ...]:
    """Return the policies that a trainer with these settings trains.

    With `table`, the file of policies, these are its policies with `trained = true`, or those of
    them that PAWL_POLICY names. Without a file, it is the policy that PAWL_POLICY names (unset: the
    model server's base model).

    Raises:
        TrainerError: the file has no trained policy, or not the named one; or the base models of
            the policies differ.
    """
    if table is None:
        return (ChosenPolicy(policy=settings.policy, base=None, recipe=settings.recipe),)
    trained = {spec.name: spec for spec in table.specs if spec.trained}
    if not trained:
        raise TrainerError(
            f"{settings.policies} has no policy with trained = true, and so nothing to train: add"
            " one, or start no trainer"
        )
    names = list(trained)
    if settings.policy is not None:
        names = list(dict.fromkeys(name.strip() for name in settings.policy.split(",")))
    for name in names:
        if name not in trained:
            raise TrainerError(
                f"PAWL_POLICY is {settings.policy!r}, and {settings.policies} has no policy"
                f" {name!r} with trained = true: name one or more of these, or add it there:"
                f" {', '.join(trained)}"
            )
    by_base: dict[str, list[str]] = {}
    for name in names:
        by_base.setdefault(trained[name].base, []).append(name)
    if len(by_base) > 1:
        wanted = " and ".join(f"PAWL_POLICY={','.join(names)}" for names in by_base.values())
        raise TrainerError(
            f"{settings.policies}: the policies have {len(by_base)} base models"
            f" ({', '.join(by_base)}), and a trainer holds one: start a trainer for each, with"
            f" {wanted}"
        )
    return tuple(
        ChosenPolicy(
            policy=name,
            base=trained[name].base,
            recipe=trained[name].recipe or settings.recipe,
            together=together if len(together := table.live_together(name)) > 1 else (),
            known=tuple(trained),
            tenant=trained[name].tenant,
        )
        for name in names
    )


def load_recipes(chosen: Sequence[ChosenPolicy]) -> list[Recipe]:
    """Return the recipe of each policy.

    Raises:
        TrainerError: a recipe cannot be read, or two cannot share a base model.
    """
    recipes = []
    for policy in chosen:
        try:
            recipes.append(load_recipe(policy.recipe))
        except RecipeError as error:
            if not policy.known:
                raise
            raise RecipeError(f"policy {policy.policy!r}: {error}") from error
    for policy, recipe in zip(chosen[1:], recipes[1:], strict=True):
        for key in ("dtype", "base_bits", "batch.gradient_checkpointing"):
            first, other = attrgetter(key)(recipes[0]), attrgetter(key)(recipe)
            if first != other:
                raise TrainerError(
                    f"the recipes of {chosen[0].policy!r} and {policy.policy!r} have {key} ="
                    f" {first!r} and {other!r}, and they share one base model: set the same, or"
                    " start a trainer for each with PAWL_POLICY"
                )
    for policy, recipe in zip(chosen, recipes, strict=True):
        check_publishing(policy, recipe)
    return recipes


def trained_recipes(settings: TrainerSettings) -> list[Recipe]:
    """Return the recipe of each policy that a trainer with these settings trains.

    Raises:
        BadPolicies: the file of policies cannot be used.
        TrainerError: it names nothing to train, or a recipe cannot be used.
    """
    return load_recipes(chosen_policies(settings, open_policies(settings.policies)))


def check_publishing(chosen: ChosenPolicy, recipe: Recipe) -> None:
    """Refuse a gate for a policy whose versions go live together with other policies' versions.

    Raises:
        TrainerError: the policy has `publish_with`, and its recipe asks for a decision about
            versions or for a control.
    """
    rule = recipe.publish
    if not chosen.together or (rule.serves_at_once and not rule.control_share):
        return
    raise TrainerError(
        f"policy {chosen.policy!r} has publish_with, and its recipe {chosen.recipe!r} has"
        f' publish.mode = "{rule.mode}", approve = {str(rule.approve).lower()} and control_share ='
        f" {rule.control_share:g}, by which one policy's traffic moves at a time: set mode ="
        ' "immediate", approve = false and control_share = 0 (as the packaged recipe "rollout"'
        " has), or leave publish_with out"
    )


def importing_policy(
    settings: TrainerSettings, table: PolicyTable | None, name: str, tenant: str | None = None
) -> ChosenPolicy:
    """Return the trained policy `name`, which gets an adapter from elsewhere.

    With `tenant`, only policies of that tenant are found.

    Raises:
        TrainerError: the file of policies has no such policy, or the policy is not trained; or
            there is no file, and `tenant` is not the default tenant.
    """
    if table is None and tenant not in (None, DEFAULT):
        raise TrainerError(
            f"without a file of policies (PAWL_POLICIES) all are of tenant {DEFAULT!r}, and so"
            f" there is no policy {name!r} of tenant {tenant!r}"
        )
    specs = () if table is None else table.specs
    whose = "" if tenant is None else f" of tenant {tenant!r}"
    trained = [spec.name for spec in specs if spec.trained and tenant in (None, spec.tenant)]
    if table is not None and name not in trained:
        raise TrainerError(
            f"{settings.policies} has no policy {name!r}{whose} with trained = true, and no other"
            f" has versions: name one of these, or add it there: {', '.join(trained) or 'none'}"
        )
    [chosen] = chosen_policies(settings.model_copy(update={"policy": name}), table)
    return chosen


async def lock_policy(guard: AsyncConnection, name: str, work: str) -> None:
    """Hold a policy for as long as `guard` lives; `work` is what the command does, as a verb.

    Raises:
        TrainerError: a trainer or another command works on the policy.
    """
    if not await claims.hold_policy(guard, name):
        raise TrainerError(
            f"policy {name!r} is in use by its trainer or another command, and only one process"
            f" may write its versions: stop that process, {work} again, and start it again"
        )


async def base_model(
    settings: TrainerSettings, chosen: ChosenPolicy, name: str, servers: Replicas
) -> str:
    """Return the folder or name of the policy's base model.

    Raises:
        TrainerError: no model server answers and PAWL_MODEL is unset, or they serve other models.
    """
    base = chosen.base or name
    try:
        listed = await servers.models()
    except UpstreamAway as error:
        if settings.model is not None:
            return settings.model
        raise TrainerError(
            f"{error}, so the base model of policy {name!r} is unknown: start a model server, or"
            " set PAWL_MODEL to the model's folder or name"
        ) from error
    if base not in listed:
        raise TrainerError(
            f"the base model of policy {name!r} is {base!r}, but the model server serves"
            f" {', '.join(sorted(listed))}: name a policy of a served model, or serve {base!r}"
        )
    return settings.model or str(listed[base]["root"])
