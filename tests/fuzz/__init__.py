"""Any bytes through each reader of foreign bytes: no unexpected exception.

Each module states one property. `make test` tries some hundred examples of each, the same ones
every time. The long run tries 50,000 of each, other ones every time:

    make test ARGS="tests/fuzz --hypothesis-profile=long"

A failure prints the smallest input that was found, and how to run it again. The two properties
that need a PostgreSQL of their own hold many records in each example; those of `ports` need a
proxy, and an example is what a client sends on one connection.
"""
