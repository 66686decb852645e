"""Define the controller's Prometheus metrics, served at `/metrics`."""

from prometheus_client import Counter, Gauge

REPLICA_UP = Gauge(
    "pawl_controller_replica_up", "1 while a replica of the model server answers.", ["replica"]
)
MISSING_ADAPTERS = Gauge(
    "pawl_controller_missing_adapters",
    "Servable versions that a replica that answers does not have loaded.",
    ["replica"],
)
ADAPTER_LOADS = Counter(
    "pawl_controller_loads_total",
    "Tries to load an adapter that a replica lacked or had with other files: `loaded`, `replaced`"
    " (it had other files), `refused`, `altered` (the files have changed since they were written),"
    " `unread` (they cannot be read or fetched for now) or `misserved` (the replica applied"
    " it differently from the trainer).",
    ["replica", "outcome"],
)
ALTERED_ADAPTERS = Gauge(
    "pawl_controller_altered_adapters",
    "Servable versions that are not loaded as their files are not those that were written.",
    ["version"],
)
MISSERVED_ADAPTERS = Gauge(
    "pawl_controller_misserved_adapters",
    "Servable versions unloaded from a replica that applied them differently from the trainer.",
    ["replica", "version"],
)
PROBE_DIFFERENCE = Gauge(
    "pawl_update_probe_difference",
    "Mean |served − trainer| log-probability of the last version that was loaded.",
    ["policy"],
)
DATABASE_UP = Gauge("pawl_controller_database_up", "1 while the controller reads the database.")
GATE_MOVES = Counter(
    "pawl_controller_gate_moves_total",
    "Versions that the gate gave another state, by what they became.",
    ["policy", "to"],
)
GATE_DIFFERENCE_BOUND = Gauge(
    "pawl_controller_gate_bound",
    "Bounds of the difference of mean rewards, new version less old: canary less serving version"
    " (`trial`), or serving version less control (`watch`).",
    ["policy", "compared", "bound"],
)
GATE_EPISODES = Gauge(
    "pawl_controller_gate_episodes",
    "Episodes that a comparison rests on, of the new and of the old version.",
    ["policy", "compared", "version"],
)
GATE_WATCHED = Gauge(
    "pawl_controller_gate_watched",
    "0 while a trained version serves without a control that it could be rolled back to, as an"
    " operator moved the traffic. Else 1, also where `publish.control_share` is 0.",
    ["policy"],
)
GATE_FROZEN = Gauge(
    "pawl_controller_gate_frozen", "1 while only operators move a policy's traffic.", ["policy"]
)
GATE_FAILED = Gauge(
    "pawl_controller_gate_failed",
    "1 while a policy's versions cannot be judged, or not in the time of a look.",
    ["policy"],
)
