"""Kill the trainer in mid-update, again and again: does it end as an undisturbed one ends?"""
