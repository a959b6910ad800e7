"""Tables of transforms as data: TOML with one table for each transform, and those that ship.

Sources of the names: ``llama/model.py`` of Meta's Llama, ``torchtitan/models`` (state dict adapters
of llama3 and qwen3), ``model.py`` of nanoGPT, and the ``modeling`` files of transformers 5.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ckpipe.errors import UsageError
from ckpipe.loading.reshapes import Fuse, Rearrange, Split, Stack, Unstack
from ckpipe.loading.transforms import Cast, Drop, Only, Rename, Transform

_KINDS = {
    each.__name__: each
    for each in (Cast, Drop, Fuse, Only, Rearrange, Rename, Split, Stack, Unstack)
}


def name_table(name: str, /, **numbers: int) -> list[Transform]:
    """Return the transforms between the names of one library and those of another.

    The names may stand below others, such as ``model.``.

    ========================== ================= ============================================
    name                       numbers           models
    ========================== ================= ============================================
    llama-to-hf, hf-to-llama   heads, kv_heads   Llama of Meta and torchtitan
    qwen-to-hf, hf-to-qwen     none              Qwen 2 and 3 of torchtitan
    gpt2-to-hf, hf-to-gpt2     none              GPT-2 of nanoGPT
    ========================== ================= ============================================

    Args:
        name: The name of a table: those of the models to those of Hugging Face, or back.
        numbers: The numbers of the model that the table needs: ``heads`` of attention, and
            ``kv_heads``, which share keys and values between heads.

    Raises:
        UsageError: If there is no such table, or a number is missing, unknown or not positive.
    """
    folder = files("ckpipe.loading") / "names"
    known = sorted(each.name.removesuffix(".toml") for each in folder.iterdir())
    if name not in known:
        raise UsageError(
            f"There is no table of names {name!r:.100}", hint=f"Choose one of {', '.join(known)}"
        )
    return read_transforms((folder / f"{name}.toml").read_text("utf-8"), name, numbers)


def read_transforms(
    text: str, place: str, numbers: Mapping[str, int] | None = None
) -> list[Transform]:
    """Read transforms from TOML: an array of tables ``transform``, each with a ``kind``.

    ``kind`` is the name of a class, and the other keys are its arguments. In place of a size may
    stand the name of a number.

    Args:
        text: The TOML.
        place: The name of the table or file, for errors.
        numbers: The numbers.

    Raises:
        UsageError: If it is no such table, or numbers are missing, unknown or not positive.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{place} is no TOML: {error}") from None
    tables = data.pop("transform", None)
    if data or not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise UsageError(
            f"{place} has not just tables called transform",
            hint='Write [[transform]], and below it kind = "Rename" and its arguments',
        )
    given, used = numbers or {}, set[str]()

    def sized(size: Any) -> Any:
        if isinstance(size, list):
            return list(map(sized, size))
        if isinstance(size, str):
            used.add(size)
            return given.get(size, 1)
        return size

    found: list[Transform] = []
    for number, table in enumerate(tables, 1):
        cls = _KINDS.get(table.pop("kind", ""))
        if cls is None:
            raise UsageError(
                f"Transform {number} of {place} has no kind that is known",
                hint=f"The kinds are {', '.join(_KINDS)}",
            )
        sizes = {key: sized(table[key]) for key in ("shape", "sizes") if key in table}
        globs = table.pop("globs", []) if cls in (Drop, Only) else []
        try:
            found.append(cls(*globs, **table | sizes))
        except TypeError as error:
            raise UsageError(f"Transform {number} of {place}: {error}") from None
    wrong = used ^ given.keys() | {n for n, v in given.items() if type(v) is not int or v < 1}
    if wrong:
        raise UsageError(
            f"{place} takes {' and '.join(sorted(used)) or 'no'} numbers, and the given ones are "
            f"{dict(given)}",
            hint="Pass each by its name, as heads=32, with the number of the model",
        )
    return found
