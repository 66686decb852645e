"""What the drain says of itself: since when it has been stuck, whatever else happens meanwhile."""

from proxy.ingester.drain import Progress


def test_how_long_it_is_stuck_goes_on_through_an_outage_until_all_moves() -> None:
    now = 100.0
    progress = Progress(lambda: now)
    assert (progress.state, progress.stuck_s) == ("moving", 0.0)
    now = 110.0
    progress.note("stuck", "held")
    now = 115.0
    progress.note("stuck", "held")
    assert (progress.stuck_s, progress.told()["for_s"]) == (5.0, 5.0)
    # PostgreSQL goes away, and comes back: the record has been held all the time.
    progress.note("waiting", "away")
    now = 120.0
    assert (progress.stuck_s, progress.told()["for_s"]) == (0.0, 5.0)
    progress.note("stuck", "held")
    assert (progress.stuck_s, progress.told()["for_s"]) == (10.0, 10.0)
    progress.note("moving")
    now = 130.0
    assert (progress.stuck_s, progress.told()["for_s"]) == (0.0, 10.0)
    progress.note("stuck", "another")
    now = 131.0
    assert progress.stuck_s == 1.0
