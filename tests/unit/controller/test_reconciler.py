"""What a server lacks of what the store lists."""

from typing import Final, get_args

from hypothesis import given
from hypothesis import strategies as st

from controller.reconciler import has_other_files, versions_for_server, versions_to_load
from store.versions import PolicyState, PolicyVersion

BASES: Final = ("base", "other")
STATES: Final = get_args(PolicyState)


def version(
    name: str,
    number: int,
    state: PolicyState = "serving",
    *,
    unloaded: bool = False,
    share: float | None = None,
) -> PolicyVersion:
    return PolicyVersion(
        name=name,
        version=number,
        state=state,
        served_name=f"{name}@{number}" if number else ("base" if name < "c" else "other"),
        adapter_path=f"/a/{name}/{number}" if number else None,
        update_id=None,
        unloaded=unloaded,
        share=share,
    )


def adapter(name: str, number: int, root: str | None = None) -> dict[str, dict[str, str | None]]:
    path = root or f"/a/{name}/{number}"
    return {f"{name}@{number}": {"root": path, "parent": "base"}}


BASE: Final[dict[str, dict[str, str | None]]] = {"base": {"root": "/m", "parent": None}}


def test_versions_to_load_are_ordered_serving_then_with_a_share_then_newest() -> None:
    versions = [
        version("a", 0, "retired"),
        version("a", 1, "retired", share=0.05),
        version("a", 2, "serving"),
        version("a", 3, "written"),
        version("a", 4, "rejected"),
        version("a", 5, "retired", unloaded=True),
        version("a", 6, "rolled_back"),
        version("a", 7, "rolled_back", unloaded=True),
        version("a", 8, "loaded"),
    ]
    assert [one.version for one in versions_for_server(versions, BASE)] == [2, 1, 8, 6]


def test_adapter_of_another_base_model_does_not_belong_on_the_server() -> None:
    versions = [version("a", 0), version("a", 1), version("c", 0), version("c", 1)]
    assert [one.name for one in versions_for_server(versions, BASE)] == ["a"]
    # A policy whose name is an adapter's here has no base here.
    assert versions_for_server(versions, adapter("base", 1)) == []


def test_version_loaded_from_another_folder_is_to_be_loaded_again() -> None:
    versions = [version("a", 1), version("a", 2), version("a", 3)]
    listed = BASE | adapter("a", 1) | adapter("a", 2, "/elsewhere")
    assert [one.version for one in versions_to_load(versions, listed)] == [3, 2]
    assert [one.version for one in versions if has_other_files(one, listed)] == [2]


versions_of = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 4), st.sampled_from(STATES)),
    unique_by=lambda one: one[:2],
).map(lambda found: [version(*one) for one in found])


@given(versions_of, st.sets(st.sampled_from(BASES)), st.sets(st.integers(1, 4)))
def test_no_version_is_missing_from_the_server_after_loading(
    versions: list[PolicyVersion], bases: set[str], there: set[int]
) -> None:
    listed: dict[str, dict[str, str | None]] = {
        base: {"root": "/m", "parent": None} for base in bases
    }
    for number in there:
        listed |= adapter("a", number)
    wanted = versions_for_server(versions, listed)
    assert all(one.version and one.is_servable for one in wanted)
    for one in versions_to_load(wanted, listed):
        listed |= adapter(one.name, one.version)
    assert versions_for_server(versions, listed) == wanted
    assert versions_to_load(wanted, listed) == []
