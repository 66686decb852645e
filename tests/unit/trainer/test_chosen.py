"""What a trainer trains: as the settings say, or as the file of policies does."""

from pathlib import Path
from typing import Any

import pytest

from store.policy_table import parse_policies
from trainer.chosen import Chosen, chosen_policy, importing_policy
from trainer.errors import TrainerError
from trainer.settings import TrainerSettings

FIXED = '[[policy]]\nname = "rest"\nbase = "qwen"\ntrained = false\n'
ONE = '[[policy]]\nname = "writes"\nbase = "qwen"\nrecipe = "single"\n'
TWO = ONE + '[[policy]]\nname = "checks"\nbase = "qwen"\n'


def settings(**values: Any) -> TrainerSettings:
    return TrainerSettings.model_validate({"policies": Path("p.toml")} | values)


def test_without_a_file_the_settings_say() -> None:
    chosen = chosen_policy(settings(policies=None, policy="m", recipe="r"), None)
    assert chosen == Chosen(policy="m", base=None, recipe="r")
    assert chosen_policy(settings(policies=None), None).policy is None


def test_the_only_trained_policy_of_a_file_need_not_be_named() -> None:
    chosen = chosen_policy(settings(), parse_policies(FIXED + ONE, "p.toml"))
    assert chosen == Chosen(policy="writes", base="qwen", recipe="single")


def test_of_several_one_is_named_and_a_recipe_that_the_file_leaves_out_is_the_settings() -> None:
    chosen = chosen_policy(settings(policy="checks", recipe="r"), parse_policies(TWO, "p.toml"))
    assert chosen == Chosen(policy="checks", base="qwen", recipe="r")


@pytest.mark.parametrize(
    ("text", "policy", "named"),
    [
        (TWO, None, r"p\.toml has 2 policies .*\(writes, checks\).* set PAWL_POLICY"),
        (FIXED, None, r"p\.toml has 0 policies with trained = true \(none\)"),
        (FIXED + ONE, "rest", r"PAWL_POLICY is 'rest', .*trained = true.*: writes"),
        (ONE, "other", r"PAWL_POLICY is 'other', which p\.toml does not have"),
    ],
)
def test_what_is_left_open_is_refused_with_what_to_set(
    text: str, policy: str | None, named: str
) -> None:
    with pytest.raises(TrainerError, match=named):
        chosen_policy(settings(policy=policy), parse_policies(text, "p.toml"))


def test_an_adapter_goes_to_a_policy_by_its_name_whatever_the_settings_train() -> None:
    table = parse_policies(FIXED + TWO, "p.toml")
    chosen = importing_policy(settings(policy="checks", recipe="r"), table, "writes")
    assert chosen == Chosen(policy="writes", base="qwen", recipe="single")
    chosen = importing_policy(settings(policies=None, policy="m", recipe="r"), None, "n")
    assert chosen == Chosen(policy="n", base=None, recipe="r")


@pytest.mark.parametrize("name", ["rest", "other"])
def test_an_adapter_for_no_trained_policy_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(TrainerError, match=rf"p\.toml has no policy '{name}' .*: writes, checks"):
        importing_policy(settings(), parse_policies(FIXED + TWO, "p.toml"), name)
