"""Tell connections of this machine from those of others (pure)."""

from ipaddress import IPv6Address, ip_address
from typing import Any


def is_loopback(peer: Any) -> bool:
    """Return whether a connection's other end is this machine.

    `peer` is the transport's `peername`: a pair or more, of which the first is an address. What is
    not such an address counts as another machine.
    """
    if not isinstance(peer, tuple) or not peer:
        return False
    try:
        # An address may name its interface: fe80::1%eth0.
        address = ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
