"""Generate the Grafana dashboard from a list of its panels.

`make docs` (`python -m scripts.dashboard`) writes `dashboards/grafana/dashboards/pawl.json`, and
`tests/unit/deploy/test_dashboard_source.py` fails when the file and `panels.py` differ. Imports
are relative, because `scripts` is a folder of programs and not a package.
"""
