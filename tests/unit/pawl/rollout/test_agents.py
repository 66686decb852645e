"""What a run is given: its variables, and an address in which the proxy finds all names again."""

from hypothesis import given
from hypothesis import strategies as st

from pawl.rollout.agents import environment, named_url
from proxy.routing import find_route

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)


@given(NAMES, NAMES, st.sampled_from([None, "train", "eval"]))
def test_the_proxy_reads_the_names_of_an_address(
    task: str, episode: str, split: str | None
) -> None:
    url = named_url("http://h:1", task=task, episode=episode, split=split)  # type: ignore[arg-type]
    route = find_route("POST", url.removeprefix("http://h:1") + "/v1/chat/completions")
    assert (route.task, route.episode, route.split) == (task, episode, split)


def variables(
    given: dict[str, str], task: bytes = b"{}", model: str | None = None
) -> dict[str, str]:
    names = {"TASK_ID": "t1"}
    return environment("http://h/task/t1", model=model, given=given, names=names, task=task)


def test_both_sdks_are_pointed_at_the_run() -> None:
    assert variables({}) == {
        "OPENAI_BASE_URL": "http://h/task/t1/v1",
        "ANTHROPIC_BASE_URL": "http://h/task/t1",
        "OPENAI_API_KEY": "unused",
        "ANTHROPIC_API_KEY": "unused",
        "ROLLOUT_TASK_ID": "t1",
        "ROLLOUT_TASK": "{}",
    }
    named = variables({}, model="m@3")
    assert named["OPENAI_MODEL"] == named["ANTHROPIC_MODEL"] == "m@3"


def test_api_keys_of_the_environment_stay() -> None:
    kept = variables({"OPENAI_API_KEY": "sk", "ANTHROPIC_AUTH_TOKEN": "t"})
    assert not {"OPENAI_API_KEY", "ANTHROPIC_API_KEY"} & kept.keys()


def test_task_that_no_variable_can_hold_is_left_out() -> None:
    assert "ROLLOUT_TASK" not in variables({}, task=b"x" * 200_000)
