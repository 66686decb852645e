"""Divide differences from a baseline: one rule in each module, named as the module is.

A module that defines `NORMALISATION` is a normalisation that recipes may name (`registry`).
"""
