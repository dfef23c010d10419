"""A way in through somebody else's hivemind DHT: optional, off by default, and kept at arm's length.

`child` is the only module that imports hivemind, in a process of its own (`bridge` drives it, `messages` is what the
two say to each other). `entries` are our own signed records, which is all that is believed; `rendezvous` turns them
into contacts that the node then meets over its own connections.
"""
