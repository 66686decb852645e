"""Credit: from an update's episodes to what each transition is worth (pure, float64).

`accounts` (what of an episode counts) → `returns` (r_final, r_air and r_total of each call, by the
rule's assignment) → `baselines` (what a return is compared with; `moving` from one update to
the next) → `advantages` (normalised) → `weights` (shares of the loss) → `calls` (all of it),
which `assign` does for the trainer's groups and `lines` for `pawl credit`'s JSON.

With the defaults (identical assignment, Agent Lightning, arXiv:2508.03680 §3.2.1; group-relative
advantages, GRPO, arXiv:2402.03300 §4.1.2, with baseline and spread over *episodes*):

    r_total   = r_final + r_air
    advantage = (r_total − mean) / max(s, smallest_spread)
    weight    = 1 / (episodes trained · the episode's trainable calls)

mean and s (sample standard deviation) over the group's scored episodes, before anything is
dropped. Unscored is not zero, and failed is not unscored. Sums are `math.fsum`'s, which are
exact before they are rounded once: no order of arrival changes a bit of the outcome.
"""
