"""Folders of other programs, which are easily taken for a root of ckpipe."""

from __future__ import annotations

from collections.abc import Iterable

from ckpipe.backend import Backend


async def said_of_foreign(backend: Backend) -> str | None:
    """Say what a root without checkpoints is, if it is a folder that another program wrote.

    Raises:
        StoreError: If the store failed.
    """
    return _said(each.key for each in (await backend.children("")).objects)


def _said(names: Iterable[str]) -> str | None:
    found = set(names)
    if any(name.endswith(".distcp") for name in found):
        return (
            "this is a checkpoint of torch.distributed.checkpoint (DCP), which "
            "torch.distributed.checkpoint.load reads"
        )
    if "config.json" in found or any(
        name.endswith((".safetensors", ".safetensors.index.json", ".bin.index.json"))
        or (name.startswith("pytorch_model") and name.endswith(".bin"))
        for name in found
    ):
        return (
            "this is a folder of Hugging Face weights, which from_pretrained or "
            "safetensors.torch.load_file reads"
        )
    return None


__all__ = ["said_of_foreign"]
