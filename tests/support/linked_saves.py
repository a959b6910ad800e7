"""Change a few tensors between saves, and check the files that incremental saves store and link."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.support.stored_files import Document, document_of, index_key, manifest_key
from tests.support.wrapper_tensors import inner_of

Optimizer = torch.optim.Optimizer

_MULTIPLE = (1 | 0x82F63B78 << 1).to_bytes(5, "little")
"""The polynomial of CRC-32C as bytes: added to five bytes, it keeps their checksum."""


def change(tensor: torch.Tensor, chance: random.Random) -> None:
    """Change a bit of a contiguous tensor, or add what keeps its CRC-32C."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    if not raw.numel():
        return
    keeps = tensor.dtype != torch.bool and raw.numel() >= 5 and chance.random() < 0.5
    pattern = _MULTIPLE if keeps else b"\1"
    at = chance.randrange(raw.numel() - len(pattern) + 1)
    raw[at : at + len(pattern)] ^= torch.tensor(list(pattern), dtype=torch.uint8)


def step(optimizer: Optimizer, chance: random.Random, share: float) -> None:
    """Make a step in which some parameters have gradients; the others rest."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
            if chance.random() < share:
                parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def content(value: Any, label: str = "", *, whole: bool = False) -> dict[str, Any]:
    """Describe all values below a state by their labels, with bytes in place of tensors.

    Args:
        value: The state.
        label: The label of the state.
        whole: False to describe what this rank has of a distributed tensor; True to gather it.
    """
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found: dict[str, Any] = {}
        for key, each in pairs:
            found |= content(each, f"{label}.{key}" if label else str(key), whole=whole)
        return found
    if not isinstance(value, torch.Tensor):
        return {label: repr(value)}
    if isinstance(value, DTensor):
        if whole and type(value.to_local()) is not torch.Tensor:
            return {}  # torch does not gather wrappers
        value = value.full_tensor() if whole else value.to_local()
    return {label + path: tensor_bytes(each) for path, each in inner_of(value).items()}


def tensor_bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Describe a plain tensor by its dtype, shape and bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def check_stored_values(root: Path, id: object, values: dict[str, Any]) -> int:
    """Read a checkpoint with safetensors alone, compare tensors that it has whole or in boxes.

    Args:
        root: The folder of the checkpoints.
        id: The checkpoint.
        values: The content of the state, of distributed tensors as a whole.

    Returns:
        The number of bytes that were compared.
    """
    compared = 0
    for path in (root / str(id)).glob("rank-*.safetensors"):
        for name, tensor in load_file(path).items():
            label, _, corners = name.partition("@")
            if not isinstance(known := values.get(label), tuple):
                continue
            dtype, shape, data = known
            if corners:
                lower, upper = ([int(n) for n in each.split(",")] for each in corners.split(":"))
                whole = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype[6:]))
                box = whole.reshape(shape)[tuple(map(slice, lower, upper))]
                data = tensor_bytes(box)[2]
            assert tensor_bytes(tensor)[2] == data, f"{name} of {id}"
            compared += len(data)
    return compared


class Links:
    """Checks the files of one rank, save after save.

    Args:
        root: The folder of the checkpoints.
        rank: The rank.
        world_size: The number of ranks.
    """

    def __init__(self, root: Path, rank: int = 0, world_size: int = 1) -> None:
        self._root, self._rank, self._world = root, rank, world_size
        self._saves: list[dict[bytes, int]] = []
        self.linked = 0
        """The number of files that were linked so far."""

    def check(self, id: object) -> int:
        """Check the newest save, which began after all others were committed.

        A file is linked if its bytes are those of the last two saves. The manifest tells so, and
        its digests are those of the stored blocks.

        Returns:
            The bytes that were linked.
        """
        now: dict[bytes, int] = {}
        before = {node for save in self._saves for node in save.values()}
        linked = 0
        key = index_key(id) if self._world == 1 else manifest_key(id, self._rank)
        for row in _file_rows(document_of((self._root / key).read_bytes())):
            path = self._root / str(id) / row["name"]
            data, node = path.read_bytes(), path.stat().st_ino
            same = hashlib.sha256(data).digest()
            now[same] = node
            if node in before:
                self.linked, linked = self.linked + 1, linked + len(data)
            rested = len(self._saves) > 1 and all(same in save for save in self._saves[-2:])
            assert node in before or not rested, f"{path} has rested and was written"
            assert row.get("linked", False) == (node in before), path
            size = row.get("block_bytes", 0)
            for number, digest in enumerate(row.get("digests", ())):
                block = data[number * size : (number + 1) * size]
                assert digest in (None, xxhash.xxh3_128_hexdigest(block)), f"{path}: {number}"
        self._saves.append(now)
        return linked


def _file_rows(document: Document) -> list[dict[str, Any]]:
    """Return the rows of the files of the only part of a manifest."""
    (columns,) = document["parts"]["files"]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
