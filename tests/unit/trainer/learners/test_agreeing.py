"""Several processes agree on how a command ended, from what each says of itself."""

from typing import Any

import pytest

from trainer.errors import LearnerError, ShortOfMemory
from trainer.learners.distributed import check_all_succeeded


class OtherProcesses:
    """Stands in for a learner and its processes: what others said, and what was done."""

    def __init__(self, *others: tuple[str, bool] | None) -> None:
        self.processes = self
        self.others = others
        self.said: Any = "nothing"
        self.has_let_go = False

    def gather(self, own: Any) -> list[Any]:
        self.said = own
        return [own, *self.others]

    def regroup(self, own: Exception | None) -> None:
        """There are no other processes that would wait."""

    def forget_model(self) -> None:
        self.has_let_go = True


def test_trainer_processes_go_on_if_all_succeeded() -> None:
    learner: Any = OtherProcesses(None, None)
    check_all_succeeded(learner, None)
    assert (learner.said, learner.has_let_go) == (None, False)


@pytest.mark.parametrize(("is_short", "kind"), [(True, ShortOfMemory), (False, LearnerError)])
def test_failure_of_another_trainer_process_is_raised_in_this_process(
    is_short: bool, kind: type[LearnerError]
) -> None:
    learner: Any = OtherProcesses(None, ("no room", is_short))
    with pytest.raises(LearnerError, match="another process failed: no room") as raised:
        check_all_succeeded(learner, None)
    assert type(raised.value) is kind
    assert learner.has_let_go


def test_own_failure_of_a_trainer_process_is_passed_on_to_the_others() -> None:
    learner: Any = OtherProcesses(("no room", True))
    check_all_succeeded(learner, ShortOfMemory("no room here"))
    assert (learner.said, learner.has_let_go) == (("no room here", True), False)


def test_disk_error_of_a_trainer_process_does_not_fail_the_others() -> None:
    """What was trained is written again, and goes on from there."""
    learner: Any = OtherProcesses(None)
    check_all_succeeded(learner, OSError("No space left on device"))
    assert learner.said is None
