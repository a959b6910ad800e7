"""Simulated worlds of any number of ranks: their tensors, plans and commits, without bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ckpipe.format.checksum import chunk_count
from ckpipe.format.manifest import ManifestDocument, RankManifest
from ckpipe.format.tree import Node
from ckpipe.planning import Captured, LocalPlanner, RankPlan
from ckpipe.state.flatten import structure_of
from ckpipe.state.placements import Mesh, Placement, Sharding, sharding
from ckpipe.state.tensors import TensorLeaf
from ckpipe.types import CheckpointId

ID = CheckpointId("20261121T034205123Z-scale", 1000, 0)


@dataclass(frozen=True)
class World:
    """Ranks that hold tensors cut in blocks of rows, and several replicas of them or one.

    Args:
        ranks: The number of ranks.
        tensors: The number of tensors of the state.
        replicas: The number of ranks that hold each shard.
    """

    ranks: int
    tensors: int
    replicas: int = 1

    @cached_property
    def shardings(self) -> list[Sharding]:
        """Lay out each tensor on the ranks, with shapes as different as those of a model."""
        shards = self.ranks // self.replicas
        mesh = Mesh((self.replicas, shards), tuple(range(self.ranks)))
        cut = (Placement(), Placement(0))
        return [
            sharding(mesh, cut, ((1 + n % 7) * shards, 16 * (1 + n % 11)))
            for n in range(self.tensors)
        ]

    def labels(self) -> list[str]:
        """Make the labels of the tensors, named like those of a model."""
        return [f"model.layers.{n // 8}.block.{n % 8}.weight" for n in range(self.tensors)]

    def captured(self, rank: int) -> Captured:
        """Make the result of the walk on a rank."""
        leaves, address = [], 1 << 20
        for label, spread in zip(self.labels(), self.shardings, strict=True):
            local = spread.local_shape(rank) or (0,)
            data = torch.empty(local, dtype=torch.float32, device="meta")
            leaves.append(
                TensorLeaf(
                    label, "float32", local, data.stride(), "cpu", "tensor", None, False,
                    "", address, data.nbytes, data.nbytes, True, None, spread,
                )
            )  # fmt: skip
            address += data.nbytes + 64
        nodes = [Node("tensor", number) for number in range(self.tensors)]
        return Captured(Node("dict", None, self.labels(), nodes), leaves, [])

    def plan(self, rank: int) -> RankPlan:
        """Plan a rank from scratch."""
        return LocalPlanner().plan(self.captured(rank), rank=rank, world_size=self.ranks)

    def manifest(self, rank: int) -> ManifestDocument:
        """Make the manifest of a rank, with checksums as random as those of real bytes."""
        captured = self.captured(rank)
        plan = LocalPlanner().plan(captured, rank=rank, world_size=self.ranks)
        count = sum(chunk_count(entry.nbytes) for entry in plan.layout.entries)
        part = RankManifest(
            rank=rank, structure=0, layout=0, values=(),
            files=tuple(file.row for file in plan.files),
            checksums=tuple(_sums(rank + self.ranks, count)), token=f"{rank:032x}",
            started="2026-11-21T03:42:05.123+00:00", writer={"ckpipe": "0.1.0"},
        )  # fmt: skip
        structures = (structure_of(captured),)
        return ManifestDocument("manifest", ID, self.ranks, structures, (plan.layout,), (part,))


def _sums(seed: int, count: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: Iterable[int] = torch.randint(0, 1 << 32, (count,), generator=generator).tolist()
    return iter(drawn)


def shard_count(document: ManifestDocument) -> int:
    """Count the shards in the parts of a document."""
    sizes = [len(layout.chunks) for layout in document.layouts]
    return sum(sizes[part.layout] for part in document.parts)


def near(ranks: int, samples: int) -> list[int]:
    """Choose ranks from the whole world, including the first and the last."""
    count = min(ranks, samples)
    return sorted({math.floor(n * (ranks - 1) / max(1, count - 1)) for n in range(count)})
