"""Objects of other classes in files of others: they run nothing, and block nothing beside them."""

from __future__ import annotations

import argparse
import collections
import copyreg
import datetime
import decimal
import enum
import logging
import math
import os
import pathlib
import pickle
import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckpipe
from ckpipe.errors import InvalidManifest, UnsupportedState
from tests.foreign.test_hostile import DATA, MARK, Mark, laughs, refused, tensor, torch_zip
from tests.support.pipelines import load_existing, same

MADE: list[object] = []


class Rate(enum.Enum):
    """An enum of the program that saved."""

    LOW = 1


class Flags(enum.Flag):
    """Flags, which some versions of Python find by getattr."""

    A = 1
    B = 2


class Noted:
    """A class that notes whenever code of it runs for a file."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __new__(cls, *args: Any, **kwargs: Any) -> Noted:
        MADE.append("new")
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        MADE.append(state)

    def __getattr__(self, name: str) -> Any:
        MADE.append(name)
        raise AttributeError(name)

    def __hash__(self) -> int:
        MADE.append("hash")
        return 1

    def __eq__(self, other: object) -> bool:
        MADE.append("equal")
        return True


class WithArguments(Noted):
    """A class that is made with keywords: NEWOBJ_EX in newer protocols."""

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (1,), {"b": torch.ones(1)}


class Dict(dict[str, Any]):
    """A dict of the program's own, such as a config."""


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (lambda: Noted(torch.ones(2)), f"{__name__}.Noted"),
    "keywords": (WithArguments, "WithArguments|functools.partial"),
    "in a list": (lambda: [0, (Noted(), 1)], f"{__name__}.Noted"),
    "class": (lambda: Noted, f"{__name__}.Noted"),
    "enum": (lambda: Rate.LOW, f"{__name__}.Rate"),
    "flags": (lambda: Flags.A | Flags.B, f"{__name__}.Flags"),
    "keyed": (lambda: {Rate.LOW: torch.ones(1)}, "a dict with keys"),
    "keyed by parts": (lambda: {(1, (Rate.LOW,)): 1}, "a dict with keys"),
    "counted": (lambda: collections.Counter([Rate.LOW]), "a dict with keys"),
    "set": (lambda: {Rate.LOW}, "a set with keys"),
    "frozen": (lambda: frozenset([Rate.LOW]), "a frozenset with keys"),
    "config": (lambda: Dict(a=1, b=torch.ones(1)), f"{__name__}.Dict"),
    "default": (lambda: collections.defaultdict(list, a=[1], b=[2]), "collections.defaultdict"),
    "deque": (lambda: collections.deque([1, torch.ones(2)], 5), "collections.deque"),
    "date": (lambda: datetime.datetime(2026, 1, 2), "datetime.datetime"),
    "decimal": (lambda: decimal.Decimal("0.1"), "decimal.Decimal"),
    "array": (lambda: np.ones(3), "numpy.ndarray|numpy._core.numeric._frombuffer"),
    "numpy text": (lambda: np.str_("a"), "multiarray.scalar in a form"),
    "numpy date": (lambda: np.datetime64("2026-01-02"), "multiarray.scalar in a form"),
    "space of keys": (lambda: _space({1: 2}), "argparse.Namespace in a form"),
    "module": (lambda: nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    "function": (lambda: math.sqrt, "math.sqrt"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
}  # fmt: skip


def _space(attributes: dict[Any, Any]) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update(attributes)
    return made


KNOWN: dict[str, tuple[Any, Any]] = {
    "args": (argparse.Namespace(a=1, b=[torch.ones(2)]), {"a": 1, "b": [torch.ones(2)]}),
    "space": (types.SimpleNamespace(a=argparse.Namespace()), {"a": {}}),
    "double": (np.float64(0.1), np.float64(0.1)),
    "single": (np.float32(0.1), np.float32(0.1)),
    "half": (np.float16(0.1), np.float16(0.1)),
    "nan": (np.uint32(0x7FC12345).view(np.float32), None),
    "infinite": (np.float64("-inf"), np.float64("-inf")),
    "bool": (np.bool_(True), np.bool_(True)),
    "long": (np.int64(-(1 << 62)), np.int64(-(1 << 62))),
    "byte": (np.uint8(200), np.uint8(200)),
    "complex": (np.complex64(1 - 2j), np.complex64(1 - 2j)),
    "dtype": (np.dtype("float32"), "float32"),
    "big": (np.dtype(">i4"), ">i4"),
    "path": (pathlib.PurePosixPath("a/b"), "a/b"),
    "home": (pathlib.Path("/home/me"), "/home/me"),
    "windows": (pathlib.PureWindowsPath("c:/a"), "c:\\a"),
    "torch dtype": (torch.float16, torch.float16),
}


@pytest.mark.filterwarnings("ignore")  # torch warns of prototypes
@pytest.mark.sample(1)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_unknown_objects_block_nothing_beside_them(protocol: int, tmp_path: Path) -> None:
    weights = {"w": torch.arange(3.0)}
    others = {name: make() for name, (make, _) in UNKNOWN.items()}
    file = tmp_path / "old.pt"
    torch.save({"model": weights, **others, "step": 3}, file, pickle_protocol=protocol)
    MADE.clear()
    kept = {"model": weights, "step": 3}
    hows: list[dict[str, Any]] = [
        {"include": ["model", "step"]},
        {"exclude": list(UNKNOWN)},
        {"transform": [ckpipe.Only("model", "step")]},
        {"transform": [ckpipe.Drop(*UNKNOWN)]},
        {"transform": [ckpipe.Rename({"enum": "rate"})], "include": ["model", "step"]},
    ]
    for how in hows:
        assert same(ckpipe.load(file, **how).state, kept), how
    for how in [*hows, {"strict": False}, {"allow_unexpected": ["*"]}]:
        into = {"model": {"w": torch.zeros(3)}, "step": 0}
        ckpipe.load(file, into, **how)
        assert same(into, kept), how
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        for name, (_, kind) in UNKNOWN.items():
            held = name in ("in a list", "counted")  # the containers are known
            targets: list[Any] = [None, {name: {}}, {name: torch.ones(1)}]
            for target in targets[:1] if held else targets:
                with pytest.raises(UnsupportedState, match=kind) as raised:
                    pipeline.load(target, source=file, include=[name])
                assert str(raised.value.key).startswith(name)
                assert "exclude" in str(raised.value.hint)
    with pytest.raises(UnsupportedState):
        ckpipe.load(file)
    assert not MADE


@pytest.mark.filterwarnings("ignore")
def test_unknown_objects_of_dcp_block_nothing_beside_them(tmp_path: Path) -> None:
    weights = {"w": torch.arange(3.0)}
    plain = {name: each for name, (each, _) in KNOWN.items()}
    dcp_save({"model": weights, "plain": plain, "rate": Rate.LOW}, checkpoint_id=tmp_path / "dcp")
    assert same(ckpipe.load(tmp_path / "dcp", include=["model"]).state, {"model": weights})
    with pytest.raises(UnsupportedState, match=r"Rate") as raised:
        ckpipe.load(tmp_path / "dcp")
    assert raised.value.key == "rate"
    found = ckpipe.load(tmp_path / "dcp", exclude=["rate"]).state["plain"]
    assert same(found["args"], KNOWN["args"][1])
    assert found["home"] == "/home/me"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_known_objects_are_plain_values_and_told(
    protocol: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "old.pt"
    torch.save({name: each for name, (each, _) in KNOWN.items()}, file, pickle_protocol=protocol)
    with caplog.at_level(logging.INFO, "ckpipe"):
        found = ckpipe.load(file).state
    (told,) = [each.message for each in caplog.records if "in place of" in each.message]
    assert all(name in told for name in ("args", "space", "double", "dtype", "path"))
    for name, (before, expected) in KNOWN.items():
        if isinstance(before, np.generic):
            assert type(found[name]) is type(before)
            assert found[name].tobytes() == before.tobytes(), name
        else:
            assert same(found[name], expected), name
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        pipeline.save(found, step=1)
        into = {**found, "args": {"a": 0, "b": [torch.zeros(2)]}}
        pipeline.load(into, source=file)
        assert same(into["args"], KNOWN["args"][1])


def test_an_import_and_an_export_refuse_unknown_objects_by_label(tmp_path: Path) -> None:
    file = tmp_path / "old.pt"
    torch.save({"model": {"w": torch.ones(2)}, "rate": [Rate.LOW], "args": KNOWN["args"][0]}, file)
    changes = [ckpipe.Drop("rate")]
    for call in (
        lambda name, **more: ckpipe.import_checkpoint(file, tmp_path / name, **more),
        lambda name, **more: ckpipe.export(file, tmp_path / name, form="torch", **more),
        lambda name, **more: ckpipe.export(file, tmp_path / name, form="dcp", **more),
    ):
        with pytest.raises(UnsupportedState, match="Rate") as raised:
            call("refused")
        assert raised.value.key == "rate.0"
        assert "such as with exclude= or the transform ckpipe.Drop" in str(raised.value.hint)
        assert not [each for each in tmp_path.glob("refused/**/*") if each.is_file()]
    expected = {"model": {"w": torch.ones(2)}, "args": KNOWN["args"][1]}
    ckpipe.import_checkpoint(file, tmp_path / "run", transform=changes)
    assert same(ckpipe.load(tmp_path / "run").state, expected)
    ckpipe.export(file, tmp_path / "out", form="torch", transform=changes)
    assert same(torch.load(tmp_path / "out/state.pt"), expected)
    ckpipe.export(file, tmp_path / "weights")
    assert ckpipe.verify(file).source == str(file)
    assert ckpipe.inspect(file).tensors


def text(each: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(each)) + each.encode()


SYSTEM = b"cos\nsystem\n"
UNREAD = b"cmade\nUp\n"
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\2tQ"
STATE = b"(K\3" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0t"


def dtype(name: str, state: bytes = STATE) -> bytes:
    return b"cnumpy\ndtype\n" + text(name) + b"\x89\x88\x87R" + state + b"b"


def scalar(of: bytes, data: bytes) -> bytes:
    found = b"cnumpy._core.multiarray\nscalar\n" + of
    return found + b"C" + bytes([len(data)]) + data + b"\x86R"


RUN = text("touch evil") + b"\x85"
PLACEHOLDERS: dict[str, bytes] = {
    "REDUCE": SYSTEM + RUN + b"R",
    "NEWOBJ": SYSTEM + RUN + b"\x81",
    "NEWOBJ_EX": SYSTEM + RUN + b"}\x92",
    "arguments": UNREAD + SYSTEM + b"R",
    "the result is called": SYSTEM + RUN + b"R" + RUN + b"R" + RUN + b"R",
    "BUILD": UNREAD + b")\x81}" + text("a") + SYSTEM + b"sb",
    "BUILD of a name": b"cos\nenviron\n}" + text("CKPIPE_EVIL") + text("1") + b"sb",
    "BUILD with slots": UNREAD + b")\x81N}" + text("a") + b"Ns\x86b",
    "BUILD with setstate": UNREAD + b")\x81}" + text("__setstate__") + SYSTEM + b"sb" + RUN + b"b",
    "SETITEM": b"cos\nenviron\n" + text("CKPIPE_EVIL") + text("1") + b"s",
    "SETITEMS": b"cos\nenviron\n(" + text("CKPIPE_EVIL") + text("1") + b"u",
    "APPEND": b"csys\npath\n" + text("/evil") + b"a",
    "APPENDS": b"csys\npath\n(" + text("/evil") + text("/evil2") + b"e",
    "ADDITEMS": b"csys\npath\n(" + text("/evil") + b"\x90",
    "a key": b"}" + SYSTEM + b"Ns",
    "a key of parts": b"}" + text("a") + SYSTEM + b"\x86Ns",
    "keys": b"}(" + SYSTEM + b"N" + UNREAD + b"Nu",
    "a set": b"\x8f(" + SYSTEM + b"\x90",
    "a frozen set": b"(" + SYSTEM + b"\x91",
    "a set by a call": b"cbuiltins\nset\n](" + SYSTEM + b"e\x85R",
    "a counter": b"ccollections\nCounter\n}" + SYSTEM + b"K\1s\x85R",
    "a storage of a persistent id": (
        b"(" + text("storage") + SYSTEM + text("0") + text("cpu") + b"K\2tQ"),
    "a storage": b"ctorch._utils\n_rebuild_tensor_v2\n(" + SYSTEM + b"K\0K\2\x85K\1\x85\x89NtR",
    "hooks": b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\0K\2\x85K\1\x85\x89"
             + UNREAD + b"tR",
    "a dtype": b"ctorch._utils\n_rebuild_tensor_v3\n(" + STORAGE + b"K\0K\2\x85K\1\x85\x89N"
               + UNREAD + b"tR",
    "a parameter": b"ctorch._utils\n_rebuild_parameter\n" + SYSTEM + b"\x88N\x87R",
    "text": b"c_codecs\nencode\n" + SYSTEM + text("latin1") + b"\x86R",
    "getattr": b"cbuiltins\ngetattr\ncos\nenviron\n" + text("clear") + b"\x86R)R",
    "getattr of a known name": (
        b"cbuiltins\ngetattr\nccollections\nOrderedDict\n" + text("__globals__") + b"\x86R"),
    "a dotted name": b"\x8c\x08builtins\x8c\x11getattr.__class__\x93)R",
    "a name of a known one": b"\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93)R",
    "a class by its helper": b"ccopyreg\n_reconstructor\n" + UNREAD + b"cbuiltins\nobject\nN\x87R",
    "a space with arguments": b"cargparse\nNamespace\n" + text("a") + b"\x85R",
    "a space of numbers": b"cargparse\nNamespace\n)\x81}K\1Nsb",
    "a space without a dict": b"cargparse\nNamespace\n)\x81K\1b",
    "a space of a placeholder": b"cargparse\nNamespace\n)\x81}" + SYSTEM + b"Nsb",
    "a space by keywords": b"cmade\nUp\n)}" + text("a") + b"Ns\x92",
    "a path of numbers": b"cpathlib\nPosixPath\nK\1\x85R",
    "a path with attributes": b"cpathlib\nPosixPath\n)R}" + text("a") + b"Nsb",
    "a scalar of objects": scalar(dtype("O8"), bytes(8)),
    "a scalar of a structure": scalar(dtype("f8,f8"), bytes(16)),
    "a scalar of many": scalar(dtype("3f8"), bytes(24)),
    "a scalar of a class": scalar(SYSTEM, bytes(8)),
    "a scalar of text": scalar(text("f8"), bytes(8)),
    "a scalar that is too short": scalar(dtype("f8"), bytes(7)),
    "a scalar without data": scalar(dtype("f8"), b""),
    "a scalar of a dtype that is half made": scalar(
        b"cnumpy\ndtype\n" + text("f8") + b"\x89\x88\x87R", bytes(8)),
    "a dtype of code": dtype("__import__('os').system('x')"),
    "a space in itself": b"cargparse\nNamespace\n)\x81q\1}" + text("a") + b"h\1sb",
    "a dict in itself": b"}q\1" + text("a") + b"h\1s",
    "a list in itself": b"]q\1h\1a",
    "a list in itself twice": b"]q\1(h\1h\1e",
    "a list in a tuple in itself": b"]q\1h\1\x85a",
    "a counter in itself": b"ccollections\nCounter\n}\x85Rq\1" + text("a") + b"h\1s",
    "deep": b"]" * 5000 + b"a" * 4999,
    "an ordered dict with attributes": (
        b"ccollections\nOrderedDict\n)R}" + text("items") + SYSTEM + b"sb"),
    "a layout": b"ctorch.serialization\n_get_layout\n" + text("torch.jagged") + b"\x85R",
    "a device": b"ctorch\ndevice\n" + text("npu:0") + b"\x85R",
    "a path that is long": b"cpathlib\nPosixPath\n(" + text("a" * 1000) + b"q\1"
                           + b"h\1" * 34 + b"tR",
    "a class": b"cargparse\nNamespace\n",
    "a function": b"cbuiltins\nset\n",
    "a dtype of another state": dtype("f8", STATE.replace(b"NNN", b"N)N")),
}  # fmt: skip
MANY = text("") + b"q\0010(" + b"h\1" * 10_000 + b"tq\0020"
NUMBERS = b"".join(b"M" + struct.pack("<H", n) + b"N" for n in range(5000))
MALFORMED: dict[str, bytes] = {
    "a persistent id": SYSTEM + b"Q",
    "a persistent id in text": b"Pos.system\n",
    "a persistent id of parts": b"(" + text("storage") + SYSTEM * 2 + b"tQ" + b"Q",
    "arguments": b"ccollections\nOrderedDict\n" + SYSTEM + b"R",
    "sizes": b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\0" + UNREAD
             + b"\x85K\1\x85\x89NtR",
    "keywords of a known class": b"ccollections\nOrderedDict\n)}" + text("a") + b"Ns\x92",
    "state of a known function": b"cbuiltins\ncomplex\n}" + text("a") + b"Nsb",
    "attributes twice": b"cargparse\nNamespace\n)\x81}" + text("a") + b"Nsb}" + text("b") + b"Nsb",
    "INST": b"(ios\nsystem\n",
    "OBJ": b"(" + SYSTEM + text("x") + b"o",
    "EXT1": b"\x82\xf0",
    "EXT2": b"\x83\xf0\0",
    "EXT4": b"\x84\xf0\0\0\0",
    "items of nothing": b"a",
    "a mark of nothing": b"e",
    "a buffer": b"\x97",
    "a bomb": laughs()[2:-1].replace(b"]q\0", SYSTEM + b"q\0", 1),
    "a huge name": b"c" + b"m" * 2000 + b"\nx\n",
    "names of a long module": b"]" + text("m" * 900) + b"q\0010" + b"".join(
        b"h\1" + text(str(n)) + b"\x930" for n in range(4000)),
    "a path many times": MANY + b"cpathlib\nPosixPath\nq\0030](" + b"h\3h\2R" * 200 + b"e",
    "a set many times": MANY + b"cbuiltins\nset\nq\0030](" + b"h\3h\2\x85R" * 200 + b"e",
    "arguments in a list": b"cpathlib\nPosixPath\n]R",
    "references to a path": MANY + b"cpathlib\nPosixPath\nh\2Rq\0030](" + b"h\3" * 5000 + b"e",
    "references to a space": b"cargparse\nNamespace\n)R}(" + NUMBERS + b"ubq\0030]("
                             + b"h\3" * 5000 + b"e",
    "references to a dict": b"}(" + NUMBERS + UNREAD + b"Nuq\0030](" + b"h\3" * 5000 + b"e",
    "60,000 names": b"".join(b"cx\n%d\n0" % n for n in range(60_000)) + b"N",
}  # fmt: skip


def hostile(folder: Path, **evil: bytes) -> Path:
    """Write a file of ``torch.save`` with weights, and what pickles make under their names."""
    folder.mkdir()
    found = b"".join(text(name) + each + b"s" for name, each in evil.items())
    pickled = b"\x80\4" + tensor()[2:-1] + found + b"."
    (folder / "state.pt").write_bytes(torch_zip(pickled, DATA))
    return folder / "state.pt"


@pytest.fixture
def unharmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check that no command ran, and that nothing of the process has changed."""
    copyreg.add_extension("os", "system", 0xF0)
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield
    copyreg.remove_extension("os", "system", 0xF0)
    assert "CKPIPE_EVIL" not in os.environ
    assert sys.path == path
    assert "made" not in sys.modules
    assert not (tmp_path / "evil").exists()


@pytest.mark.usefixtures("unharmed")
def test_placeholders_run_nothing_and_weights_beside_them_load(tmp_path: Path) -> None:
    file = hostile(tmp_path / "theirs", **PLACEHOLDERS)
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        assert same(
            load_existing(pipeline, source=file, include=["w"]).state, {"w": torch.zeros(2)}
        )
        for name in PLACEHOLDERS:
            with pytest.raises(UnsupportedState) as raised:
                pipeline.load(source=file, include=[name])
            assert str(raised.value.key).startswith(name)


def test_a_class_in_a_file_is_named(tmp_path: Path) -> None:
    torch.save({"kind": argparse.Namespace}, tmp_path / "old.pt")
    with pytest.raises(UnsupportedState, match=r"holds argparse\.Namespace, which"):
        ckpipe.load(tmp_path / "old.pt")


def test_names_of_a_file_are_told_without_what_controls_a_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = "odd\x1b[2J\n"
    file = hostile(tmp_path / "theirs", **{odd: text(odd) + text(odd) + b"\x93"})
    with pytest.raises(UnsupportedState, match="odd") as raised:
        ckpipe.load(file)
    assert str(raised.value).isprintable()
    torch.save({odd: argparse.Namespace()}, tmp_path / "old.pt")
    with caplog.at_level(logging.INFO, "ckpipe"):
        ckpipe.load(tmp_path / "old.pt")
    assert all(each.message.isprintable() for each in caplog.records)
    assert "odd" in caplog.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "optimizer",
    [
        {"param_groups": [{"params": Rate.LOW}]},
        {"param_groups": [{"params": "ab"}]},
        {"param_groups": [{"params": 1}], "state": {"0": 1}},
        {"param_groups": [{"params": [0]}], "state": Rate.LOW},
        {"param_groups": [{"params": [0]}], "state": "text"},
    ],
)
def test_odd_optimizers_of_dcp_block_nothing_beside_them(
    optimizer: dict[str, Any], tmp_path: Path
) -> None:
    weights = {"w": torch.arange(3.0)}
    dcp_save({"model": weights, "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp")
    assert same(ckpipe.load(tmp_path / "dcp", include=["model"]).state, {"model": weights})


@pytest.mark.usefixtures("unharmed")
@pytest.mark.sample(6)
@pytest.mark.parametrize("lie", MALFORMED)
def test_pickles_that_misuse_placeholders_are_malformed(lie: str, tmp_path: Path) -> None:
    hostile(tmp_path / "theirs", x=MALFORMED[lie])
    assert refused(tmp_path / "theirs", InvalidManifest, "/state.pt").key is not None


def test_a_file_that_is_one_unknown_object_is_refused_by_its_place(tmp_path: Path) -> None:
    torch.save(Mark(tmp_path / MARK), tmp_path / "mark.pt")
    with pytest.raises(UnsupportedState, match=r"mark\.pt holds an object of '__builtin__\.eval'"):
        ckpipe.load(tmp_path / "mark.pt")
    assert not (tmp_path / MARK).exists()
