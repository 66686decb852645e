"""The file of policies: every key known, no call two policies', and messages say what is not."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import BadPolicies
from store.policy_table import Explore, open_policies, parse_policies

WHOLE = """
[[policy]]
name = "writes"
base = "qwen"
agents = ["writer", "planner"]
recipe = "ppo"

[[policy]]
name = "checks"
base = "qwen"
agents = ["checker"]
models = ["my-checker"]

[[policy]]
name = "rest"
base = "qwen"
models = ["qwen"]
trained = false
"""
ONE = '[[policy]]\nname = "a"\nbase = "m"\n'


def test_policies_file_is_read_with_all_its_fields() -> None:
    writes, checks, rest = parse_policies(WHOLE, "p.toml").specs
    assert (writes.base, writes.agents, writes.recipe) == ("qwen", ("writer", "planner"), "ppo")
    assert (checks.models, checks.trained, checks.recipe) == (("my-checker",), True, None)
    assert rest.trained is False


@pytest.mark.parametrize(
    ("model", "agent", "policy"),
    [
        ("qwen", "writer", "writes"),
        ("qwen", "planner", "writes"),
        ("qwen", "checker", "checks"),
        ("qwen", "rewriter", "rest"),
        ("my-checker", "writer", "checks"),
        ("writes", "checker", "writes"),
        ("gpt-4o", "writer", None),
        ("writes@3", "writer", None),
    ],
)
def test_policy_is_found_by_model_and_agent(model: str, agent: str, policy: str | None) -> None:
    found = parse_policies(WHOLE, "p.toml").answering(model, agent)
    assert (found and found.name) == policy


EXPLORES = [
    ("0.1", "policy 'a': explore: Input should be a valid dictionary"),
    (
        "{ share = 0.1 }",
        "policy 'a': explore: neither temperature nor drop_strict is set, so it changes nothing; "
        "write explore = { share = 0.1, temperature = 0.7 }",
    ),
    ("{ share = 1.5, temperature = 0.7 }", "explore.share: Input should be less than or equal to"),
    ("{ share = 0.0, temperature = 0.7 }", "explore.share: Input should be gr"),
    ("{ share = nan, temperature = 0.7 }", "explore.share: Input should be le"),
    ("{ share = true, temperature = 0.7 }", "explore.share: Input should be a"),
    ("{ temperature = 0.7 }", "policy 'a': explore.share: Field required; write share = 0.1"),
    ("{ share = 0.1, temperature = 0.01 }", "explore.temperature: Input should be greater than"),
    ("{ share = 0.1, temperature = 2.5 }", "explore.temperature: Input should"),
    ('{ share = 0.1, drop_strict = "x" }', "explore.drop_strict: Input should"),
    ("{ share = 0.1, temprature = 1 }", "'explore.temprature': did you mean temperature?"),
    ("{ share = 0.1, zzz = 1 }", "'explore.zzz': there are share, temperature, drop_strict"),
]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        *((f"{ONE}explore = {rule}", named) for rule, named in EXPLORES),
        ("=", "p.toml is not TOML"),
        ("", "p.toml: there is no table [[policy]]; write one for each policy"),
        ("policy = []", "p.toml: there is no table [[policy]]"),
        ("polices = 1\n" + ONE, "unknown key 'polices': every policy is a table [[policy]]"),
        (ONE + 'agent = ["x"]', "policy 'a': unknown key 'agent': did you mean agents?"),
        (ONE + "zzz = 1", "policy 'a': unknown key 'zzz': there are name, base, agents"),
        ('[[policy]]\nname = "a"', "policy 'a': base: Field required; write base = "),
        ('[[policy]]\nbase = "m"', "policy number 1: name: Field required; write name = "),
        ('[[policy]]\nname = "a@1"\nbase = "m"', "policy 'a@1': name: "),
        ('[[policy]]\nname = "a"\nbase = ""', "policy 'a': base: "),
        (ONE + 'agents = "x"', "policy 'a': agents: Input should be a valid tuple; write agents"),
        (ONE + 'trained = "no"', "policy 'a': trained: Input should be a valid boolean; write"),
        (
            ONE + 'trained = false\nrecipe = "default"',
            "policy 'a': recipe is for a trained policy alone; leave it out",
        ),
        (
            ONE + "trained = false\nexplore = { share = 0.1, temperature = 0.7 }",
            "policy 'a': explore is for a trained policy alone; leave it out",
        ),
        (ONE + ONE, "two tables [[policy]] are named 'a'; give each a name of its own"),
        (
            ONE + 'agents = ["x"]\n[[policy]]\nname = "b"\nbase = "m"\nagents = ["x"]',
            "agents: 'x' with base 'm' is claimed twice, by 'a' and 'b'; leave it in one place",
        ),
        (
            ONE + 'models = ["x"]\n[[policy]]\nname = "b"\nbase = "n"\nmodels = ["x"]',
            "models: 'x' is claimed twice, by 'a' and 'b'",
        ),
        (
            ONE + 'models = ["b"]\n[[policy]]\nname = "b"\nbase = "m"',
            "models: 'b' of policy 'a' is another policy's name; rename one",
        ),
    ],
)
def test_error_in_a_policies_file_names_file_key_and_remedy(text: str, named: str) -> None:
    with pytest.raises(BadPolicies) as caught:
        parse_policies(text, "p.toml")
    assert str(caught.value).startswith("p.toml")
    assert named in str(caught.value)
    assert ("there is no table" in str(caught.value)) == ("there is no table" in named)


def test_exploration_of_each_policy_is_read_from_the_policies_file() -> None:
    table = "[policy.explore]\nshare = 1\ntemperature = 0.7\ndrop_strict = true\n"
    first, second, third = parse_policies(
        ONE
        + table
        + ONE.replace('"a"', '"b"')
        + "explore = { share = 0.25, drop_strict = true }\n"
        + ONE.replace('"a"', '"c"'),
        "p.toml",
    ).specs
    assert first.explore == Explore(share=1.0, temperature=0.7, drop_strict=True)
    assert second.explore == Explore(share=0.25, drop_strict=True)
    assert third.explore is None
    assert str(first.explore) == "share = 1.0, temperature = 0.7, drop_strict = true"
    assert str(second.explore) == "share = 0.25, drop_strict = true"


def test_agent_may_have_a_policy_for_each_base() -> None:
    table = parse_policies(
        ONE + 'agents = ["x"]\n[[policy]]\nname = "b"\nbase = "n"\nagents = ["x"]', "p.toml"
    )
    assert [getattr(table.answering(base, "x"), "name", None) for base in ("m", "n")] == ["a", "b"]


def test_unreadable_policies_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(BadPolicies, match=r"PAWL_POLICIES names .*none\.toml.*Unset it"):
        open_policies(missing)
    with pytest.raises(BadPolicies, match="is a folder, as Docker makes where a mounted file is"):
        open_policies(tmp_path)
    missing.write_bytes(b"\xff")
    with pytest.raises(BadPolicies, match="cannot be read"):
        open_policies(missing)
    missing.write_text(WHOLE)
    table = open_policies(missing)
    assert table is not None
    assert table.policy_named("rest") is not None
    assert table.policy_named("none") is None
    assert open_policies(None) is None


VALUES = st.sampled_from(['"a"', '"b"', '"m"', '["a"]', '["a", "x"]', "true", "1", "[]", "{}"])
KEYS = st.sampled_from(["name", "base", "agents", "models", "trained", "recipe", "other"])


@given(st.lists(st.dictionaries(KEYS, VALUES), max_size=3))
def test_any_policies_file_is_refused_or_answers_each_call_unambiguously(
    tables: list[dict[str, str]],
) -> None:
    text = "".join(
        "[[policy]]\n" + "".join(f"{key} = {value}\n" for key, value in table.items())
        for table in tables
    )
    with suppress(BadPolicies):
        table = parse_policies(text, "p.toml")
        for spec in table.specs:
            assert table.policy_named(spec.name) is spec
            assert all(table.answering(spec.base, agent) is spec for agent in spec.agents)


CHAIN = "".join(
    f'[[policy]]\nname = "{name}"\nbase = "m"\n{more}\n'
    for name, more in (
        ("a", 'publish_with = ["b"]'),
        ("b", ""),
        ("c", 'publish_with = ["b"]'),
        ("d", ""),
        ("fixed", "trained = false"),
    )
)


def test_policies_chained_by_publish_with_go_live_together() -> None:
    table = parse_policies(CHAIN, "p.toml")
    for name in ("a", "b", "c"):
        assert table.live_together(name) == ("a", "b", "c")
    assert table.live_together("d") == ("d",)
    assert table.live_together("nobody") == ("nobody",)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("fixed", "policy 'd': publish_with: 'fixed' is no other policy with trained = true"),
        ("nobody", "policy 'd': publish_with: 'nobody' is no other .* these: a, b, c"),
        ("d", "policy 'd': publish_with: 'd' is no other policy"),
    ],
)
def test_publish_with_must_name_another_trained_policy(other: str, named: str) -> None:
    text = CHAIN.replace('name = "d"\n', f'name = "d"\npublish_with = ["{other}"]\n')
    with pytest.raises(BadPolicies, match=named):
        parse_policies(text, "p.toml")


def test_publish_with_of_a_fixed_policy_is_refused() -> None:
    text = CHAIN.replace("trained = false", 'trained = false\npublish_with = ["a"]')
    with pytest.raises(BadPolicies, match="publish_with is for a trained policy alone"):
        parse_policies(text, "p.toml")


TWO = "".join(
    f'[[policy]]\nname = "{tenant}-writes"\nbase = "m"\ntenant = "{tenant}"\n'
    'agents = ["writer"]\nmodels = ["writes"]\n'
    for tenant in "ab"
)


def test_each_tenants_policies_answer_its_own_calls_alone() -> None:
    table = parse_policies(TWO + ONE, "p.toml")
    asked = [("m", "writer"), ("writes", "x"), ("a-writes", "x"), ("a", "x")]
    for tenant, answers in (
        ("a", ["a-writes", "a-writes", "a-writes", None]),
        ("b", ["b-writes", "b-writes", None, None]),
        ("default", [None, None, None, "a"]),
        ("nobody", [None] * 4),
    ):
        found = [table.answering(*one, tenant) for one in asked]
        assert [one and one.name for one in found] == answers


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ('tenant = "a"\npublish_with = ["b-writes"]', "no other policy of tenant 'a' with trained"),
        ('tenant = "a/b"', 'tenant: .*; write tenant = "team-a"'),
        ('tenant = "b"', "agents: 'writer' with base 'm' is claimed twice"),
    ],
)
def test_policies_file_with_conflicting_or_invalid_tenants_is_refused(
    change: str, named: str
) -> None:
    with pytest.raises(BadPolicies, match=named):
        parse_policies(TWO.replace('tenant = "a"', change), "p.toml")
