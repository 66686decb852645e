"""The delivery probe: right, off, or the old version under a new name."""

from trainer.publishing.probe import compare, rejection_reason

TRAINED = [[-1.0, -2.0], [-3.0]]
BEFORE = [[-1.5, -2.5], [-3.5]]


def test_the_right_adapter_passes() -> None:
    probe = compare(TRAINED, TRAINED, BEFORE)
    assert (probe.mean_difference, probe.moved, probe.tokens) == (0.0, 0.5, 3)
    assert rejection_reason(probe, 0.01) is None


def test_the_old_version_under_the_new_name_is_found() -> None:
    assert rejection_reason(compare(BEFORE, TRAINED, BEFORE), 0.01) is not None
    assert rejection_reason(compare(TRAINED, TRAINED, TRAINED), 0.01) is not None


def test_nan_is_wrong() -> None:
    nan = [[float("nan"), -2.0], [-3.0]]
    assert rejection_reason(compare(nan, TRAINED, BEFORE), 0.01) is not None
