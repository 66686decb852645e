"""How many examples a property gets: some in `make test`, 50,000 in the long run."""

from typing import Any, Final

from hypothesis import HealthCheck, Phase, settings

# Deep and long inputs are meant; so is a database that several examples share.
_MEANT: Final = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.function_scoped_fixture,
)
# Explaining a failure traces each line, which takes longer than finding it.
_PHASES: Final = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
# Making a failure smaller takes hundreds of examples: too long where each asks a database.
_SLOW: Final = (Phase.explicit, Phase.reuse, Phase.generate)


def is_long() -> bool:
    """Tell whether this is the long run (known once pytest is configured)."""
    return settings.get_current_profile_name() == "long"


def fuzzing(examples: int, *, slow: bool = False) -> Any:
    """Try so many examples, the same each time; in the long run as many as its profile says."""
    phases = _SLOW if slow else _PHASES
    if is_long():
        return settings(phases=phases, suppress_health_check=_MEANT)
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        phases=phases,
        suppress_health_check=_MEANT,
    )
