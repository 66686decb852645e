"""Hold a policy for a command that writes its versions in place of its trainer; find its base."""

from sqlalchemy.ext.asyncio import AsyncConnection

from store.updates import claims
from trainer.chosen import Chosen
from trainer.errors import TrainerError, UpstreamAway
from trainer.publishing.model_server import Replicas
from trainer.settings import TrainerSettings


async def lock_policy(guard: AsyncConnection, name: str, work: str) -> None:
    """Hold a policy for as long as `guard` lives; `work` is what the command does, as a verb.

    Raises:
        TrainerError: a trainer or another command works on it.
    """
    if not await claims.hold_policy(guard, name):
        raise TrainerError(
            f"policy {name!r} is being worked on, by its trainer or another command, and only one"
            f" may write its versions: stop it, {work} again, and start it again"
        )


async def base_model(
    settings: TrainerSettings, chosen: Chosen, name: str, servers: Replicas
) -> str:
    """Return the folder or name of the policy's base model.

    Raises:
        TrainerError: no model server can tell it, or they serve others.
    """
    base = chosen.base or name
    try:
        listed = await servers.models()
    except UpstreamAway as error:
        if settings.model is not None:
            return settings.model
        raise TrainerError(
            f"{error}, and no other can tell the base model of policy {name!r}: start it, or set"
            " PAWL_MODEL to the model's folder or name"
        ) from error
    if base not in listed:
        raise TrainerError(
            f"the base model of policy {name!r} is {base!r}, but the model server serves"
            f" {', '.join(sorted(listed))}: name a policy of that model, or serve the other"
        )
    return settings.model or str(listed[base]["root"])
