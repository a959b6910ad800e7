"""Tables of transforms as data: TOML with one table for each transform, and those that ship.

Sources of the names: ``llama/model.py`` of Meta's Llama, ``torchtitan/models`` (state dict adapters
of llama3 and qwen3), ``model.py`` of nanoGPT, and the ``modeling`` files of transformers 5.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import GenericAlias
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

import ckpipe
from ckpipe.errors import ShapeMismatch, StructureMismatch, UsageError
from ckpipe.transforms.edit import ManifestEdit
from ckpipe.transforms.published_names import PublishedNames
from ckpipe.transforms.transform import Transform

_FORM = '[[transform]] with kind = "Rename" and its arguments, such as names = {"0.*" = "up.*"}'

_FOLDER = files("ckpipe.transforms") / "names"


def _shipped() -> list[str]:
    tables = (each.name.removesuffix(".toml") for each in _FOLDER.iterdir())
    return sorted([*tables, "transformers"])


def name_table(name: str, /, *, model: Any = None, **numbers: int) -> list[Transform]:
    """Return the transforms between the names of one library and those of another.

    The names may stand below others, such as ``model.``. ``transformers`` has both directions: a
    load and an import give the names of the model to the tensors of a file that ``save_pretrained``
    has written, and an export gives those of such a file.

    ========================== ================= ============================================
    name                       numbers           models
    ========================== ================= ============================================
    llama-to-hf, hf-to-llama   heads, kv_heads   Llama of Meta and torchtitan
    qwen-to-hf, hf-to-qwen     none              Qwen 2 and 3 of torchtitan
    gpt2-to-hf, hf-to-gpt2     none              GPT-2 of nanoGPT
    transformers               ``model``         all of transformers 5
    ========================== ================= ============================================

    Args:
        name: The name of a table: those of the models to those of Hugging Face, or back.
        model: The model of ``transformers``, its config, or the path of its ``config.json``.
        numbers: The numbers of the model that the table needs: ``heads`` of attention, and
            ``kv_heads``, which share keys and values between heads.

    Raises:
        UsageError: If there is no such table, or a number is missing, unknown or not positive; if
            ``model`` is none of transformers, or its weights are converted by an operation that
            ckpipe does not know.

    A load, import or export raises ShapeMismatch if the shapes of the projections contradict the
    numbers.
    """
    known = _shipped()
    if name not in known:
        raise UsageError(
            f"There is no table of names {name!r:.100}", hint=f"Choose one of {', '.join(known)}"
        )
    of_transformers = name == "transformers"
    if of_transformers != (model is not None) or (of_transformers and numbers):
        raise UsageError(
            "The table transformers takes model and nothing else, and no other table takes it",
            hint="Write name_table('transformers', model=model)",
        )
    if of_transformers:
        return [PublishedNames(model)]
    found = read_transforms((_FOLDER / f"{name}.toml").read_text("utf-8"), name, numbers)
    return [_HeadCheck(**numbers), *found] if numbers else found


class _HeadCheck(Transform):
    """Check the numbers of heads by the shapes of the projections, and leave all as it is."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        self._heads, self._kv_heads = heads, kv_heads

    def _apply(self, edit: ManifestEdit) -> None:
        rows = {label: row for label, row in edit.tensors().items() if row.shape}
        told = {row.shape[-1] * 2 for label, row in rows.items() if label.endswith(_FREQUENCIES)}
        sizes: defaultdict[str, set[int | float]] = defaultdict(lambda: {*told})
        others: list[tuple[str, str, int]] = []
        for label, row in rows.items():
            if (found := _PROJECTION.fullmatch(label)) is None or _STATE.search(found["place"]):
                continue
            count = self._heads if "q" in found["name"] else self._kv_heads
            if found["rest"] not in ("weight", "bias"):
                others.append((label, found["place"], row.shape[0] // count))
                continue
            sizes[found["place"]].add(row.shape[0] / count)
            if len(given := sizes[found["place"]]) > 1:
                raise ShapeMismatch(
                    f"heads={self._heads} and kv_heads={self._kv_heads} are not those of the "
                    f"model: heads would have {' and '.join(f'{n:g}' for n in sorted(given))} rows",
                    key=label,
                    hint="Pass num_attention_heads and num_key_value_heads of its configuration",
                )
        for label, place, size in others:
            if size in sizes[place]:
                raise StructureMismatch(
                    "This has the rows of heads, and the table orders those of weights and biases",
                    key=label,
                    hint="Merge adapters into the weights before, or leave it out with ckpipe.Drop "
                    "in front of the table",
                )


_PROJECTION = re.compile(
    r"(?P<place>.*layers\..*\.(?:attention|self_attn))\.(?P<name>wq|wk|q_proj|k_proj)\.(?P<rest>.*)"
)
_STATE = re.compile(r"(?:^|\.)state\.")  # of an optimizer, which is checked behind the table
_FREQUENCIES = ("rope.freqs", "rotary_emb.inv_freq", "freqs_cis")
"""The ends of labels of frequencies, of which there are half as many as rows of a head."""


def read_file(path: Path) -> list[Transform]:
    """Read transforms from a TOML file.

    Raises:
        UsageError: If it cannot be read, or as :func:`read_transforms` does.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return read_transforms(text, str(path))


def read_transforms(
    text: str, place: str, numbers: Mapping[str, int] | None = None
) -> list[Transform]:
    """Read transforms from TOML: an array of tables ``transform``, each with a ``kind``.

    ``kind`` is the name of a class, and the other keys are its arguments; those of ``Only`` and
    ``Drop`` are ``globs``. Or it is the name of a table of names, and the other keys are the
    numbers of the model.

    Args:
        text: The TOML.
        place: The name of the table or file, for errors.
        numbers: Numbers that stand for their names in sizes; None for a file without such names.

    Raises:
        UsageError: If it is no such table, or numbers are missing, unknown or not positive; names
            the place and the entry.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{place} is not TOML: {error}", hint=f"Write {_FORM}") from None
    tables = data.pop("transform", None)
    if data or not isinstance(tables, list):
        others = ", ".join(sorted(data)) or "no array of tables"
        raise UsageError(f"{place} holds {others}", hint=f"Write nothing but {_FORM}")
    given, used = numbers or {}, set[str]()
    good = {name: n for name, n in given.items() if type(n) is int and n > 0}

    def sized(size: Any) -> Any:
        if isinstance(size, list):
            return list(map(sized, size))
        if isinstance(size, str) and numbers is not None:
            used.add(size)
            return good.get(size, 1)
        return size

    found: list[Transform] = []
    for number, table in enumerate(tables, 1):
        members = dict(table) if isinstance(table, Mapping) else {}
        sizes = {key: sized(members[key]) for key in ("shape", "sizes") if key in members}
        try:
            found += _made(members.pop("kind", None), members | sizes)
        except UsageError as error:
            error.message = f"{place}, transform {number}: {error.message}"
            raise
    if used != good.keys() or good.keys() != given.keys():
        raise UsageError(
            f"{place} takes {' and '.join(sorted(used)) or 'no'} numbers, and the given ones are "
            f"{dict(given)}",
            hint="Pass each by its name, as heads=32, with the number of the model",
        )
    return found


def _kinds() -> dict[str, type[Transform]]:
    """Return the transforms that the package exports, by name."""
    known = {each.__name__: each for each in Transform.__subclasses__()}
    return {name: cls for name, cls in sorted(known.items()) if cls is getattr(ckpipe, name, None)}


def _made(kind: object, given: dict[str, Any]) -> list[Transform]:
    """Make the transforms of one entry, with its arguments checked by their annotations."""
    if kind in _shipped():
        return name_table(str(kind), **given)
    kinds = _kinds()
    cls = kinds.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise UsageError(
            f"there is no kind {kind!r:.100}",
            hint=f"The kinds are {', '.join([*kinds, *_shipped()])}",
        )
    parameters, hints = inspect.signature(cls).parameters, get_type_hints(cls.__init__)
    several = {name for name, each in parameters.items() if each.kind is each.VAR_POSITIONAL}
    required = {name for name, each in parameters.items() if each.default is each.empty}
    if unfit := sorted((given.keys() - parameters.keys()) | (required - given.keys())):
        raise UsageError(
            f"{kind} has no {unfit[0]}" if unfit[0] in given else f"{kind} needs {unfit[0]}",
            hint=f"Its members are {', '.join(parameters)}",
        )
    for name, value in given.items():
        wanted: Any = GenericAlias(list, (hints[name],)) if name in several else hints[name]
        try:
            adapter = TypeAdapter(wanted, config=ConfigDict(arbitrary_types_allowed=True))
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise UsageError(f"{kind}: {name} is {value!r:.100}: {said}") from None
    globs = [each for name in several for each in given.pop(name)]
    return [cls(*globs, **given)]
