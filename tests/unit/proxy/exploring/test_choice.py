"""Which episodes explore: their share of all, the same ones everywhere and always."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.exploring import is_chosen
from store.ids import new_name
from tests.conftest import ROOT


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("named", ["run-{}", "{}", "conv:{}"])
def test_the_share_of_episodes_is_the_share_that_is_asked_for(share: float, named: str) -> None:
    many = 20_000
    chosen = sum(is_chosen(named.format(number), share) for number in range(many))
    # Five standard deviations.
    assert abs(chosen / many - share) < 5 * (share * (1 - share) / many) ** 0.5


def test_calls_that_name_no_episode_explore_in_the_same_share() -> None:
    chosen = sum(is_chosen(new_name()[1], 0.25) for _ in range(20_000))
    assert abs(chosen / 20_000 - 0.25) < 0.016


@given(st.text(), st.floats(min_value=1e-9, max_value=1), st.floats(min_value=1e-9, max_value=1))
def test_a_smaller_share_lies_within_a_larger_one_and_all_are_in_the_whole(
    episode: str, one: float, other: float
) -> None:
    small, large = sorted((one, other))
    assert is_chosen(episode, small) <= is_chosen(episode, large)
    assert is_chosen(episode, 1.0)
    assert is_chosen(episode, one) == is_chosen(episode, one)


def test_a_name_that_is_no_unicode_text_is_chosen_or_not_all_the_same() -> None:
    assert is_chosen("\ud800", 1.0)


def test_another_process_chooses_the_same_episodes() -> None:
    here = [is_chosen(f"e{number}", 0.3) for number in range(200)]
    code = (
        "from proxy.exploring import is_chosen;"
        "print([is_chosen(f'e{number}', 0.3) for number in range(200)])"
    )
    there = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == str(here)


def test_the_choice_is_the_one_that_it_has_been_since_it_was_released() -> None:
    """Another one would turn episodes under way."""
    chosen = [number for number in range(60) if is_chosen(f"episode-{number}", 0.1)]
    assert chosen == [1, 3, 5, 6, 23, 48]
