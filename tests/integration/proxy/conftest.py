"""Share what tests of proxies need of the database."""

import pytest

from proxy import feedback
from proxy.calls import call


@pytest.fixture
def _patient_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database has the time to answer a call that it takes on a slow machine."""
    for module, name in ((call, "PIN_LOOKUP_S"), (feedback, "LOOK_UP_S")):
        monkeypatch.setattr(module, name, 60.0)
