"""Assign credit: say what each transition of an update is worth (pure, float64).

The steps, in the order in which they run:

1. `accounts`: what of an episode counts for credit.
2. `returns`: r_final, r_air and r_total of each call, by the recipe's `assignment`.
3. `baselines`: what a return is compared with; `moving` carries one from update to update.
4. `advantages`: differences from the baseline, scaled by the recipe's `normalisations`.
5. `weights`: each call's share of the loss.
6. `calls`: all of the above for the episodes of an update.

`assign` runs them on the store's groups for the trainer; `lines` runs the same functions on
exported JSON for `pawl credit`.

The default recipe is identical assignment (each call of an episode gets the episode's
return; Agent Lightning, arXiv:2508.03680 §3.3.2) with group-relative advantages (GRPO,
arXiv:2402.03300 §4.1.2). Mean and spread are taken over *episodes*, not over calls:

    advantage = (r_final − mean r_final) / max(s, smallest_spread)
              + (r_air − mean r_air) / max(s, air_spread)
    weight    = 1 / (trained episodes · trainable calls of the episode)

The means, and s (sample standard deviation of r_final), are those of the group's scored episodes,
computed before anything is dropped. An unscored episode is not one with reward 0, and a failed
episode is not an unscored one. Sums use `math.fsum`, which is exact before it rounds once,
so that no order of arrival changes a bit of the result.
"""
