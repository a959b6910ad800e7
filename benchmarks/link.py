"""A loopback interface with the rate of a network link to one server.

Without a limit, a server on the same two cores competes with its client for processor time. With
the rate of a link between them, both have processor time to spare, as with the server on another
machine. Linux shapes the traffic that leaves an interface (tc-htb(8)); on the loopback interface
these are both directions. Traffic of a server to itself is not shaped. This needs root and a
separate network namespace.
"""

from __future__ import annotations

import socket
import subprocess

ROOM = "1mb"
"""The burst of the link: some of the interface's largest packets."""


def limit(port: int, mbit: int) -> None:
    """Give each direction between a server and its clients a rate.

    Args:
        port: The server's.
        mbit: The rate, in 1e6 bits a second.

    Raises:
        SystemExit: If other programs would share the interface.
    """
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        raise SystemExit("--link shapes the loopback interface: run this under `unshare --net`")
    _tc("qdisc add dev lo root handle 1: htb")  # packets without a filter pass unshaped
    for number, direction in enumerate(("dport", "sport"), 1):
        rate = f"rate {mbit}mbit ceil {mbit}mbit burst {ROOM} cburst {ROOM} quantum 200000"
        _tc(f"class add dev lo parent 1: classid 1:{number} htb {rate}")
        match = f"u32 match ip {direction} {port} 0xffff"
        _tc(f"filter add dev lo parent 1: protocol ip {match} flowid 1:{number}")


def up() -> None:
    """Start the loopback interface of a new network namespace."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _tc(arguments: str) -> None:
    subprocess.run(["tc", *arguments.split()], check=True)
