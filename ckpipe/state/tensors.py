"""Tensors as leaves of a state: all facts that are needed to save one and to make it again.

Sharing means overlapping bytes: two tensors belong together if the windows of memory that they
touch overlap, no matter to which storage objects they belong. Windows are found by address, so
views of views, tied weights and numpy arrays over tensors all count. Two views of disjoint halves
of one buffer do not.

A leaf of a DTensor has its local tensor, and the layout of the whole on its mesh. Only attributes
are read: there is no communication, and autograd traces nothing. A program without DTensors never
imports torch's module of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpipe.errors import UnsupportedState, UnsupportedTopology
from ckpipe.format.dtypes import DTYPES, NAMES
from ckpipe.format.labels import join
from ckpipe.format.tree import Node
from ckpipe.state.placements import (
    NO_MESH,
    Mesh,
    OwnBox,
    Placement,
    Sharding,
    mesh_of,
    sharding,
)
from ckpipe.state.values import class_path, lasting_path

PLAIN, PARAMETER, BUFFER, SUBCLASS, NUMPY = "tensor", "parameter", "buffer", "subclass", "numpy"


@dataclass(slots=True)
class TensorLeaf:
    """The facts of one tensor of a state; for a DTensor, of its local tensor on this rank.

    It does not reference the tensor, and never changes after the walk: captures of equal structures
    share their leaves.

    Args:
        label: Its unique label.
        dtype: Its dtype's name.
        shape: Its shape in elements.
        stride: Its strides in elements.
        device: Its device at that time.
        kind: ``tensor``, ``parameter``, ``buffer``, ``subclass`` or ``numpy``.
        detail: The class of a subclass, the dtype of a numpy array, the persistence of a buffer.
        requires_grad: True if it collects gradients.
        lazy: Its lazy bits: any of ``c`` (conjugate) and ``n`` (negative).
        address: The address of its window.
        window: Bytes from its first to behind its last element.
        nbytes: Bytes of its elements, each counted.
        contiguous: True if they are contiguous, row by row.
        attributes: The node of the attributes set on it.
        sharding: The layout of a DTensor on its mesh; None for any other tensor.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    kind: str
    detail: str | None
    requires_grad: bool
    lazy: str
    address: int
    window: int
    nbytes: int
    contiguous: bool
    attributes: Node | None = None
    sharding: Sharding | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The global shape, which for a DTensor is more than that of the local tensor."""
        return self.shape if self.sharding is None else self.sharding.shape

    def layout(self) -> tuple[Any, ...]:
        """Return all facts that a plan depends on, except sharing."""
        return (
            self.label, self.dtype, self.shape, self.stride, self.device,
            self.kind, self.detail, self.requires_grad, self.lazy, self.sharding,
        )  # fmt: skip


Leaf = tuple[TensorLeaf, torch.Tensor]
"""The facts of a tensor, and a detached plain tensor on its memory."""


def leaf_of(
    obj: torch.Tensor | np.ndarray[Any, Any], label: str, shardings: Shardings | None = None
) -> Leaf:
    """Make the leaf of a tensor or numpy array; see :func:`tensor_leaf` and :func:`numpy_leaf`."""
    if isinstance(obj, np.ndarray):
        return numpy_leaf(obj, label)
    return tensor_leaf(obj, label, shardings)


def attributes_of(obj: Any, leaf: TensorLeaf) -> dict[str, Any]:
    """Return the attributes that a program has set on a tensor, without those of the leaf."""
    attributes = getattr(obj, "__dict__", None)
    if not attributes or type(obj) is BoxTensor:
        return {}
    if leaf.sharding is None:
        return dict(attributes)
    return {name: each for name, each in attributes.items() if name not in WRAPPER_MARKS}


def tensor_leaf(tensor: torch.Tensor, label: str, shardings: Shardings | None = None) -> Leaf:
    """Make the leaf of a tensor.

    Args:
        tensor: The tensor; the leaf of a DTensor has its local tensor, without a collective.
        label: Its label.
        shardings: Reads the shardings of DTensors, one for each walk.

    Raises:
        UnsupportedState: If it is sparse, nested, quantized, on the meta device, a wrapper other
            than DTensor, or a DTensor with a placement such as ``Partial``.
    """
    if type(tensor) not in PLAIN_TYPES:
        if type(tensor) is BoxTensor:
            leaf, memory = tensor_leaf(tensor.local, label)
            leaf.sharding = tensor.sharding
            return leaf, memory
        if type(tensor) is dtensor_type():
            return _dtensor_leaf(tensor, label, shardings or Shardings())
        if is_sharded_tensor(tensor):
            raise unsupported_sharded_tensor(label)
    dtype, device = NAMES.get(tensor.dtype), tensor.device
    refused = _why_refused(tensor, dtype)
    if refused or dtype is None:
        raise UnsupportedState(
            f"This tensor {refused}", key=label, hint="Save a plain dense tensor, or leave it out"
        )
    kind, detail = _kind(tensor)
    requires_grad = tensor.requires_grad
    plain = tensor.detach() if kind != PLAIN or requires_grad else tensor
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    shape, stride = tuple(plain.shape), plain.stride()
    nbytes, contiguous = plain.nbytes, plain.is_contiguous()
    window = nbytes if contiguous else window_bytes(plain)
    if is_freed(plain):
        raise UnsupportedState(f"This tensor {FREED}", key=label, hint=WHILE_IT_HAS_MEMORY)
    leaf = TensorLeaf(
        label, dtype, shape, stride, "cpu" if plain.is_cpu else str(device), kind, detail,
        requires_grad, lazy_bits(plain), plain.data_ptr(), window, nbytes, contiguous,
    )  # fmt: skip
    return leaf, plain


def lazy_bits(tensor: torch.Tensor) -> str:
    """Return the lazy bits of a tensor: any of ``c`` (conjugate) and ``n`` (negative)."""
    return ("c" if tensor.is_conj() else "") + ("n" if tensor.is_neg() else "")


FREED = "has no memory: its storage was freed"
WHILE_IT_HAS_MEMORY = "Use it while it has its memory, such as where FSDP has gathered it"


def is_freed(tensor: torch.Tensor) -> bool:
    """True if a strided tensor has elements and no memory, as FSDP's tensors have at times."""
    return not tensor.data_ptr() and not tensor.is_meta and tensor.numel() > 0


MAX_ITEM = 16
"""The largest size of an element, in bytes; memory is aligned to a multiple of it."""

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _dtensor_leaf(tensor: torch.Tensor, label: str, shardings: Shardings) -> Leaf:
    sharding = shardings.of(tensor, label)
    leaf, memory = tensor_leaf(local_part(tensor), label)
    leaf.sharding, leaf.requires_grad = sharding, tensor.requires_grad
    # For a tensor subclass, only these marks tell parameters and buffers.
    if getattr(tensor, "_is_param", False):
        leaf.kind = PARAMETER
    elif getattr(tensor, "_is_buffer", False):
        leaf.kind, leaf.detail = BUFFER, persistence(tensor)
    return leaf, memory


WRAPPER_MARKS = frozenset(("_is_param", "_is_buffer", "persistent"))
"""Attributes by which torch marks a DTensor as a parameter or buffer."""


class BoxTensor(torch.Tensor):
    """A box of a larger tensor, which this rank alone saves; make it with :func:`box_tensor`.

    Attributes:
        local: Its elements, as a plain tensor.
        sharding: Its place in the larger tensor.
    """

    local: torch.Tensor
    sharding: Sharding


def box_tensor(local: torch.Tensor, lower: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that is saved as a box of a larger one.

    Args:
        local: The elements of the box, as a plain tensor.
        lower: The lower corner of the box in the larger tensor.
        shape: The shape of the larger tensor.
    """
    box = local.as_subclass(BoxTensor)
    upper = tuple(low + n for low, n in zip(lower, local.shape, strict=True))
    box.local, box.sharding = local, OwnBox(NO_MESH, (), tuple(shape), (tuple(lower), upper))
    return box


def _why_refused(tensor: torch.Tensor, dtype: str | None) -> str:
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.is_nested:
        return "is nested"
    if dtype is None:
        return f"has the quantized dtype {tensor.dtype}"
    if tensor.is_meta:
        return "is on the meta device and has no bytes"
    if type(tensor) is torch.Tensor:
        return ""
    if hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "device_mesh"):
        return f"wraps others in the class {class_path(type(tensor))}"
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet"
    return ""


def _kind(tensor: torch.Tensor) -> tuple[str, str | None]:
    cls = type(tensor)
    if cls is torch.Tensor:
        return PLAIN, None
    if cls is torch.nn.Parameter:
        return PARAMETER, None
    if isinstance(tensor, torch.nn.Buffer):
        return BUFFER, persistence(tensor)
    return SUBCLASS, lasting_path(cls)


def persistence(tensor: torch.Tensor) -> str:
    """Tell whether a buffer is ``persistent`` or ``transient``."""
    return "persistent" if getattr(tensor, "persistent", True) else "transient"


def numpy_leaf(array: np.ndarray[Any, Any], label: str) -> Leaf:
    """Make the leaf of a numpy array; a dtype that torch lacks is viewed as bytes.

    Raises:
        UnsupportedState: If it holds Python objects, or is of a subclass.
    """
    if type(array) is not np.ndarray or array.dtype.hasobject or array.dtype.fields:
        what, plain = f"dtype {array.dtype!s:.100}", "arr"
        hint = "Save plain arrays of numbers, strings or times"
        if type(array) is not np.ndarray:
            what, plain = f"the class {type(array).__qualname__}", "np.asarray(arr)"
        if array.dtype.fields and not array.dtype.hasobject:
            hint = f"Save {plain}.view(np.uint8), and view that by its dtype after a load"
        raise UnsupportedState(f"A numpy array of {what} cannot be saved", key=label, hint=hint)
    tensor = _as_tensor(array)
    leaf = TensorLeaf(
        label, NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), "cpu", NUMPY,
        array.dtype.str, False, "", tensor.data_ptr(), window_bytes(tensor), tensor.nbytes,
        tensor.is_contiguous(),
    )  # fmt: skip
    return leaf, tensor


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    # torch refuses negative strides and warns of read-only memory, so both are copied. That gives
    # up sharing for arrays that cannot be shared with torch anyway.
    if any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = np.ascontiguousarray(array).reshape(array.shape).copy()
    # torch refuses the strides of a field of records, but accepts a copy.
    for each in (array, array.copy()):
        with suppress(TypeError, ValueError):
            return torch.from_numpy(each)
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    raw = np.frombuffer(bytearray(contiguous.tobytes()), dtype=np.uint8)
    if not raw.size:
        return torch.empty((*array.shape, array.dtype.itemsize), dtype=torch.uint8, device="cpu")
    return torch.from_numpy(raw.reshape(*array.shape, array.dtype.itemsize))


def as_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the numpy array over a tensor's memory, the inverse of :func:`numpy_leaf`.

    Raises:
        ValueError: If the tensor cannot be viewed as such an array.
    """
    array = tensor.numpy()
    if array.dtype == dtype:
        return array
    if array.dtype != np.uint8 or array.ndim == 0 or array.shape[-1] != dtype.itemsize:
        raise ValueError(f"bytes of shape {array.shape} are no array of {dtype}")
    if not array.size:
        return np.empty(array.shape[:-1], dtype=dtype)
    viewed: np.ndarray[Any, Any] = array.view(dtype).reshape(array.shape[:-1])
    return viewed


def window_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to behind the last element of a strided tensor."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * step for n, step in steps)) * tensor.itemsize


def overlapping(windows: Iterable[tuple[str, int, int]]) -> list[list[int]]:
    """Return the connected components of overlapping windows of memory, each as their numbers.

    Args:
        windows: Device, address and bytes of each; windows without bytes are in no component.
    """
    groups: list[list[int]] = []
    last, end = "", 0
    order = sorted(
        (where, begin, n, size) for n, (where, begin, size) in enumerate(windows) if size
    )
    for device, address, number, nbytes in order:
        if device == last and address < end:
            groups[-1].append(number)
            end = max(end, address + nbytes)
        else:
            groups.append([number])
            last, end = device, address + nbytes
    return groups


def alias_groups(leaves: Sequence[TensorLeaf]) -> list[list[int]]:
    """Return the connected components of overlapping windows, each as numbers of leaves.

    A tensor whose own elements overlap (an expanded one) is a group even if it is alone.

    Returns:
        Groups of two or more, and overlapping ones, each in the order of the walk; a leaf in no
        group shares no byte.
    """
    groups = overlapping((leaf.device, leaf.address, leaf.window) for leaf in leaves)
    return sorted(
        sorted(group) for group in groups if len(group) > 1 or _overlaps_itself(leaves[group[0]])
    )


def _overlaps_itself(leaf: TensorLeaf) -> bool:
    return not leaf.contiguous and overlaps_itself(leaf.shape, leaf.stride)


def overlaps_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if elements of a strided tensor may share bytes; exact for all views that torch makes.

    Sorted by stride, each dimension must step over the range that the smaller ones reach.
    """
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, stride, strict=True) if n != 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if a tensor's elements fill their window, each byte once, in any order."""
    reach = 1
    for step, n in sorted((step, n) for n, step in zip(shape, stride, strict=True) if n != 1):
        if n and step != reach:
            return False
        reach *= n
    return True


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value of an optimizer's state, which may be a container."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def is_wrapper(obj: Any) -> bool:
    """True if a tensor keeps its values in others; for a DTensor, if its local tensor does.

    Nested tensors and the pending results of collectives do so too, and have rules of their own.
    """
    if type(obj) in PLAIN_TYPES or not isinstance(obj, torch.Tensor):
        return False
    if type(obj) is dtensor_type():
        obj = obj._local_tensor  # type: ignore[attr-defined]
    return is_wrapper_class(type(obj)) and not obj.is_nested


def is_wrapper_class(cls: type[Any]) -> bool:
    """True for a class of tensors that keep their values in others; neither for DTensor."""
    flattens = hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")
    return flattens and not hasattr(cls, "device_mesh") and not hasattr(cls, "trigger_wait")


def plain_parts(tensor: torch.Tensor, label: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor with its label; of a wrapper, the plain tensors in which its values are."""
    if not is_wrapper(tensor):
        yield label, tensor
        return
    local: Any = local_part(tensor) if type(tensor) is dtensor_type() else tensor
    for name in local.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(local, name), join(label, name))


def dtensor_type() -> Any:
    """Return the class of torch's DTensors; None if the program has not imported it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_sharded_tensor(obj: Any) -> bool:
    """True for torch's ShardedTensor, whose attributes raise errors of torch."""
    kind = getattr(
        sys.modules.get("torch.distributed._shard.sharded_tensor"), "ShardedTensor", None
    )
    return kind is not None and isinstance(obj, kind)


def unsupported_sharded_tensor(label: str) -> UnsupportedState:
    """Return the error for a ShardedTensor that is to be saved or loaded into."""
    return UnsupportedState(
        "This is a ShardedTensor, which ckpipe neither saves nor loads",
        key=label or None,
        hint="Use DTensors. FSDP1 makes them if it is wrapped with "
        "device_mesh=init_device_mesh(...); ckpipe.distributed.training_state(model, optimizer) "
        "then saves and loads model and optimizer",
    )


def local_part(tensor: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor, ready to be read."""
    local: torch.Tensor = tensor._local_tensor
    if type(local) is not torch.Tensor and hasattr(local, "trigger_wait"):
        # The result of a collective of the program, which may still be under way.
        local = local.trigger_wait()
    return local


class Shardings:
    """Reads the shardings of DTensors; caches meshes and placements for one walk.

    Within a walk the meshes stay alive, so their ids are unique.
    """

    def __init__(self) -> None:
        self._meshes: dict[int, tuple[Any, Mesh]] = {}
        self._known: dict[tuple[Any, ...], Sharding] = {}

    def of(self, tensor: Any, label: str) -> Sharding:
        """Return the layout of a DTensor on its mesh.

        Raises:
            UnsupportedState: If it has a placement that cannot be saved, ``Partial`` above all.
            UnsupportedTopology: If its mesh can no longer tell its ranks.
        """
        mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
        key = (id(mesh), placements, shape)
        known = self._known.get(key)
        if known is None:
            cut = tuple(_placement(each, label) for each in placements)
            known = self._known[key] = sharding(self._mesh(mesh, label), cut, tuple(shape))
        return known

    def _mesh(self, device_mesh: Any, label: str) -> Mesh:
        known = self._meshes.get(id(device_mesh))
        if known is None:
            ranks = _ranks_of(device_mesh, label)
            data = ranks.to("cpu", torch.int64).contiguous().numpy().tobytes()
            made = mesh_of(tuple(ranks.shape), data)
            known = self._meshes[id(device_mesh)] = (device_mesh, made)
        return known[1]


def _ranks_of(device_mesh: Any, label: str) -> torch.Tensor:
    try:
        ranks: torch.Tensor = device_mesh.mesh
    except (RuntimeError, ValueError) as error:
        # A submesh looks for this process in the whole mesh, by the default process group.
        raise UnsupportedTopology(
            f"The mesh of this DTensor cannot tell its ranks: {error}",
            key=label or None,
            hint="Close the pipeline before torch.distributed.destroy_process_group",
        ) from error
    return ranks


def _placement(placement: Any, label: str) -> Placement:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if type(placement) is Replicate:
        return Placement()
    if type(placement) is _StridedShard:
        return Placement(placement.dim, int(placement.split_factor))
    if type(placement) is Shard:
        return Placement(placement.dim)
    raise UnsupportedState(
        f"This DTensor has the placement {placement!r:.100}",
        key=label,
        hint="Redistribute it to Shard or Replicate before it is saved",
    )
