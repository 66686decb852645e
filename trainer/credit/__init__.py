"""Assign credit: say what each transition of an update is worth (pure, float64).

`assign` runs the steps: `returns` (r_final and `air` of each call, by the recipe's `assignment`),
`advantages` (differences from one of the `baselines`, scaled), and each call's share of the loss.
`lines` assigns credit to exported episodes, for `pawl credit`.

The default recipe uses identical assignment (each call gets the return of its episode) and
group-relative advantages (GRPO). Mean and spread are taken over the group's scored *episodes*, not
over calls, and before any episode is dropped. An unscored episode is left out; it does not count as
reward 0. By default a failed episode gets the lowest reward. Sums use `math.fsum`, which rounds
only once, so that the order of arrival does not change a bit of the result.
"""
