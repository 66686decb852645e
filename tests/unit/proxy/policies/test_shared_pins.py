"""Workers of a proxy agree on an episode's version: whoever proposes first is followed."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from proxy.policies import shared_pins
from proxy.policies.shared_pins import SET_ENTRIES, SharedPins
from proxy.policies.versions import Versions
from store.policy_table import parse_policies
from store.versions import PolicyVersion
from tests.support.proxy.versions import State, numbered, version

TOGETHER = """
[[policy]]
name = "writes"
base = "b"
agents = ["writer"]
publish_with = ["checks"]

[[policy]]
name = "checks"
base = "b"
agents = ["checker"]
"""
PROPOSES = """
import sys
from proxy.policies import shared_pins
from proxy.policies.shared_pins import SharedPins
# Whoever holds a lock may be kept from a processor for longer than a worker would wait.
shared_pins.LOCK_TRIES = 10**6
page, version = map(int, sys.argv[1:])
pins = SharedPins(page)
print(*[pins.agree_on_version("m", f"e{n}", version, lambda kept: True) for n in range(2000)])
"""


def any_version(version: int) -> bool:
    return True


def both_see(versions: Sequence[PolicyVersion], *workers: Versions) -> None:
    for worker in workers:
        worker.replace(versions)


Step = tuple[int, int, int, int]


@given(
    st.lists(
        st.tuples(*(st.integers(0, most) for most in (2, 1, 3, 4))),
        max_size=60,
    )
)
def test_all_workers_pin_an_episode_to_the_first_servable_version_proposed(
    steps: list[Step],
) -> None:
    one = SharedPins(os.memfd_create("pins"))
    workers = [one, SharedPins(one.page), SharedPins(one.page)]
    kept: dict[tuple[str, str], int] = {}
    for worker, policy, episode, proposed in steps:
        key = (f"p{policy}", f"e{episode}")
        # Version 0 was retired meanwhile.
        got = workers[worker].agree_on_version(*key, proposed, lambda version: version > 0)
        if kept.get(key, 0) == 0:
            kept[key] = proposed
        assert got == kept[key]
        assert {one: workers[0].pinned_version(*one) for one in kept} == kept
    assert workers[1].pinned_version("p9", "e") is None


def test_full_set_of_shared_pins_loses_only_its_oldest_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pins, "SET_COUNT", 1)
    pins = SharedPins(os.memfd_create("pins"))
    for number in range(SET_ENTRIES + 1):
        assert pins.agree_on_version("m", f"e{number}", number, any_version) == number
    assert [pins.pinned_version("m", f"e{number}") for number in range(SET_ENTRIES + 1)] == [
        None,
        *range(1, SET_ENTRIES + 1),
    ]


def test_pins_of_policy_and_episode_names_do_not_collide() -> None:
    pins = SharedPins(os.memfd_create("pins"))
    assert pins.agree_on_version("m", "ab", 1, any_version) == 1
    assert pins.pinned_version("ma", "b") is None
    assert pins.agree_on_version("m", "\ud800", 2, any_version) == 2
    assert pins.pinned_version("m", "\ud800") == 2


def test_processes_that_propose_at_the_same_time_agree() -> None:
    pins = SharedPins(os.memfd_create("pins"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROPOSES, str(pins.page), str(version)],
            pass_fds=[pins.page],
            stdout=subprocess.PIPE,
            text=True,
        )
        for version in (1, 2, 3)
    ]
    got = [process.communicate(timeout=120)[0].split() for process in processes]
    assert len(got[0]) == 2000
    assert got[0] == got[1] == got[2]


HOLDS = """
import fcntl, sys, time
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_worker_stopped_while_it_holds_the_lock_of_the_pins_blocks_no_other_worker() -> None:
    pins = SharedPins(os.memfd_create("pins"))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(pins.page)], pass_fds=[pins.page], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        with capture_logs() as logs:
            assert pins.agree_on_version("m", "e", 1, any_version) == 1
        assert [entry["event"] for entry in logs] == ["version_not_shared"]
        assert pins.pinned_version("m", "e") is None
    finally:
        holder.kill()
        holder.communicate()
    assert pins.agree_on_version("m", "e", 2, any_version) == 2
    assert SharedPins(pins.page).agree_on_version("m", "e", 1, any_version) == 2


def test_worker_that_cannot_write_shared_pins_decides_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    pins = SharedPins(os.memfd_create("pins"))
    monkeypatch.setattr("os.pwrite", full)
    with capture_logs() as logs:
        assert pins.agree_on_version("m", "e", 3, any_version) == 3
    assert [entry["event"] for entry in logs] == ["version_not_shared"]
    # The lock is free again.
    fcntl.lockf(pins.page, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def two() -> tuple[Versions, Versions]:
    """Two workers that see version 0 serving."""
    pins = SharedPins(os.memfd_create("pins"))
    known = numbered("serving")
    return Versions(known, shared=pins), Versions(known, shared=SharedPins(pins.page))


def test_an_episode_keeps_its_version_at_another_worker(two: tuple[Versions, Versions]) -> None:
    one, other = two
    assert one.resolve("m", "e").version == 0
    both_see(numbered("retired", "serving"), one, other)
    assert other.knows_version_of("m", "e")
    assert other.resolve("m", "e").version == 0
    assert not other.knows_version_of("m", "new")
    assert other.resolve("m", "new").version == 1
    assert one.resolve("m", "new").version == 1


def test_episode_of_an_unloaded_version_moves_alike_at_every_worker(
    two: tuple[Versions, Versions],
) -> None:
    one, other = two
    both_see(numbered("retired", "serving"), one, other)
    assert one.resolve("m", "e").version == 1
    both_see(numbered("retired", "unloaded", "serving"), one, other)
    assert not other.knows_version_of("m", "e")
    assert other.resolve("m", "e").version == 2
    both_see([version(0, "retired"), version(2, "retired"), version(3, "serving")], one, other)
    assert one.knows_version_of("m", "e")
    assert one.resolve("m", "e").version == 2


@pytest.mark.parametrize("known", [None, "written", "loaded", "unloaded"])
@pytest.mark.parametrize("asks_first", [False, True])
def test_a_worker_that_has_not_read_of_a_promotion_yet_catches_up(
    asks_first: bool, known: State | None
) -> None:
    pins = SharedPins(os.memfd_create("pins"))
    news = numbered("retired", "serving")
    looks: list[int] = []
    behind: Versions

    def catch_up() -> None:
        looks.append(1)
        behind.replace(news)

    old = [version(0, "serving"), *([] if known is None else [version(1, known)])]
    behind = Versions(old, shared=pins, catch_up=catch_up)
    assert Versions(news, shared=SharedPins(pins.page)).resolve("m", "e").version == 1
    if asks_first:
        assert behind.knows_version_of("m", "e")
    assert behind.resolve("m", "e").served_name == "m@1"
    assert behind.resolve("m", "e").version == 1
    assert looks == [1]


def test_policies_that_go_live_together_stay_together_across_workers() -> None:
    pins, table = SharedPins(os.memfd_create("pins")), parse_policies(TOGETHER, "policies.toml")

    def at(number: int) -> list[PolicyVersion]:
        return [
            version(one, "serving" if one == number else "retired", name)
            for name in ("writes", "checks")
            for one in range(number + 1)
        ]

    one = Versions(at(0), table, pins)
    other = Versions(at(0), table, SharedPins(pins.page))
    assert one.resolve("b", "e", "writer").version == 0
    both_see(at(1), one, other)
    assert other.resolve("b", "e", "checker").version == 0
    assert other.resolve("b", "new", "checker").version == 1
    assert one.resolve("b", "new", "writer").version == 1


def test_pin_of_another_proxy_wins_over_versions_live_together() -> None:
    pins, table = SharedPins(os.memfd_create("pins")), parse_policies(TOGETHER, "policies.toml")
    one, other = (Versions(shared=SharedPins(pins.page), table=table) for _ in range(2))
    old = [version(0, "serving", name) for name in ("writes", "checks")]
    both_see(old, one, other)
    assert one.resolve("b", "e", "writer").version == 0
    both_see([version(0, "retired", "checks"), version(1, "serving", "checks"), old[0]], other)
    assert not other.knows_version_of("checks", "e")
    other.pin("checks", "e", 1)
    assert other.resolve("b", "e", "checker").version == 1
