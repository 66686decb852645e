"""Write the files that docker-compose.yml's services share: passwords and the adapters' rank.

`python -m pawl.stack.compose` is the service `setup`, which ends before the others start.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from pawl.commands.common import fail
from pawl.settings import UnreadSettings, read_settings
from pawl.stack.vllm import rank_with_room
from store.errors import BadPolicies
from store.settings import SECRETS
from trainer.errors import TrainerError
from trainer.policies import trained_recipes
from trainer.settings import TrainerSettings

DATABASE_PASSWORD: Final = "POSTGRES_PASSWORD"
GRAFANA_PASSWORD: Final = "GRAFANA_ADMIN_PASSWORD"
# On a volume that Grafana sees.
GRAFANA: Final = Path("/var/lib/pawl/grafana")
# PostgreSQL keeps the password of its first start.
OTHER_PASSWORD: Final = (
    "POSTGRES_PASSWORD is not the one that the database was made with: take it out of .env. Or"
    " change the database's: start it alone, `docker compose up --no-deps --wait postgres`; set the"
    ' new one, `docker compose exec postgres psql --username=pawl --command "ALTER ROLE pawl'
    " PASSWORD 'NEW'\"`; remove the old one, `docker compose run --rm --entrypoint rm setup"
    " /run/secrets/POSTGRES_PASSWORD`"
)


def write_secrets(folder: Path, grafana: Path, given: Mapping[str, str]) -> None:
    """Write each password into a file of its name, and the database's URL beside its password.

    A password that is missing in `given` (environment variables) is kept, or generated if there is
    none yet. Exit with status 2 if `given` has another password than the existing database.
    """
    existing, wanted = folder / DATABASE_PASSWORD, given.get(DATABASE_PASSWORD)
    if wanted and existing.exists() and existing.read_text() != wanted:
        fail(OTHER_PASSWORD)
    for file in (folder / DATABASE_PASSWORD, grafana / GRAFANA_PASSWORD):
        name = file.name
        if given.get(name) or not file.exists():
            _write(file, given.get(name) or secrets.token_urlsafe())
    password = quote((folder / DATABASE_PASSWORD).read_text(), safe="")
    _write(folder / "DATABASE_URL", f"postgresql://pawl:{password}@postgres:5432/pawl")


def write_vllm_config(folder: Path, settings: TrainerSettings) -> None:
    """Write `vllm.yaml` (vLLM's --config) with the highest rank of the recipes' adapters.

    Raises:
        BadPolicies: the file of policies cannot be used.
        TrainerError: a recipe cannot be used.
    """
    rank = rank_with_room(max(recipe.lora.rank for recipe in trained_recipes(settings)))
    _write(folder / "vllm.yaml", f"max-lora-rank: {rank}\n")


def _write(file: Path, text: str) -> None:
    """Replace a file in one step: a kill leaves no half-written file."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(text)
    partial.replace(file)


def main() -> None:
    """Write all files; exit with status 2 if settings, policies or recipes cannot be used."""
    try:
        settings = read_settings(TrainerSettings)
        write_vllm_config(settings.adapter_dir, settings)
    except (UnreadSettings, BadPolicies, TrainerError) as error:
        fail(str(error))
    write_secrets(SECRETS, GRAFANA, os.environ)


if __name__ == "__main__":
    main()
