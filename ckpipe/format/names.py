"""Names of the objects below a root, as ``docs/format.md`` defines them, and the merge tree.

All names are relative to the root and use ``/``. No object is ever overwritten.

The merge tree: level 0 holds the manifests, a hundred in a directory. When a directory is full, its
members are merged into one object of the next level. If the directory is the only one of its level,
they are merged into the index. So no rank ever lists more than a hundred names at a time, or more
than a few directories in a save.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

from ckpipe.types import CheckpointId

GROUP_SIZE = 100
"""Number of objects of one level of ``m/`` that share a directory and are merged into one."""

INTERNAL = ".ckpipe/"
"""The prefix of ckpipe's objects other than checkpoints."""

ATTEMPTS, DELETED = f"{INTERNAL}attempts/", f"{INTERNAL}deleted/"
LEASES, PINS = f"{INTERNAL}leases/", f"{INTERNAL}pins/"

REMOVED = f"{INTERNAL}removed/"
"""The prefix of marks: ``.ckpipe/removed/ID`` says that a trainer has removed a checkpoint."""

SUMMARIES = f"{INTERNAL}digests/"
"""The prefix of the summaries of checkpoints."""

_SUMMARY = re.compile(re.escape(SUMMARIES) + r"([^/.]+\.[^/.]+\.[^/.]+)\.[^/]+")

BENCH = f"{INTERNAL}bench/"
"""The prefix of the objects that a benchmark of the store writes, and removes when it ends."""

_OWN = re.compile(
    r"rank-(?:\d{5}|[1-9]\d{5,})(?:\.[1-9]\d*)?\.safetensors"
    r"|m/0/(?:\d{3}|[1-9]\d{3,})/rank-(?:\d{5}|[1-9]\d{5,})\.json"
    r"|m/[1-9]\d*/(?:\d{3}|[1-9]\d{3,})/group-(?:\d{5}|[1-9]\d{5,})\.json",
    re.ASCII,
)

LONGEST_NAME = 255
"""The most bytes of one name in a key: the shortest limit of common file systems."""


def index_key(id: CheckpointId) -> str:
    """Return the index key: a checkpoint with an index and without a tombstone is complete."""
    return f"{id}.json"


def prefix(id: CheckpointId) -> str:
    """Return the prefix of all other objects of a checkpoint."""
    return f"{id}/"


def data_file_name(rank: int, number: int) -> str:
    """Return the name of a rank's data file below the checkpoint's prefix; ``number`` from 0."""
    tail = f".{number}" if number else ""
    return f"rank-{rank:05d}{tail}.safetensors"


def directory(id: CheckpointId, level: int, number: int) -> str:
    """Return the prefix that the members of one group share; a list of it tells if it is full."""
    return f"{prefix(id)}m/{level}/{number:03d}/"


def manifest_key(id: CheckpointId, rank: int) -> str:
    """Return the key of a rank's manifest, which commits the rank's save."""
    return f"{directory(id, 0, rank // GROUP_SIZE)}rank-{rank:05d}.json"


def group_key(id: CheckpointId, level: int, number: int) -> str:
    """Return the key of a group object; the groups of manifests have level 1."""
    return f"{directory(id, level, number // GROUP_SIZE)}group-{number:05d}.json"


def member_key(id: CheckpointId, level: int, number: int) -> str:
    """Return the key of a manifest at level 0, of a group object above."""
    return group_key(id, level, number) if level else manifest_key(id, number)


def is_own(id: CheckpointId, key: str) -> bool:
    """Tell whether these rules can make a key below a checkpoint's prefix."""
    return _OWN.fullmatch(key.removeprefix(prefix(id))) is not None


def tombstone_key(id: CheckpointId) -> str:
    """Return the key of a checkpoint's tombstone, which makes it deleted."""
    return f"{DELETED}{id}"


def pin_key(id: CheckpointId) -> str:
    """Return the key of a checkpoint's pin, which protects it from retention."""
    return f"{PINS}{id}"


def claim_key(attempt_id: str, rank: int) -> str:
    """Return the key of a rank's claim: created before its first save, so no id is used twice."""
    return f"{ATTEMPTS}{attempt_id}/claim-{rank:05d}"


def attempt_start_key(attempt_id: str) -> str:
    """Return the key of the object that fixes the start time of an attempt for all its ranks."""
    return f"{ATTEMPTS}{attempt_id}/start"


def agreement_key(attempt: str, question: str) -> str:
    """Return the key of the object with the decision of an attempt's ranks on a question.

    Args:
        attempt: The name of the attempt, which begins with its start.
        question: The name of the question, of letters, digits, ``.``, ``_`` and ``-``.
    """
    return f"{ATTEMPTS}{launch_id(attempt)}/agreed/{question}"


def votes_prefix(attempt: str, question: str) -> str:
    """Return the prefix of the votes of an attempt's ranks on a question."""
    return f"{agreement_key(attempt, question)}.votes/"


def summary_key(id: CheckpointId) -> str:
    """Return the key of a checkpoint's summary."""
    return f"{SUMMARIES}{id}.json"


def summary_id(key: str) -> CheckpointId | None:
    """Return the checkpoint whose summary, of any version, has this key; None if it is none."""
    match = _SUMMARY.fullmatch(key)
    return None if match is None else _parse(match[1])


def launch_id(attempt: str) -> str:
    """Return the id of the launch in the name of an attempt."""
    return attempt.partition("Z-")[2]


SHORT_NAME = re.compile(r"([0-9]{1,18})\.([0-9A-Za-z_-]{1,64})(?:\.([0-9]{1,18}))?")
"""A short name of a checkpoint: step, beginning of the launch's id, and count if there is one."""

_SHORTEST = 4


def short_names(ids: Collection[CheckpointId]) -> dict[str, str]:
    """Shorten ids to names that are unique among them: ``500.9f3a``.

    The count follows if the launch saved the step several times: ``500.9f3a.1``.
    """
    launches = {launch_id(each.attempt) for each in ids}
    sizes = range(_SHORTEST, 64)
    size = next((n for n in sizes if len({each[:n] for each in launches}) == len(launches)), 64)
    saves = Counter((each.attempt, each.step) for each in ids)
    short = {each: f"{each.step}.{launch_id(each.attempt)[:size]}" for each in ids}
    repeated = [each for each in ids if saves[each.attempt, each.step] > 1]
    short |= {each: f"{short[each]}.{each.count}" for each in repeated}
    uses = Counter(short.values())
    return {str(each): name if uses[name] == 1 else str(each) for each, name in short.items()}


def lease_key(subject: CheckpointId | str, holder: str, renewal: int = 0) -> str:
    """Return the key of a lease on a checkpoint or an attempt; each renewal is another object.

    Args:
        subject: The checkpoint that is being read, or the id of the attempt that is running.
        holder: The random id of the lease's holder, of letters, digits, ``_`` and ``-``.
        renewal: The number of earlier renewals.
    """
    return f"{LEASES}{subject}/{holder}.{renewal}"


def index_id(key: str) -> CheckpointId | None:
    """Return the checkpoint whose index has this key; None if it is no index."""
    stem = key.removesuffix(".json")
    return None if stem == key else _parse(stem)


def tombstone_id(key: str) -> CheckpointId | None:
    """Return the checkpoint whose tombstone has this key; None if it is no tombstone."""
    stem = key.removeprefix(DELETED)
    return None if stem == key else _parse(stem)


def pin_id(key: str) -> CheckpointId | None:
    """Return the checkpoint whose pin has this key; None if it is no pin."""
    stem = key.removeprefix(PINS)
    return None if stem == key else _parse(stem)


def _parse(name: str) -> CheckpointId | None:
    return CheckpointId.parse(name) if len(name) <= LONGEST_NAME and name.isascii() else None


def level_sizes(world_size: int) -> tuple[int, ...]:
    """Return the sizes of the levels when full; the last level fits into one directory."""
    sizes = [world_size]
    while sizes[-1] > GROUP_SIZE:
        sizes.append(-(-sizes[-1] // GROUP_SIZE))
    return tuple(sizes)


def all_members(world_size: int) -> list[tuple[int, int]]:
    """Return the level and number of each manifest and group object."""
    if world_size == 1:
        return []  # the index takes the manifest's place
    sizes = enumerate(level_sizes(world_size))
    return [(level, number) for level, size in sizes for number in range(size)]


_MEMBER = re.compile(r"m/(\d+)/\d+/(?:rank|group)-(\d+)\.json", re.ASCII)


def member_of(id: CheckpointId, key: str) -> tuple[int, int] | None:
    """Return the level and number of the manifest or group object with this key, or None."""
    match = _MEMBER.fullmatch(key.removeprefix(prefix(id))) if is_own(id, key) else None
    return None if match is None else (int(match[1]), int(match[2]))


def members(level: int, directory: int, world_size: int) -> range:
    """Return the numbers of the objects of a full directory; at level 0, the ranks."""
    size = level_sizes(world_size)[level]
    return range(directory * GROUP_SIZE, min((directory + 1) * GROUP_SIZE, size))


def merged_into(level: int, directory: int, world_size: int) -> tuple[int, int] | None:
    """Return the object that a full directory is merged into.

    Returns:
        Level and number of a group object, whose own directory is ``number // GROUP_SIZE``;
        None for the index.
    """
    top = len(level_sizes(world_size)) - 1
    return None if level == top else (level + 1, directory)


def group_ranks(level: int, number: int, world_size: int) -> range:
    """Return the ranks whose manifests a group object holds; empty if there is no such group."""
    sizes = level_sizes(world_size)
    if not 0 < level < len(sizes) or not 0 <= number < sizes[level]:
        return range(0)
    span = GROUP_SIZE**level
    return range(number * span, min((number + 1) * span, world_size))


def absent_members(
    id: CheckpointId, level: int, directory: int, world_size: int, keys: Collection[str]
) -> list[int]:
    """Return the numbers of the objects that a directory lacks, by a list of its keys.

    Args:
        id: The checkpoint.
        level: The level of the directory.
        directory: Its number.
        world_size: The number of ranks.
        keys: The listed keys; unknown names are ignored.
    """
    everyone = members(level, directory, world_size)
    return [number for number in everyone if member_key(id, level, number) not in keys]
