"""Rehearse the ``load_state_dict`` of a module before a byte is read.

Theory. Hooks and overridden methods may refuse a state, rename its keys, convert or resize its
tensors. Only a run of them tells. So the module's own code runs once on stand-ins: tensors on the
``meta`` device, with shape and dtype and without memory, in place of the saved tensors and of all
tensors of the module. Afterwards each module gets back the very attributes that it had. Extra state
is not set, since its meaning lies in its bytes.

A torch function mode watches the run and traces each saved tensor to the tensor of the module that
takes it unchanged. That one can be filled in place, under whatever name. Any other saved tensor is
made anew for the module, as ``torch.load`` would make it: one that is converted, dropped, swapped,
or of another size than the module's own.

Some code cannot be rehearsed: it reads the values of tensors, writes to tensors that are not the
module's, or calls collectives. The rehearsal then ends without an answer, and the module gets new
tensors.
"""

from __future__ import annotations

import copy
import dis
import re
import traceback
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.overrides import TorchFunctionMode

from ckpipe.errors import ShapeMismatch, StructureMismatch, TargetMismatch, reason_of
from ckpipe.interpreter import user_code
from ckpipe.loading.stateful import SavedTensor, is_extra_state, is_fsdp_hook, mismatch
from ckpipe.reading.live_tensors import is_placed
from ckpipe.state.tensors import local_part


def rehearse(
    module: nn.Module,
    state: Mapping[str, Any],
    live: Mapping[str, Any],
    load: Callable[[Any], object],
    label: str,
    at: Callable[[str], str],
) -> dict[str, torch.Tensor | None] | None:
    """Ask a module whether it takes a state; change nothing.

    Args:
        module: The module.
        state: The state that it is to get, with a :class:`SavedTensor` for each saved tensor.
        live: Its current state, with its own tensors.
        load: Its ``load_state_dict``.
        label: Its label in the state, for errors.
        at: Returns the label of a key, for errors.

    Returns:
        For the key of each saved tensor, the live tensor to fill with it; None to make a new one.
        None instead of all if the module cannot be rehearsed.

    Raises:
        TargetMismatch: If the module refuses the state.
    """
    modules = list(module.modules())
    if any(isinstance(each, torch.jit.ScriptModule) or _is_fsdp1(each) for each in modules):
        return None
    if any(isinstance(each, SavedTensor) and each.like for each in state.values()):
        return None
    try:
        run = _Run(modules, state)
    except (RuntimeError, NotImplementedError, TypeError):  # a tensor of an unknown kind
        return None
    found: list[Any] = []
    with run.on_stand_ins(lambda _, keys: found.append(keys)):
        try:
            with (
                user_code("load_state_dict", label),
                warnings.catch_warnings(),
                torch.no_grad(),
                run.watch,
                torch.device("meta"),
            ):
                warnings.simplefilter("ignore")
                load(run.given)
        except (_NoAnswer, NotImplementedError):
            return run.unanswered(state, live)
        except Exception as error:
            if not _is_of_module(error):
                return run.unanswered(state, live)
            missing, unexpected = found[-1] if found else ((), ())
            refusal = _refusal(error, missing, unexpected, label, at)
            if refusal is None and run.may_mislead:
                return run.unanswered(state, live)
            raise refusal or _other_refusal(error, label) from error
        homes = run.homes()
    own = {_address(each) for each in run.own.values()} - {None}
    return {
        key: _to_fill(value, live.get(key), homes.get(key), run.own, own)
        for key, value in state.items()
        if isinstance(value, SavedTensor)
    }


def _to_fill(
    saved: SavedTensor,
    named: Any,
    home: torch.Tensor | None,
    own: Mapping[int, torch.Tensor],
    addresses: set[int | None],
) -> torch.Tensor | None:
    """Return the live tensor to fill with a saved one.

    Args:
        saved: The saved tensor.
        named: The object under its name in the current state.
        home: The tensor of the module that takes it unchanged.
        own: The tensors of the module, by identity.
        addresses: Where they lie.
    """
    is_made = isinstance(named, torch.Tensor) and id(named) not in own
    if is_made and _address(named) not in addresses:  # a copy that was made for the state
        return named if _fits(named, saved) else None
    return home if home is None or tuple(home.shape) == saved.shape else None


def _fits(tensor: Any, saved: SavedTensor) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and not is_lazy(tensor)
        and ((tensor.shape, tensor.dtype) == (saved.shape, saved.dtype))
    )


def _address(tensor: torch.Tensor) -> int | None:
    if is_lazy(tensor):
        return None
    part = local_part(tensor) if is_placed(tensor) else tensor
    try:
        return part.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def _is_fsdp1(module: nn.Module) -> bool:
    return any(map(is_fsdp_hook, module._state_dict_hooks.values()))


# Stand-ins


class _Run:
    """One rehearsal: the stand-ins, and the watch over them.

    Args:
        modules: The module and all modules in it.
        state: The state, with a :class:`SavedTensor` for each saved tensor.

    Attributes:
        given: The state of stand-ins.
        own: The tensors of the modules, by identity.
        watch: Traces the stand-ins.
    """

    def __init__(self, modules: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        self.own: dict[int, torch.Tensor] = {}
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._slots = [
            (each, kind, name, tensor)
            for each in modules
            for kind in ("_parameters", "_buffers")
            for name, tensor in vars(each)[kind].items()
            if tensor is not None
        ]
        for _, _, _, tensor in self._slots:
            self.own[id(tensor)] = tensor
            self._stand_in(tensor)
        given = copy.copy(state) if isinstance(state, OrderedDict) else dict(state)
        if isinstance(state, OrderedDict):
            vars(given).update(self._in_state(vars(state)))  # Hooks may change the versions.
        for key, value in state.items():
            given[key] = self._in_state(value)
        self.given = given
        self.watch = _Watch(
            {key: given[key] for key, value in state.items() if isinstance(value, SavedTensor)},
            {number: self._stand_ins[number] for number in self.own},
        )
        self._shadows = [(each, vars(each), self._shadow(each)) for each in modules]
        self._classes = [type(each) for each in modules]
        self._hooks = [
            (hooks, hooks.copy())
            for each in modules
            for name, hooks in vars(each).items()
            if name.endswith("_hooks") and hooks
        ]

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._stand_ins:
            self._stand_ins[id(tensor)] = _stand_in_of(tensor)
        return self._stand_ins[id(tensor)]

    def _in_state(self, value: Any) -> Any:
        if isinstance(value, SavedTensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if isinstance(value, Mapping):
            return {key: self._in_state(each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self._in_state(each) for each in value])
        return value

    @contextmanager
    def on_stand_ins(self, spy: Callable[[Any, Any], object]) -> Iterator[None]:
        """Let the modules hold stand-ins, and put back their own attributes at the end.

        Args:
            spy: A last hook on the first module: gets its missing and unexpected keys.
        """
        self._shadows[0][2]["_load_state_dict_post_hooks"][-1] = spy
        try:
            for each, _, shadow in self._shadows:
                object.__setattr__(each, "__dict__", shadow)
            yield
        finally:
            for (each, attributes, _), cls in zip(self._shadows, self._classes, strict=True):
                object.__setattr__(each, "__dict__", attributes)
                if type(each) is not cls:  # parametrizations change it
                    object.__setattr__(each, "__class__", cls)
            for hooks, before in self._hooks:
                if len(hooks) != len(before):  # A handle removes its hook from the module's own.
                    hooks.clear()
                    hooks.update(before)

    def _shadow(self, module: nn.Module) -> dict[str, Any]:
        shadow = dict(vars(module))
        for name, value in shadow.items():
            if type(value) in _CONTAINERS:
                shadow[name] = copy.copy(value)
            elif isinstance(value, torch.Tensor):
                shadow[name] = self._stand_in(value)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in shadow[kind].items():
                if tensor is not None:
                    shadow[kind][name] = self._stand_in(tensor)
        for kind in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
            hooks = shadow[kind].items()
            shadow[kind] = OrderedDict((k, hook) for k, hook in hooks if not is_fsdp_hook(hook))
        after = shadow["_load_state_dict_post_hooks"]
        after.update({k: _only_of_misfits(hook) for k, hook in after.items()})
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            shadow["set_extra_state"] = _forget
        return shadow

    @property
    def may_mislead(self) -> bool:
        """Tell whether code may raise because stand-ins are no DTensors or on meta."""
        return self.watch.asked_device or any(map(is_placed, self.own.values()))

    def unanswered(
        self, state: Mapping[str, Any], live: Mapping[str, Any]
    ) -> dict[str, torch.Tensor | None] | None:
        """Return the tensors to fill if the module was not rehearsed: those that do not fit.

        They are refused. All others are made anew, since the code may rename what it gets. None for
        a module with DTensors, whose shards can be read only into its own.
        """
        if any(map(is_placed, self.own.values())):
            return None
        return {
            key: None if is_extra_state(key) or _fits(live.get(key), value) else live.get(key)
            for key, value in state.items()
            if isinstance(value, SavedTensor)
        }

    def homes(self) -> dict[str, torch.Tensor]:
        """Return the tensor of the modules that takes a saved tensor unchanged, by its key."""
        assigned = set()
        for module, kind, name, tensor in self._slots:
            after = vars(module)[kind].get(name)
            if after is self._stand_ins[id(tensor)] and self.watch.is_intact(after, tensor):
                continue
            self.watch.note(id(tensor), after)
            assigned.add(id(tensor))
        return {
            key: self.own[number]
            for key, number in self.watch.pairs()
            # torch can assign to a tensor without memory, but not fill it.
            if not (number in assigned and self.own[number].is_meta)
        }


_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


def _forget(state: Any) -> None:
    """Stand for ``set_extra_state``."""


def _only_of_misfits(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Call a hook after a load only for keys to add or drop: it may read values if all fits."""
    return lambda module, keys: hook(module, keys) if any(keys) else None


def _stand_in_of(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        kind = UninitializedParameter if isinstance(tensor, nn.Parameter) else UninitializedBuffer
        lazy: torch.Tensor = kind(device="meta", dtype=tensor.dtype)  # type: ignore[call-arg]
        return lazy
    if tensor.layout is torch.strided:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    else:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    if not is_placed(tensor):
        vars(made).update(vars(tensor))
    return made


# What the code does with them


class _NoAnswer(BaseException):
    """Ends a rehearsal; no ``except Exception`` of the rehearsed code catches it."""


_READS = {
    "item", "tolist", "numpy", "data_ptr", "storage", "untyped_storage", "__array__", "__bool__",
    "__complex__", "__contains__", "__dlpack__", "__float__", "__format__", "__index__", "__int__",
    "allclose", "equal", "is_nonzero",
}  # fmt: skip
_KEEP_VALUES = {"requires_grad_", "detach_", "resize_", "resize_as_", "share_memory_", "__set__"}
_MOVES = {"cpu", "cuda", "to", "pin_memory"}
_PLACES = {"device", "is_cpu", "is_cuda"}


class _Watch(TorchFunctionMode):
    """Trace saved tensors to those that take them; stop code that cannot be rehearsed.

    Args:
        inputs: The stand-ins of saved tensors, by key.
        own: The stand-ins of the tensors of the module, by the identity of the live tensor.

    Attributes:
        asked_device: Whether code has asked for the device of a tensor.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], own: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.asked_device = False
        self._inputs = inputs
        self._own = {number: each for number, each in own.items() if not is_lazy(each)}
        # Kept alive, so that the number of a storage is not used again.
        self._storages = [t.untyped_storage() for t in (*inputs.values(), *self._own.values())]
        self._key_of = {_number(each): key for key, each in inputs.items()}
        self._own_of = {_number(each): number for number, each in self._own.items()}
        self._sources: defaultdict[int, set[str | None]] = defaultdict(set)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute, such as the shape
            attribute = func.__self__.__name__
            self.asked_device |= attribute in _PLACES
            return attribute != "is_meta" and func(*args)
        given = (*args, *kwargs.values())
        if name in _READS and any(isinstance(t, torch.Tensor) and t.is_meta for t in given):
            raise _NoAnswer
        if name in ("copy_", "module_load"):
            self._write(given[0], given[1])
        elif _writes(name):
            self._write(given[0], None, keeps=name in _KEEP_VALUES)
        elif kwargs.get("inplace"):
            self._write(given[0], None)
        if kwargs.get("out") is not None:
            self._write(kwargs["out"], None)
        if name in _MOVES:
            return self._moved(func, name, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            devices = {each.device for each in given if isinstance(each, torch.Tensor)}
            needs_values = isinstance(error, NotImplementedError) or " meta " in str(error)
            if needs_values or len(devices) > 1:
                raise _NoAnswer from error
            raise
        if not name.endswith("_like") and not name.startswith("new_"):
            self._note_reads(given, result)
        return result

    def _moved(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Convert a dtype, but leave a stand-in where it is."""
        if not args[0].is_meta:
            return func(*args, **kwargs)
        if name != "to":
            return args[0]
        other = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.Tensor)]
        dtypes = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
        dtypes += [each.dtype for each in other]
        return args[0].to(dtypes[0]) if dtypes else args[0]

    def _write(self, target: Any, source: Any, *, keeps: bool = False) -> None:
        for each in target if isinstance(target, list | tuple) else (target,):
            if not isinstance(each, torch.Tensor) or not each.is_meta:
                raise _NoAnswer
            number = None if keeps or is_lazy(each) else self._own_of.get(_number(each))
            if number is not None:
                whole = _same_place(each, self._own[number])
                self.note(number, source if whole else None)

    def _note_reads(self, given: Sequence[Any], result: Any) -> None:
        """Note tensors of the module whose values go into others, so must not be filled before."""
        made = {_number(each) for each in _tensors_in([result])}
        for each in _tensors_in(given) if made else ():
            number = self._own_of.get(_number(each))
            if number is not None and _number(each) not in made:
                self.note(number, None)

    def note(self, number: int, source: Any) -> None:
        """Note that a tensor of the module has the values of another one; None if of no other."""
        self._sources[number].add(self._key(source))

    def _key(self, source: Any) -> str | None:
        """Return the key of the saved tensor that a tensor is, or is a view of all of."""
        if not isinstance(source, torch.Tensor) or not source.is_meta or is_lazy(source):
            return None
        key = self._key_of.get(_number(source))
        return key if key is not None and _same_place(source, self._inputs[key]) else None

    def is_intact(self, stand_in: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Tell whether a stand-in still has its own storage."""
        return is_lazy(tensor) or self._own_of.get(_number(stand_in)) == id(tensor)

    def pairs(self) -> Iterator[tuple[str, int]]:
        """Yield saved tensors, by key, with the only tensor that takes them.

        It takes nothing else but further saved tensors that it alone takes, as a tied weight does.
        """
        takers = defaultdict(set)
        for number, keys in self._sources.items():
            for key in keys:
                takers[key].add(number)
        for number, keys in self._sources.items():
            if None not in keys and all(takers[key] == {number} for key in keys):
                yield from ((key, number) for key in keys if key is not None)


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among values and in lists of them."""
    flat = (
        each for value in values for each in (value if type(value) in (list, tuple) else [value])
    )
    return [each for each in flat if isinstance(each, torch.Tensor) and not is_lazy(each)]


def _number(tensor: torch.Tensor) -> int:
    """Return the number of the storage of a tensor."""
    return int(tensor.untyped_storage()._cdata)


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.stride(), one.storage_offset()) == (
        other.shape, other.dtype, other.stride(), other.storage_offset()
    )  # fmt: skip


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__set__", "__setitem__") or name in _IN_PLACE_OPERATORS
    return name.endswith("_")


_IN_PLACE_OPERATORS = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip


def _is_of_module(error: BaseException) -> bool:
    """Tell whether a module refuses its state by an error; else an operation lacks the values.

    Operations that the watch sees have raised ``_NoAnswer`` if they need values. Collectives and
    native code are not seen: their errors come from no ``raise`` statement.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any("torch/distributed/" in frame.f_code.co_filename for frame in frames):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, RuntimeError) or frames[-1].f_code is _WATCHED:
        return True
    return frames[-1].f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


_WATCHED = _Watch.__torch_function__.__code__


_HINT = "Load it into a module of the same layers"


def _refusal(
    error: Exception,
    missing: Sequence[str],
    unexpected: Sequence[str],
    label: str,
    at: Callable[[str], str],
) -> TargetMismatch | None:
    """Return the error for keys or a size that torch refuses; None for any other reason."""
    if "key(s) in state_dict" in str(error) and (missing or unexpected):
        only_here, only_there = dict.fromkeys(map(at, missing)), dict.fromkeys(map(at, unexpected))
        return mismatch(list(only_here), list(only_there), label, hint=_HINT)
    size = re.search(r"size mismatch for ([^:]+): (.*)", str(error))
    if size is None:
        return None
    return ShapeMismatch(
        f"The module refuses it: {size[2].rstrip('.')}", key=at(size[1]), hint=_HINT
    )


def _other_refusal(error: Exception, label: str) -> StructureMismatch:
    return StructureMismatch(
        f"The module refuses its state: {reason_of(error)}",
        key=label or None,
        hint=f"{_HINT}, or leave it out with exclude",
    )
