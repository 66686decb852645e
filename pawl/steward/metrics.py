"""Define the steward's Prometheus metrics, served at `/metrics`."""

from prometheus_client import Counter, Gauge

REPLICA_UP = Gauge(
    "pawl_steward_replica_up", "1 while a replica of the model server answers.", ["replica"]
)
MISSING = Gauge(
    "pawl_steward_missing_adapters",
    "Servable versions that a replica that answers does not have loaded.",
    ["replica"],
)
LOADS = Counter(
    "pawl_steward_loads_total",
    "Tries to load an adapter that a replica lacked or had with other files, by outcome.",
    ["replica", "outcome"],
)
STORE_UP = Gauge("pawl_steward_database_up", "1 while the steward reads the database.")
