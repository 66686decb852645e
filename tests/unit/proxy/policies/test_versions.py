"""Routing: a policy's name gets the serving version, an episode keeps the one it began with."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.policies.version_file import FILE_NAME, VersionFile
from proxy.policies.versions import ServedVersion, Versions
from store.policy_table import parse_policies
from store.versions import PolicyVersion
from tests.support.proxy.versions import State, numbered, version


def test_unknown_model_name_is_passed_on_unchanged() -> None:
    assert Versions().resolve("gpt-x", "e") == ServedVersion(None, None, "gpt-x")
    assert Versions().resolve(None, "e") == ServedVersion(None, None, None)


@pytest.mark.parametrize(
    ("asked", "state", "gets"),
    [
        ("m@1", "retired", ServedVersion("m", 1, "m@1")),
        ("m@0", "retired", ServedVersion("m", 0, "m")),
        # It may still be loaded.
        ("m@1", "unloaded", ServedVersion("m", 1, "m@1")),
        ("m@1", "written", ServedVersion(None, None, "m@1")),
        ("m@1", "rejected", ServedVersion(None, None, "m@1")),
    ],
)
def test_version_that_was_ever_loaded_can_be_asked_for_by_its_name(
    asked: str, state: State, gets: ServedVersion
) -> None:
    versions = Versions(numbered("retired", state, "serving"))
    assert versions.resolve(asked, "e") == gets
    # It is not the episode's version, which the policy's own name gets.
    assert versions.resolve("m", "e") == ServedVersion("m", 2, "m@2", arm="serving")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("m@1", "is retired, and was unloaded"),
        ("m@2", "was rejected"),
        ("m@4", "is not loaded yet"),
        ("m@3", "is being loaded again"),
        ("m@9", "is unknown"),
    ],
)
def test_unserved_version_is_explained_with_loaded_alternatives(asked: str, why: str) -> None:
    versions = Versions(numbered("retired", "unloaded", "rejected", "serving", "written"))
    said = versions.why_not_served(asked)
    assert said is not None
    assert f"does not have {asked}: this version {why}" in said
    assert "a version that is loaded: m@3, m@0" in said


@pytest.mark.parametrize("asked", [None, "m", "other@1", "m@", "m@x", "m@-1", "m@" + "9" * 50])
def test_name_that_is_no_unserved_version_has_no_explanation(asked: str | None) -> None:
    assert Versions(numbered("serving")).why_not_served(asked) is None


def test_episodes_pin_from_an_earlier_process_stands() -> None:
    versions = Versions(numbered("retired", "serving"))
    versions.pin("m", "e", 0)
    assert versions.resolve("m", "e").version == 0


def test_episodes_pin_that_can_be_served_is_not_replaced() -> None:
    versions = Versions(numbered("retired", "retired", "serving"))
    assert versions.resolve("m", "e").version == 2
    versions.pin("m", "e", 1)
    assert versions.resolve("m", "e").version == 2


def test_episode_that_lost_its_version_follows_the_move_of_another_proxy() -> None:
    """It left version 1 for 2 elsewhere; here 3 serves by now, and 1 is remembered."""
    versions = Versions(numbered("retired", "serving"))
    assert versions.resolve("m", "e").version == 1
    versions.replace(numbered("retired", "unloaded", "retired", "serving"))
    assert not versions.knows_version_of("m", "e")
    versions.pin("m", "e", 2)
    assert versions.knows_version_of("m", "e")
    assert versions.resolve("m", "e").version == 2


def test_store_is_asked_only_once_about_an_unmoved_episode() -> None:
    versions = Versions(numbered("retired", "serving"))
    versions.resolve("m", "e")
    versions.replace(numbered("retired", "unloaded", "serving"))
    assert not versions.knows_version_of("m", "e")
    versions.pin("m", "e", 1)
    assert versions.resolve("m", "e").version == 2
    assert versions.knows_version_of("m", "e")


@given(st.lists(st.integers(1, 6), max_size=30), st.lists(st.text(max_size=2), max_size=30))
def test_a_new_episode_gets_the_serving_version_and_keeps_it(
    swaps: list[int], episodes: list[str]
) -> None:
    versions, now = Versions(numbered("serving")), 0
    seen: dict[str, ServedVersion] = {}
    for index, episode in enumerate(episodes):
        if index < len(swaps):
            now = swaps[index]
            versions.replace(version(n, "serving" if n == now else "retired") for n in range(7))
        serving = ServedVersion("m", now, f"m@{now}" if now else "m", arm="serving")
        assert versions.resolve("m", episode) == seen.setdefault(episode, serving)


# Where a file names the policies

TABLE = parse_policies(
    """
    [[policy]]
    name = "writes"
    base = "qwen"
    agents = ["writer"]
    [[policy]]
    name = "checks"
    base = "qwen"
    agents = ["checker"]
    [[policy]]
    name = "rest"
    base = "qwen"
    models = ["qwen"]
    trained = false
    """,
    "policies.toml",
)


def of(policy: str, *states: State) -> list[PolicyVersion]:
    return numbered(*states, name=policy, base="qwen")


def test_policy_without_versions_is_served_as_its_base() -> None:
    versions = Versions([], TABLE)
    assert versions.resolve("writes", "e", "any") == ServedVersion(
        "writes", 0, "qwen", arm="serving"
    )
    assert versions.knows_version_of("writes", "e")
    versions.replace(of("writes", "retired", "serving"))
    assert versions.resolve("writes", "new") == ServedVersion(
        "writes", 1, "writes@1", arm="serving"
    )


def test_model_name_missing_from_the_policies_file_is_no_policy() -> None:
    stored = [*numbered("retired", "serving"), version(1, "retired", "rest")]
    versions = Versions([*stored, version(1, "retired", "writes")], TABLE)
    for model in ("m", "m@1", "rest@1", "gpt-x"):
        assert versions.resolve(model, "e", "writer") == ServedVersion(None, None, model)
    assert versions.resolve("writes@1", "e") == ServedVersion("writes", 1, "writes@1")


def test_version_0_of_a_policy_without_a_policies_file_is_served_as_its_base_model() -> None:
    versions = Versions(of("writes", "serving"))
    assert versions.resolve("writes", "e") == ServedVersion("writes", 0, "qwen", arm="serving")
    assert versions.base_of("writes") == "qwen"
    # The base itself is nobody's: no policy has its name.
    assert versions.resolve("qwen", "e") == ServedVersion(None, None, "qwen")


EXPLORING = """
[[policy]]
name = "a"
base = "m"
agents = ["x"]
models = ["mine"]
explore = { share = 0.5, temperature = 0.7 }
[[policy]]
name = "b"
base = "m"
"""


def test_exploration_applies_to_policy_names_and_not_to_version_names() -> None:
    versions = Versions(table=parse_policies(EXPLORING, "p.toml"))
    assert versions.is_exploring
    for model, agent in (("m", "x"), ("a", "y"), ("mine", "y")):
        rule = versions.exploration(model, agent)
        assert rule is not None
        assert (rule.share, rule.temperature) == (0.5, 0.7)
    for model, agent in (("m", "y"), ("b", "x"), ("a@1", "x"), ("m@0", "x"), ("gpt", "x")):
        assert versions.exploration(model, agent) is None


def test_version_with_deleted_files_is_explained() -> None:
    """Such versions are not listed any more: there may have been thousands of them."""
    versions = Versions([version(0, "retired"), version(2, "serving")])
    said = versions.why_not_served("m@1")
    assert said is not None
    assert "was unloaded or rejected, and its files were deleted" in said
    # It is asked of the server that the policy's other versions are at.
    assert versions.resolve("m@1", "e") == ServedVersion("m", 1, "m@1")
    for other in ("m@01", "m@3", "m@-1", "n@1"):
        assert versions.resolve(other, "e") == ServedVersion(None, None, other)
    assert "is unknown" in (versions.why_not_served("m@3") or "")


TOGETHER = parse_policies(
    "".join(
        f'[[policy]]\nname = "{name}"\nbase = "qwen"\npublish_with = ["{other}"]\n'
        for name, other in (("writes", "checks"), ("checks", "writes"))
    ),
    "policies.toml",
)


def test_an_episode_gets_versions_that_were_live_together() -> None:
    """Also one that calls the second of them after both have been replaced."""
    old = [*of("writes", "serving"), *of("checks", "serving")]
    new = [*of("writes", "retired", "serving"), *of("checks", "retired", "serving")]
    versions = Versions(old, TOGETHER)
    assert versions.resolve("writes", "begun").version == 0
    versions.replace(new)
    assert versions.resolve("checks", "begun").version == 0
    assert versions.resolve("writes", "begun").version == 0
    for name in ("checks", "writes"):
        assert versions.resolve(name, "new").version == 1


def test_version_that_waits_to_go_live_is_served_only_by_its_name() -> None:
    versions = Versions(of("writes", "serving", "loaded"), TOGETHER)
    assert versions.resolve("writes", "e").version == 0
    assert versions.resolve("writes@1", "eval").version == 1


BASE = version(0, "serving")


async def test_damaged_versions_file_is_read_once_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('[{"name":')
    taken: asyncio.Queue[list[PolicyVersion]] = asyncio.Queue()
    watching = asyncio.create_task(VersionFile(tmp_path).watch(taken.put_nowait))
    await asyncio.sleep(0)
    VersionFile(tmp_path).write([BASE])
    assert await asyncio.wait_for(taken.get(), 10) == [BASE]
    watching.cancel()


async def test_versions_file_is_read_again_after_a_disk_error(tmp_path: Path) -> None:
    file = VersionFile(tmp_path)
    file.write([BASE])
    whole = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).unlink()
    # Reading it is an error of the disk's (EISDIR), as EIO is.
    (tmp_path / FILE_NAME).mkdir()
    assert file.read() is None
    (tmp_path / FILE_NAME).rmdir()
    (tmp_path / FILE_NAME).write_bytes(whole)
    assert file.read() == [BASE]


async def test_unchanged_versions_file_is_not_read_again(tmp_path: Path) -> None:
    file = VersionFile(tmp_path)
    assert file.read() is None
    file.write([BASE])
    assert file.read() == [BASE]
    assert file.read() is None
