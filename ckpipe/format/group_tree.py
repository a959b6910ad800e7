"""The arithmetic of the tree in which manifests are merged into one index.

Level 0 holds the manifests, a hundred to a directory. When a directory is full, its members are
merged into one object of the next level, unless it is the only one of its level: then they are
merged into the index. So no rank ever lists more than a hundred names at a time, or more than a
few directories in a save.
"""

from __future__ import annotations

from collections.abc import Collection

from ckpipe.format.object_names import GROUP_SIZE, member_key
from ckpipe.types import CheckpointId


def level_sizes(world_size: int) -> tuple[int, ...]:
    """How many objects each level has when it is full; the last one fits into one directory."""
    sizes = [world_size]
    while sizes[-1] > GROUP_SIZE:
        sizes.append(-(-sizes[-1] // GROUP_SIZE))
    return tuple(sizes)


def members(level: int, directory: int, world_size: int) -> range:
    """The numbers of the objects that a directory holds when it is full; at level 0, the ranks."""
    size = level_sizes(world_size)[level]
    return range(directory * GROUP_SIZE, min((directory + 1) * GROUP_SIZE, size))


def merged_into(level: int, directory: int, world_size: int) -> tuple[int, int] | None:
    """What a full directory is merged into.

    Returns:
        Level and number of a group object, whose own directory is ``number // GROUP_SIZE``;
        None for the index.
    """
    top = len(level_sizes(world_size)) - 1
    return None if level == top else (level + 1, directory)


def group_ranks(level: int, number: int, world_size: int) -> range:
    """The ranks whose manifests a group object holds; empty if there is no such group."""
    sizes = level_sizes(world_size)
    if not 0 < level < len(sizes) or not 0 <= number < sizes[level]:
        return range(0)
    span = GROUP_SIZE**level
    return range(number * span, min((number + 1) * span, world_size))


def absent_members(
    id: CheckpointId, level: int, directory: int, world_size: int, keys: Collection[str]
) -> list[int]:
    """The numbers of the objects that a directory lacks, by a list of its keys.

    Args:
        id: The checkpoint.
        level: The level of the directory.
        directory: Its number.
        world_size: How many ranks there are.
        keys: What was listed; other names are left alone.
    """
    everyone = members(level, directory, world_size)
    return [number for number in everyone if member_key(id, level, number) not in keys]
