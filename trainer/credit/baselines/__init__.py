"""Compute what a return is compared with: one baseline in each module, named as the module is.

A module that defines `BASELINE` is a baseline that recipes may name (`registry`).
"""
