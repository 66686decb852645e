"""The trainer killed in mid-update, again and again: does it end where an undisturbed one ends?"""
