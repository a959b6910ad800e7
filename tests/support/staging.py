"""Staging memory as the system shows it."""

from __future__ import annotations

from pathlib import Path


def staging_memory() -> set[str]:
    """Find the mapped ranges of addresses that forked processes do not get.

    Staging memory is such; nothing else in a process of tests is.
    """
    found, address = set(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            address = name
        elif name == "VmFlags:" and "dc" in values:
            found.add(address)
    return found
