"""Measurements that back the figures in the documents; each module runs with `python -m`."""
