"""Small stateful objects that most training states want."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from ckpipe.errors import UsageError
from ckpipe.memory import cuda


class Progress:
    """Named values of a training run, as attributes: epoch, step, tokens seen.

    All of them are saved. A load sets the saved attributes and keeps the others, such as one that
    was added after the checkpoint: ``LoadResult.missing`` names these.

    Args:
        values: The initial attributes.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes."""
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the saved attributes."""
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this Progress has no {name!r}; it has {sorted(self.__dict__)}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"Progress({inside})"


class RngState:
    """The random number generators of this process: Python, numpy, torch and CUDA.

    A save reads their states, and a load sets them: the numbers drawn after the load are those that
    would have been drawn after the save. Generators of devices without a saved state stay as they
    are.

    Each rank has generators of its own. A rank that did not save any, as when another number of
    ranks loads, is refused with ``PerRankValue``; with ``per_rank="derive"`` it gets generators
    that are derived from those of the lowest rank and from its own rank.

    ``iter(loader)`` of a data loader draws a number. So generators that a load has set are one draw
    ahead in the first epoch after it. :class:`Batches` sets them again at the right moment. If your
    trainer makes its loaders itself, pass ``apply="later"`` and call :meth:`apply` just before the
    first sample is loaded; in later epochs the call does nothing.

    Args:
        apply: ``"load"`` sets the generators when the state is loaded. ``"later"`` keeps the loaded
            states until :meth:`apply` is called.

    Raises:
        UsageError: If ``apply`` is neither.
    """

    def __init__(self, *, apply: Literal["load", "later"] = "load") -> None:
        if apply not in ("load", "later"):
            raise UsageError(f'apply is "load" or "later", not {apply!r:.100}')
        self._apply = apply
        self._loaded: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return "RngState()" if self._apply == "load" else f"RngState(apply={self._apply!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators, or the loaded ones that wait for :meth:`apply`."""
        if self._loaded is not None:
            return dict(self._loaded)
        state = cpu_generators()
        if cuda.in_use():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of all generators, or keep them for :meth:`apply`."""
        self._loaded = dict(state)
        if self._apply == "load":
            self.apply()

    def apply(self) -> None:
        """Set the generators to those of the last load.

        Once they are set, or if nothing was loaded, the call does nothing.
        """
        state, self._loaded = self._loaded, None
        if state is None:
            return
        set_cpu_generators(state)
        if "cuda" in state and torch.cuda.is_available():
            for device, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(value, device)


def cpu_generators() -> dict[str, Any]:
    """Return the states of the global generators of Python and numpy, and of torch on the CPU."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": _numpy_form(np.random.get_state(legacy=False)),
        "python": python_form(random.getstate()),
    }


def set_cpu_generators(state: Mapping[str, Any]) -> None:
    """Set the generators to a result of :func:`cpu_generators`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(numpy_state(state["numpy"]))
    random.setstate(python_state(state["python"]))


def _numpy_form(state: Any) -> dict[str, Any]:
    """Convert a state of a numpy generator to a form that ``torch.load`` accepts."""
    words = {name: _as_tensor(value) for name, value in state["state"].items()}
    return {**state, "state": words}


def numpy_state(form: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a result of :func:`_numpy_form` back."""
    words = {name: _as_words(value) for name, value in form["state"].items()}
    return {**form, "state": words}


def python_form(state: tuple[Any, ...]) -> dict[str, Any]:
    """Convert a state of a ``random.Random`` to a form that ``torch.load`` accepts."""
    version, internal, gauss = state
    words = torch.from_numpy(np.array(internal, np.int64))
    return {"version": version, "internal": words, "gauss": gauss}


def python_state(form: Mapping[str, Any]) -> tuple[Any, ...]:
    """Convert a result of :func:`python_form` back."""
    return (form["version"], tuple(form["internal"].tolist()), form["gauss"])


def _as_tensor(value: Any) -> Any:
    """Convert an array to a tensor, which ``torch.load`` accepts with ``weights_only=True``."""
    return torch.from_numpy(value.astype(np.int64)) if isinstance(value, np.ndarray) else value


def _as_words(value: Any) -> Any:
    """Convert a tensor back to an array."""
    return np.asarray(value, np.uint32) if isinstance(value, torch.Tensor) else value


def derived_generators(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Make the state of new generators from a saved one and a rank, different for each rank.

    Args:
        state: A result of ``RngState.state_dict``.
        rank: The rank of the new generators.
    """
    common = hashlib.blake2b()
    for leaf in _leaves(state):
        common.update(leaf)
    own = hashlib.blake2b(common.digest() + rank.to_bytes(8, "little")).digest()
    # torch takes 32 bits of a seed on the CPU. Hashes of many ranks may collide in 32 bits, so the
    # rank is added instead.
    seed = (int.from_bytes(common.digest()[:4], "little") + rank) % 2**32
    bits = _BIT_GENERATORS[state["numpy"]["bit_generator"]](np.frombuffer(own[:32], np.uint32))
    made: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "numpy": _numpy_form(np.random.RandomState(bits).get_state(legacy=False)),
        "python": python_form(random.Random(own[32:]).getstate()),
    }
    if "cuda" in state and torch.cuda.is_available():
        devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
        made["cuda"] = [torch.Generator(each).manual_seed(seed).get_state() for each in devices]
    return made


def generators_differ(before: Any, after: Any) -> bool:
    """Compare two states of generators, of the same structure."""
    return list(_leaves(before)) != list(_leaves(after))


_BIT_GENERATORS = {each.__name__: each for each in np.random.BitGenerator.__subclasses__()}


def _leaves(value: Any) -> Iterator[bytes]:
    """Yield the leaves of a nested state as bytes."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield np.asarray(value).tobytes()
    else:
        yield repr(value).encode()
