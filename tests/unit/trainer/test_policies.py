"""What a trainer trains: as the settings say, or as the file of policies does."""

from pathlib import Path
from typing import Any

import pytest

from store.policy_table import parse_policies
from trainer.errors import TrainerError
from trainer.policies import ChosenPolicy, chosen_policies, importing_policy, load_recipes
from trainer.settings import TrainerSettings

FIXED = '[[policy]]\nname = "rest"\nbase = "qwen"\ntrained = false\n'
ONE = '[[policy]]\nname = "writes"\nbase = "qwen"\nrecipe = "ppo"\n'
OTHER = '[[policy]]\nname = "plans"\nbase = "llama"\n'
TWO = ONE + '[[policy]]\nname = "checks"\nbase = "qwen"\n'
# The trained policies of the second.
BOTH = ("writes", "checks")


def settings(**values: Any) -> TrainerSettings:
    return TrainerSettings.model_validate({"policies": Path("p.toml")} | values)


def test_settings_name_the_policy_to_train_without_a_policies_file() -> None:
    chosen = chosen_policies(settings(policies=None, policy="m", recipe="r"), None)
    assert chosen == (ChosenPolicy(policy="m", base=None, recipe="r"),)
    [chosen_by_server] = chosen_policies(settings(policies=None), None)
    assert chosen_by_server.policy is None


def test_the_only_trained_policy_of_a_file_need_not_be_named() -> None:
    [chosen] = chosen_policies(settings(), parse_policies(FIXED + ONE, "p.toml"))
    assert chosen == ChosenPolicy(policy="writes", base="qwen", recipe="ppo", known=("writes",))


def test_named_policy_is_trained_with_the_recipe_of_the_settings_if_the_file_has_none() -> None:
    [chosen] = chosen_policies(settings(policy="checks", recipe="r"), parse_policies(TWO, "p.toml"))
    assert chosen == ChosenPolicy(policy="checks", base="qwen", recipe="r", known=BOTH)


def test_all_policies_of_a_file_are_trained_unless_some_are_named() -> None:
    table = parse_policies(FIXED + TWO, "p.toml")
    writes = ChosenPolicy(policy="writes", base="qwen", recipe="ppo", known=BOTH)
    checks = ChosenPolicy(policy="checks", base="qwen", recipe="r", known=BOTH)
    assert chosen_policies(settings(recipe="r"), table) == (writes, checks)
    assert chosen_policies(settings(recipe="r", policy="checks, writes"), table) == (checks, writes)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("dtype", 'dtype = "bfloat16"\n'),
        ("batch.gradient_checkpointing", "[batch]\ngradient_checkpointing = true\n"),
    ],
)
def test_recipes_that_cannot_share_a_base_model_are_refused(
    tmp_path: Path, key: str, text: str
) -> None:
    one, path = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text("")
    path.write_text(text)
    both = [
        ChosenPolicy(policy=name, base="qwen", recipe=recipe)
        for name, recipe in (("writes", str(one)), ("checks", str(path)))
    ]
    with pytest.raises(TrainerError, match=rf"'writes' and 'checks' have {key} = .*PAWL_POLICY"):
        load_recipes(both)
    assert [one.dtype for one in load_recipes(both[:1] * 2)] == ["float32"] * 2


@pytest.mark.parametrize(
    ("text", "policy", "named"),
    [
        (TWO + OTHER, None, r"2 base models .*PAWL_POLICY=writes,checks and PAWL_POLICY=plans"),
        (TWO + OTHER, "checks, plans", r"PAWL_POLICY=checks and PAWL_POLICY=plans"),
        (FIXED, None, r"p\.toml has no policy with trained = true"),
        (FIXED + ONE, "rest", r"PAWL_POLICY is 'rest', .*trained = true.*: writes"),
        (ONE, "other", r"PAWL_POLICY is 'other', and p\.toml has no policy 'other'"),
        (TWO, "writes,other", r"p\.toml has no policy 'other' .*: writes, checks"),
    ],
)
def test_ambiguous_or_unknown_policies_are_refused_with_the_setting(
    text: str, policy: str | None, named: str
) -> None:
    with pytest.raises(TrainerError, match=named):
        chosen_policies(settings(policy=policy), parse_policies(text, "p.toml"))


def test_imported_adapter_goes_to_the_named_policy_despite_the_settings() -> None:
    table = parse_policies(FIXED + TWO, "p.toml")
    chosen = importing_policy(settings(policy="checks", recipe="r"), table, "writes")
    assert chosen == ChosenPolicy(policy="writes", base="qwen", recipe="ppo", known=BOTH)
    chosen = importing_policy(settings(policies=None, policy="m", recipe="r"), None, "n")
    assert chosen == ChosenPolicy(policy="n", base=None, recipe="r")


@pytest.mark.parametrize("name", ["rest", "other"])
def test_adapter_for_no_trained_policy_is_refused_with_the_trained_names(name: str) -> None:
    with pytest.raises(TrainerError, match=rf"p\.toml has no policy '{name}' .*: writes, checks"):
        importing_policy(settings(), parse_policies(FIXED + TWO, "p.toml"), name)


def test_adapter_goes_only_to_a_policy_of_the_named_tenant() -> None:
    owned = ONE + 'tenant = "a"\n' + OTHER + 'tenant = "b"\n' + '[[policy]]\nname = "p"\nbase = "m"'
    table = parse_policies(owned, "p.toml")
    for name, tenant in (("writes", "a"), ("plans", "b"), ("p", "default")):
        assert importing_policy(settings(), table, name, tenant).tenant == tenant
        assert importing_policy(settings(), table, name) == importing_policy(
            settings(), table, name, tenant
        )
        for other in {"a", "b", "default", "nobody"} - {tenant}:
            with pytest.raises(
                TrainerError, match=rf"no policy '{name}' of tenant '{other}'"
            ) as no:
                importing_policy(settings(), table, name, other)
            assert str(no.value).endswith(
                {"a": ": writes", "b": ": plans", "default": ": p", "nobody": ": none"}[other]
            )
    alone = settings(policies=None)
    assert importing_policy(alone, None, "m", "default") == importing_policy(alone, None, "m")
    with pytest.raises(TrainerError, match=r"without a file .*no policy 'm' of tenant 'a'"):
        importing_policy(alone, None, "m", "a")


@pytest.mark.parametrize(
    "options",
    ["mode = 'canary'\ncontrol_share = 0", "approve = true\ncontrol_share = 0", "tolerance = 0.1"],
)
def test_recipe_with_a_decision_or_control_is_refused_for_policies_that_go_live_together(
    tmp_path: Path, options: str
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(f"[publish]\n{options}")
    alone = ChosenPolicy(policy="writes", base="qwen", recipe=str(recipe))
    load_recipes([alone])
    together = ChosenPolicy(policy="writes", base="qwen", recipe=str(recipe), together=BOTH)
    with pytest.raises(TrainerError, match=r"'writes' has publish_with, .*: set mode ="):
        load_recipes([together])
