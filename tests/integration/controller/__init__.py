"""The controller: which versions the servers have, and which of them has the traffic."""
