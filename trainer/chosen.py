"""Choose the policy that a trainer trains, its base model and its recipe (pure)."""

from store.policy_table import PolicyTable
from store.records import Record
from trainer.errors import TrainerError
from trainer.settings import TrainerSettings


class Chosen(Record, frozen=True, kw_only=True):
    """Hold what a trainer trains.

    `policy` is None if the model server's base model is the policy. `base` is the name that the
    model server has for the base model; None: the policy's own.
    """

    policy: str | None
    base: str | None
    recipe: str


def chosen_policy(settings: TrainerSettings, table: PolicyTable | None) -> Chosen:
    """Return what a trainer with these settings trains; `table` is the file of policies, if any.

    Raises:
        TrainerError: the file has no such policy, or the policy is not trained; or the settings
            leave open which of several is meant.
    """
    if table is None:
        return Chosen(policy=settings.policy, base=None, recipe=settings.recipe)
    trained = {spec.name: spec for spec in table.specs if spec.trained}
    names = ", ".join(trained) or "none"
    if settings.policy is None and len(trained) != 1:
        raise TrainerError(
            f"{settings.policies} has {len(trained)} policies with trained = true ({names}), and a "
            "trainer trains one: set PAWL_POLICY to the one that is meant"
        )
    name = settings.policy or next(iter(trained))
    if name not in trained:
        raise TrainerError(
            f"PAWL_POLICY is {name!r}, which {settings.policies} does not have as a policy with "
            f"trained = true: set it to one of these, or add it there: {names}"
        )
    spec = trained[name]
    return Chosen(policy=name, base=spec.base, recipe=spec.recipe or settings.recipe)


def importing_policy(settings: TrainerSettings, table: PolicyTable | None, name: str) -> Chosen:
    """Return what a trainer of policy `name` trains, which gets an adapter from elsewhere.

    Raises:
        TrainerError: the file of policies has no such policy, or the policy is not trained.
    """
    trained = None if table is None else [spec.name for spec in table.specs if spec.trained]
    if trained is not None and name not in trained:
        raise TrainerError(
            f"{settings.policies} has no policy {name!r} with trained = true, and no other has"
            f" versions: name one of these, or add it there: {', '.join(trained) or 'none'}"
        )
    return chosen_policy(settings.model_copy(update={"policy": name}), table)
