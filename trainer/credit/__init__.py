"""Assign credit: say what each transition of an update is worth (pure, float64).

`assign` runs the steps: `returns` (r_final and `air` of each call, by the recipe's `assignment`),
`advantages` (differences from one of the `baselines`, scaled), and each call's share of the loss.
`lines` does the same to exported JSON, for `pawl credit`.

The default recipe is identical assignment (each call of an episode gets the episode's
return; Agent Lightning, arXiv:2508.03680 §3.3.2) with group-relative advantages (GRPO,
arXiv:2402.03300 §4.1.2). Mean and spread are taken over *episodes*, not over calls:

    advantage = (r_final − mean r_final) / max(s, SMALLEST_SPREAD)
              + (r_air − mean r_air) / max(s, AIR_SPREAD)
    weight    = 1 / (trained episodes · trainable calls of the episode)

The means, and s (sample standard deviation of r_final), are those of the group's scored episodes,
computed before anything is dropped. An unscored episode is not one with reward 0, and a failed
episode is not an unscored one. Sums use `math.fsum`, which is exact before it rounds once,
so that no order of arrival changes a bit of the result.
"""
