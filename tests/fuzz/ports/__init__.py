"""Any request to both ports of a real proxy that asks for keys, before a strict model server.

`make test` sends some hundred requests of each kind, the same ones every time; the long run of
`tests/fuzz` sends 50,000 of each.
"""
