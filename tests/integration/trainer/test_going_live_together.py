"""Versions of several policies go live together: in one transaction, or none of them."""

import pytest
from sqlalchemy import text

from store import version_states
from tests.support.faults.killing import Killed, killing
from tests.support.trainer.turns import NAMES, Bench, bench
from trainer.publishing.adapters import version_folder

__all__ = ["bench"]


@pytest.fixture
async def together(bench: Bench) -> Bench:
    """A bench whose two policies go live together."""
    bench.together = dict.fromkeys(NAMES, NAMES)
    return bench


async def test_versions_that_go_live_together_do_so_in_one_transaction(together: Bench) -> None:
    await together.fill({"writer": 8, "checker": 8})
    assert len(await together.turns(1)) == 1
    assert list((await together.states()).values()) == ["ready"]
    assert await together.serving() == {"writer": 0, "checker": 0}
    assert sorted(await together.turns(1)) == ["checker", "writer"]
    assert await together.serving() == {"writer": 1, "checker": 1}
    async with together.engine.connect() as connection:
        query = text("SELECT count(DISTINCT changed_at) FROM policies WHERE state = 'serving'")
        assert await connection.scalar(query) == 1


async def test_a_policy_trains_no_further_while_its_version_waits(together: Bench) -> None:
    await together.fill({"writer": 24})
    assert await together.turns(1) == ["writer"]
    await together.look()
    assert await together.updates() == ["writer"]


async def test_one_without_a_version_does_not_hold_the_other_for_ever(together: Bench) -> None:
    await together.fill({"writer": 24})
    await together.turns(1)
    together.wait_s = 1e-6
    await together.look()
    assert await together.serving() == {"writer": 1, "checker": 0}
    # And it trains on.
    assert await together.updates() == ["writer", "writer"]


async def test_a_rejected_one_keeps_all_at_their_old_versions_until_the_next(
    together: Bench,
) -> None:
    await together.fill({"writer": 8, "checker": 2})
    together.learners["checker"].served = -7.0
    await together.turns(2)
    assert await together.states() == {"writer@1": "ready", "checker@1": "rejected"}
    assert await together.serving() == {"writer": 0, "checker": 0}
    together.learners["checker"].served = -2.0
    await together.fill({"checker": 2}, "u")
    await together.turns(1)
    assert await together.serving() == {"writer": 1, "checker": 2}


@pytest.mark.parametrize("first", [("writer",), ("checker",)])
async def test_two_trainers_bring_them_live_together(together: Bench, first: tuple[str]) -> None:
    await together.fill({"writer": 8, "checker": 2})
    await together.look(first)
    assert set((await together.states()).values()) == {"ready"}
    await together.look([name for name in NAMES if name not in first])
    assert await together.serving() == {"writer": 1, "checker": 1}


async def test_a_server_that_was_restarted_loads_what_waits_again(together: Bench) -> None:
    await together.fill({"writer": 8})
    await together.turns(1)
    together.fake.loaded.clear()
    await together.look()
    assert list(together.fake.loaded) == ["writer@1"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", ["make_ready", "promote", "promote_together"])
async def test_killed_as_they_go_live_none_is_live_alone(
    together: Bench, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    await together.fill({"writer": 8, "checker": 2})
    await together.turns(1)
    killing(version_states, step, after=after)(monkeypatch)
    with pytest.raises(Killed):
        await together.look()
    assert await together.serving() == {"writer": 0, "checker": 0}
    await together.look()
    assert await together.serving() == {"writer": 1, "checker": 1}


async def test_a_version_that_waits_is_not_one_that_is_written_again(together: Bench) -> None:
    await together.fill({"writer": 8})
    await together.turns(1)
    assert version_folder(together.folder, "writer", 1).exists()
    # Policies that need no longer go live together do so by themselves.
    together.together = {}
    await together.look()
    assert await together.serving() == {"writer": 1, "checker": 0}
