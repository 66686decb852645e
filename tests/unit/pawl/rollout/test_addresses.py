"""What a run is told: the proxy finds all names again in the address."""

from hypothesis import given
from hypothesis import strategies as st

from pawl.rollout.addresses import environment, named_url, shown
from proxy.routing import find_route

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)


@given(NAMES, NAMES, st.sampled_from([None, "train", "eval"]))
def test_the_proxy_reads_the_names_of_an_address(
    task: str, episode: str, split: str | None
) -> None:
    url = named_url("http://h:1", task=task, episode=episode, split=split)  # type: ignore[arg-type]
    route = find_route("POST", url.removeprefix("http://h:1") + "/v1/chat/completions")
    assert (route.task, route.episode, route.split) == (task, episode, split)


def told(given: dict[str, str], task: bytes = b"{}", model: str | None = None) -> dict[str, str]:
    names = {"TASK_ID": "t1"}
    return environment("http://h/task/t1", model=model, given=given, names=names, task=task)


def test_both_sdks_are_pointed_at_the_run() -> None:
    assert told({}) == {
        "OPENAI_BASE_URL": "http://h/task/t1/v1",
        "ANTHROPIC_BASE_URL": "http://h/task/t1",
        "OPENAI_API_KEY": "unused",
        "ANTHROPIC_API_KEY": "unused",
        "ROLLOUT_TASK_ID": "t1",
        "ROLLOUT_TASK": "{}",
    }
    assert told({}, model="m@3")["OPENAI_MODEL"] == told({}, model="m@3")["ANTHROPIC_MODEL"]


def test_keys_that_are_there_stay() -> None:
    kept = told({"OPENAI_API_KEY": "sk", "ANTHROPIC_AUTH_TOKEN": "t"})
    assert not {"OPENAI_API_KEY", "ANTHROPIC_API_KEY"} & kept.keys()


def test_a_task_that_no_variable_can_hold_is_left_out() -> None:
    assert "ROLLOUT_TASK" not in told({}, task=b"x" * 200_000)


def test_the_answer_is_not_shown() -> None:
    assert shown({"q": 1, "answer": 2}, {"answer"}) == {"q": 1}
    assert shown({"q": 1, "answer": 2, "how": 3}, {"answer", "how", "x"}) == {"q": 1}
    assert shown({"q": 1}, set()) == {"q": 1}
