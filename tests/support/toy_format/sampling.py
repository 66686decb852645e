"""Read the settings of the toy API: `only` names the words that may be sampled."""

from collections.abc import Mapping
from typing import Any

from proxy.formats.sampling import EVERYWHERE, SamplingRules


class ToySampling(SamplingRules):
    """Leave the model free, unless there is a list of words."""

    settings = frozenset({"only"})
    harmless = EVERYWHERE | {"said", "colour"}

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        """Return whether the words are given."""
        return "only" in settings
