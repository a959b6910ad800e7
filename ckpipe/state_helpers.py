"""Small stateful objects that most training states want."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckpipe.memory import cuda


class Progress:
    """Named values of a training run, as attributes: epoch, step, tokens seen.

    Saved and loaded as a whole; loading replaces all attributes by the saved ones.

    Args:
        values: The attributes to begin with.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        """The attributes."""
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the attributes."""
        self.__dict__.clear()
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

    Saving reads their states at that moment, loading sets them, so that what is drawn after a
    load is what would have been drawn after the save. Generators of other devices than the saved
    ones are left alone.
    """

    def __repr__(self) -> str:
        return "RngState()"

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators."""
        version, internal, gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": {
                "version": version,
                "internal": np.array(internal, dtype=np.uint32),
                "gauss": gauss,
            },
        }
        if cuda.in_use():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the states of all generators."""
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        python = state["python"]
        internal = tuple(int(word) for word in python["internal"])
        random.setstate((python["version"], internal, python["gauss"]))
        if "cuda" in state and torch.cuda.is_available():
            for device, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(value, device)
