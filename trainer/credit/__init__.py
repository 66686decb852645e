"""Assign credit: say what each transition of an update is worth (pure, float64).

`assign` runs the steps: `returns` (r_final and `air` of each call, by the recipe's `assignment`),
`advantages` (differences from one of the `baselines`, scaled), and each call's share of the loss.
`lines` does the same to exported JSON, for `pawl credit`.

The default recipe is identical assignment (each call of an episode gets the episode's return) with
group-relative advantages (GRPO). Mean and spread are taken over *episodes*, not over calls: they
are those of the group's scored episodes, computed before anything is dropped. An unscored episode
is not one with reward 0, and a failed episode is not an unscored one. Sums use `math.fsum`, which
is exact before it rounds once, so that no order of arrival changes a bit of the result.
"""
