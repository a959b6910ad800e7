"""Wrapper tensors: subclasses that keep their values in other tensors.

Theory. A class with ``__tensor_flatten__`` and ``__tensor_unflatten__`` tells the names of its
inner tensors and a context, and makes a tensor of them again; torch's compiler relies on both. So
quantised weights, float8 and low-bit optimizer state are saved as a node that has the class, the
context and the outer facts, around a dict of the inner tensors. These are then tensors like any
other: they may be shared, tied, sharded, or wrappers themselves. The context is data of Python, a
few dtypes, enums and sizes, and is written without pickle.

A DTensor may have a wrapper as its local tensor. If the class tells how its inner tensors are cut
(:func:`register_wrapper`), or nothing is cut, they are saved as DTensors of their own. Otherwise
the inner tensors of a rank belong to its shard, and only the same shard takes them back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from ckpipe.errors import CkpipeError, InvalidManifest, StructureMismatch, UnsupportedState
from ckpipe.format.dtypes import NAMES
from ckpipe.format.labels import Json, canonical, decode_key, encode_key
from ckpipe.interpreter import user_code
from ckpipe.state.tensors import (
    BUFFER,
    PARAMETER,
    PLAIN,
    PLAIN_TYPES,
    Shardings,
    dtensor_type,
    local_part,
)
from ckpipe.state.values import (
    NotInline,
    class_path,
    decode_value,
    encode_value,
    lasting_path,
    resolve_class,
)

Cut = Callable[[str, int], int | None]
Resize = Callable[[Any, torch.Size], Any]


@dataclass(frozen=True, slots=True)
class _Registered:
    cls: type[torch.Tensor]
    cut: Cut | None
    resize: Resize | None


_registered: dict[str, _Registered] = {}


def register_wrapper(
    cls: type[torch.Tensor], *, cut: Cut | None = None, resize: Resize | None = None
) -> None:
    """Tell ckpipe how the inner tensors of a wrapper class are cut, so that it may be resharded.

    A wrapper class has ``__tensor_flatten__`` and ``__tensor_unflatten__``. Without this call its
    tensors are saved too; as local tensors of a sharded DTensor they then load only into the same
    shards. A program that loads with another mesh must make the same call.

    Args:
        cls: The class; its subclasses need calls of their own.
        cut: Gets the name of an inner tensor and a dimension of the outer one. Returns the
            dimension along which the inner tensor is cut if the outer one is cut along that
            dimension, in as many equal parts and in the same order; None if every part has the
            whole inner tensor. It must raise for a dimension along which it cannot be cut. Outer
            dimensions that cannot be divided into equal parts are saved as without ``cut``.
        resize: Gets the context of a tensor and the outer size of another one that it is a part of,
            or that is a part of it, and returns the context of that; None if all parts have the
            same context.
    """
    _registered[class_path(cls)] = _Registered(cls, cut, resize)


def is_wrapper(obj: Any) -> bool:
    """True if a tensor keeps its values in others; for a DTensor, if its local tensor does.

    Nested tensors and the pending results of collectives do so too, and have rules of their own.
    """
    cls = type(obj)
    if cls in PLAIN_TYPES or not isinstance(obj, torch.Tensor):
        return False
    if cls is dtensor_type():
        obj = obj._local_tensor  # type: ignore[attr-defined]
        cls = type(obj)
    flattens = hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")
    special = hasattr(cls, "device_mesh") or hasattr(cls, "trigger_wait")
    return flattens and not special and not obj.is_nested


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor; of a wrapper, the plain tensors in which its values are."""
    if not is_wrapper(tensor):
        yield tensor
        return
    local: Any = local_part(tensor) if type(tensor) is dtensor_type() else tensor
    for name in local.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(local, name))


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A wrapper tensor of a state, taken apart.

    Args:
        facts: The facts of its node, as ``docs/format.md`` defines them.
        inner: Its inner tensors by name.
        replicas: The ranks that hold its shard; empty if its inner tensors know it themselves.
    """

    facts: dict[str, Json]
    inner: dict[str, torch.Tensor]
    replicas: tuple[int, ...] = ()


def take_apart(obj: Any, label: str, *, detached: bool = False) -> Wrapper:
    """Take a wrapper tensor apart; reads no byte.

    Args:
        obj: The tensor.
        label: Its label in the state.
        detached: True to describe it as if it were detached.

    Raises:
        UnsupportedState: If its context or an inner item cannot be saved.
    """
    placed = type(obj) is dtensor_type()
    local: Any = local_part(obj) if placed else obj
    cls, key = type(local), label or None
    path = class_path(cls) if _known(cls) else lasting_path(cls)
    with user_code("__tensor_flatten__", label):
        names, context = local.__tensor_flatten__()
        inner = {name: getattr(local, name) for name in names}
    size, stride, shard = local.shape, local.stride(), None
    replicas: tuple[int, ...] = ()
    if placed:
        layout = Shardings().of(obj, label)
        parts = inner_placements(cls, obj.device_mesh, obj.placements, obj.shape)
        if parts is not None:
            size, stride = obj.shape, obj.stride()
            context = _resized(cls, context, size)
            inner = {n: placed_part(t, obj.device_mesh, parts(n)) for n, t in inner.items()}
        else:
            replicas = layout.replicas(rank_on(obj.device_mesh))
            shard = {
                "mesh": list(layout.mesh.shape),
                "ranks": blake2b(canonical(layout.mesh.ranks).encode(), digest_size=8).hexdigest(),
                "placements": [[p.dim, p.split_factor] for p in layout.placements],
                "size": list(layout.shape),
            }
    try:
        encoded = _encode(context)
    except (NotInline, UnsupportedState) as error:
        raise UnsupportedState(
            f"The context of this {path} holds an object that cannot be saved: {error}",
            key=key,
            hint="A context may hold plain values, dtypes, sizes, enums, and lists, tuples, dicts "
            "and dataclasses of them. Call ckpipe.register_type for the class, or leave it out",
        ) from error
    if not all(isinstance(each, torch.Tensor) for each in inner.values()):
        raise UnsupportedState(
            f"This {path} names an inner tensor that is none", key=key, hint="Leave it out"
        )
    kind, detail = PLAIN, None
    if not detached and (isinstance(local, torch.nn.Parameter) or getattr(obj, "_is_param", False)):
        kind = PARAMETER
    elif not detached and getattr(obj, "_is_buffer", False):
        kind, detail = BUFFER, "persistent" if getattr(obj, "persistent", True) else "transient"
    facts = {
        "class": path,
        "context": encoded,
        "dtype": NAMES.get(obj.dtype, str(obj.dtype)),
        "size": list(size),
        "stride": list(stride),
        "kind": kind,
        "detail": detail,
        "requires_grad": obj.requires_grad and not detached,
        "shard": shard,
    }
    return Wrapper(facts, inner, replicas)


def rank_on(mesh: Any) -> int:
    """Return this process's rank; by its place on the mesh if the process group is gone.

    torch may return an equal mesh that was made when this process had another rank, so the place
    on the mesh is not used first.
    """
    if dist.is_initialized():
        return dist.get_rank()
    return int(mesh.mesh[tuple(mesh.get_coordinate())])


# Making a wrapper


def wrapper_class(path: str, label: str) -> Any:
    """Return the wrapper class that a manifest names, which is imported or registered.

    Raises:
        StructureMismatch: If this program has no such class.
    """
    known = _registered.get(path)
    cls = known.cls if known is not None else resolve_class(path, torch.Tensor, label)
    if not hasattr(cls, "__tensor_unflatten__"):
        raise StructureMismatch(f"{path} was a wrapper class when it was saved", key=label or None)
    return cls


def put_together(cls: Any, facts: dict[str, Json], inner: dict[str, Any], label: str) -> Any:
    """Make a wrapper tensor of its facts and inner tensors.

    Raises:
        InvalidManifest: If its class makes another tensor of them.
    """
    size, stride = torch.Size(facts["size"]), tuple(facts["stride"])
    try:
        context = _decode(facts["context"])
        with user_code("__tensor_unflatten__", label):
            made = cls.__tensor_unflatten__(inner, context, size, stride)
        if type(made) is not cls or made.shape != size:
            raise InvalidManifest(
                f"{facts['class']} makes a {type(made).__qualname__} of these inner tensors",
                key=label or None,
            )
        if facts["kind"] == PARAMETER:
            return torch.nn.Parameter(made, requires_grad=facts["requires_grad"])
        if facts["kind"] == BUFFER:
            made = torch.nn.Buffer(made, persistent=facts["detail"] == "persistent")
        return made.requires_grad_(facts["requires_grad"])
    except CkpipeError as error:
        error.key = error.key or label or None
        raise
    except Exception as error:
        raise InvalidManifest(
            f"{facts['class']} cannot be made of the saved inner tensors: {error!r:.200}",
            key=label or None,
            hint="Install the version of the library that saved it, or leave it out with exclude",
        ) from error


def differing_fact(saved: dict[str, Json], live: dict[str, Json]) -> str | None:
    """Return the fact in which a saved wrapper differs from a live one that is to be filled.

    Strides, gradients and the kind are those of the live one. Devices in a context do not count,
    nor does the class of a sequence.
    """
    for name in ("class", "shard", "size", "dtype", "context"):
        if canonical(_comparable(saved[name])) != canonical(_comparable(live[name])):
            return name
    return None


def _comparable(data: Json) -> Json:
    if isinstance(data, dict) and len(data) == 1:
        ((tag, inner),) = data.items()
        if tag in ("list", "tuple"):
            return ["size", [_comparable(each) for each in inner]]
        if tag == "dict":
            return sorted(([key, _comparable(each)] for key, each in inner), key=canonical)
    if isinstance(data, dict):
        return {name: _comparable(data[name]) for name in sorted(data)}
    if isinstance(data, list):
        return ["device"] if data[:1] == ["device"] else [_comparable(each) for each in data]
    return data


# Shards


def inner_placements(
    cls: Any, mesh: Any, placements: Sequence[Any], shape: Sequence[int]
) -> Callable[[str], list[Any]] | None:
    """Return a function for the placements of inner tensors; None if they are not known."""
    from torch.distributed.tensor import Replicate, Shard

    known = _known(cls)
    cut = None if known is None else known.cut
    sizes, whole = list(shape), set[int]()
    for number, (n, placement) in enumerate(zip(mesh.shape, placements, strict=True)):
        if placement.is_replicate() or n == 1:
            whole.add(number)
        elif cut is None or sizes[placement.dim] % n:
            return None
        else:
            sizes[placement.dim] //= n

    def placements_of(name: str) -> list[Any]:
        found: list[Any] = []
        for number, placement in enumerate(placements):
            dim = None if number in whole else cut(name, placement.dim)  # type: ignore[misc]
            if dim is None:
                found.append(Replicate())
            elif type(placement) is Shard:
                found.append(Shard(dim))
            else:
                found.append(type(placement)(dim, split_factor=placement.split_factor))
        return found

    return placements_of


def placed_part(local: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """Return the DTensor of which every rank has an equal part as its local tensor."""
    shape = list(local.shape)
    for n, placement in zip(mesh.shape, placements, strict=True):
        if not placement.is_replicate():
            shape[placement.dim] *= n
    return sharded(local, mesh, placements, shape)


def sharded(local: Any, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return the DTensor of a global shape that has a wrapper as its local tensor."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def resized(cls: Any, facts: dict[str, Json], size: tuple[int, ...]) -> dict[str, Json]:
    """Return the facts of a part of a wrapper."""
    context = _encode(_resized(cls, _decode(facts["context"]), torch.Size(size)))
    stride = torch.empty(size, device="meta").stride()
    return {**facts, "context": context, "size": list(size), "stride": list(stride)}


def _resized(cls: Any, context: Any, size: torch.Size) -> Any:
    known = _known(cls)
    return context if known is None or known.resize is None else known.resize(context, size)


def _known(cls: Any) -> _Registered | None:
    known = _registered.get(class_path(cls))
    return known if known is not None and known.cls is cls else None


# Contexts


def _encode(value: Any) -> Json:
    """Return the JSON of a context: inline values, and containers as objects of one member.

    Raises:
        NotInline: If a value cannot be saved.
    """
    cls = type(value)
    if cls is torch.device:
        return ["device", value.type]  # the index differs between ranks
    if cls is list or cls is tuple:
        return {cls.__name__: [_encode(each) for each in value]}
    if cls is dict:
        return {"dict": [[encode_key(key), _encode(each)] for key, each in value.items()]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named_tuple": [class_path(cls), *map(_encode, value)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [[f.name, _encode(getattr(value, f.name))] for f in dataclasses.fields(value)]
        return {"dataclass": [class_path(cls), *fields]}
    try:
        return encode_value(value)
    except NotInline:
        raise NotInline(f"a {class_path(cls)}") from None


def _decode(data: Json) -> Any:
    """Return the context that :func:`_encode` has encoded; devices are the CPU.

    Raises:
        InvalidManifest: If it is malformed.
        StructureMismatch: If it needs a class that this program has not imported.
    """
    if not isinstance(data, dict):
        is_device = type(data) is list and data[:1] == ["device"]
        return torch.device("cpu") if is_device else decode_value(data)
    try:
        ((tag, items),) = data.items()
        if tag in ("list", "tuple"):
            made = [_decode(each) for each in items]
            return made if tag == "list" else tuple(made)
        if tag == "dict":
            return {decode_key(key): _decode(each) for key, each in items}
        path, *values = items
        if tag == "named_tuple":
            cls = resolve_class(path, tuple)
            if len(cls._fields) == len(values):
                return tuple.__new__(cls, map(_decode, values))
        elif tag == "dataclass" and dataclasses.is_dataclass(resolve_class(path, object)):
            cls = resolve_class(path, object)
            fields = {str(name): _decode(each) for name, each in values}
            if fields.keys() == {each.name for each in dataclasses.fields(cls)}:
                record: Any = object.__new__(cls)
                for name, each in fields.items():
                    object.__setattr__(record, name, each)
                return record
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidManifest(f"This is not a context: {data!r:.100}") from error
    raise InvalidManifest(
        f"This is not a context here: {data!r:.100}",
        hint="Install the version of the library that saved it",
    )
