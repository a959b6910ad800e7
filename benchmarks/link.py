"""A loopback interface on which one server is as far away as a network link makes it.

What a server on the same two cores takes from its client is no link's doing. With the rate of one
between them, both have processor time to spare, as where the server is another machine. Linux
shapes what leaves an interface (tc-htb(8)); of the loopback interface that is both directions. What
a server says to itself passes by. It takes root and a network namespace of one's own.
"""

from __future__ import annotations

import socket
import subprocess

ROOM = "1mb"
"""How far a link may be ahead of its rate: some of the interface's largest packets."""


def limit(port: int, mbit: int) -> None:
    """Give each direction between a server and its clients a rate.

    Args:
        port: The server's.
        mbit: The rate, in 1e6 bits a second.

    Raises:
        SystemExit: If others would share the interface.
    """
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        raise SystemExit("--link shapes the loopback interface: run this under `unshare --net`")
    _tc("qdisc add dev lo root handle 1: htb")  # what no filter names passes unshaped
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
