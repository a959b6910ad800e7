"""Incremental saves of every kind of state: what rests is linked, and each checkpoint is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.errors import PermissionDenied
from ckpipe.testing.wrappers import Operation
from tests.support.linked_saves import (
    Links,
    change,
    check_stored_values,
    content,
    step,
    tensor_bytes,
)
from tests.support.pipelines import Stores, loaded_state
from tests.support.rank_pipelines import ranks
from tests.support.sampling import EVERY, SEED
from tests.support.stored_files import crc32c
from tests.support.wrapper_tensors import CONTEXT, Scaled

MEBIBYTE = 1 << 20
SAVES = 5


@dataclass
class Subject:
    """A state, the optimizer that owns some of its tensors, and memory of the others."""

    state: dict[str, Any]
    optimizer: torch.optim.Optimizer
    memory: list[torch.Tensor] = field(default_factory=list)

    def change(self, chance: random.Random) -> None:
        """Change at most a few tensors."""
        step(self.optimizer, chance, 0.3)
        for tensor in chance.sample(self.memory, min(len(self.memory), chance.randrange(3))):
            change(tensor, chance)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of random bytes; of bool, of truth values."""
    high = 2 if dtype == torch.bool else 256
    made = torch.empty(shape, dtype=dtype)
    raw = torch.randint(0, high, (made.nbytes,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def beside(state: dict[str, Any], memory: list[torch.Tensor]) -> Subject:
    """A state without a module, beside a parameter that is trained."""
    weight = nn.Parameter(torch.randn(300, 40))
    optimizer = torch.optim.AdamW([weight])
    state = {**state, "rests": noise(290_000), "weight": weight, "optimizer": optimizer}
    subject = Subject(state, optimizer, memory)
    step(optimizer, random.Random(0), 1)
    return subject


def plain() -> Subject:
    sizes = [300, 9000, 9000, 40_000, 262_144, 262_144, 262_144, 300_000]
    tensors = [noise(size) for size in sizes]
    nested = {"rows": tensors[:3], "others": tuple(tensors[3:]), "numbers": [1, 2.5, "text"]}
    return beside(nested, tensors)


def network() -> nn.Sequential:
    """A model whose first layers are frozen; they share no file with the others."""
    layers = [nn.Linear(520, width) for width in (520, 520, 600, 600, 90)]
    model = nn.Sequential(*layers)
    for frozen in (model[0], model[1]):
        frozen.requires_grad_(requires_grad=False)
    return model


def module() -> Subject:
    model = network()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    step(optimizer, random.Random(0), 1)
    return Subject({"model": model, "optimizer": optimizer, "epoch": 3}, optimizer)


def training() -> Subject:
    subject = module()
    state = training_state(subject.state["model"], subject.optimizer)
    return Subject({"training": state, "loss": 0.5}, subject.optimizer)


def wrappers() -> Subject:
    codes = [noise(1100, 1024, dtype=torch.int8) for _ in range(2)]
    scales = [noise(1100) for _ in codes]
    made = [Scaled(*each, CONTEXT, each[0].shape) for each in zip(codes, scales, strict=True)]
    return beside({"frozen": made[0], "other": made[1]}, [*codes, *scales])


def quantised() -> Subject:
    pytest.importorskip("torchao")
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    weight: Any = to_nf4(torch.randn(2048, 1100), block_size=64, scaler_block_size=64)
    return beside({"frozen": weight, "adapter": (own := noise(20, 1100))}, [own])


def sharing() -> Subject:
    """Tensors that are tied, strided, overlapping, and windows of memory that no tensor covers."""
    tied, strided, overlapping, window = (noise(300_000) for _ in range(4))
    state = {
        "tied": {"one": tied, "other": tied, "turned": tied.view(500, 600).t()},
        "strided": strided.view(600, 500).t(),
        "every third": noise(9000)[::3],
        "overlapping": {
            "all": overlapping,
            "rows": overlapping[100:2000],
            "last": overlapping[-9:],
        },
        "window": {"low": window[:200_000], "high": window[100_000:]},
        "spread": noise(50).expand(7, 3, -1),
    }
    return beside(state, [tied, strided, overlapping, window])


def tiny() -> Subject:
    whole = noise(20_000 if EVERY else 2000, 3)
    tensors = [each.clone() for each in whole]
    return beside({"tiny": tensors, "large": (large := noise(300_000))}, [*tensors, large])


DTYPES = (
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.uint16,
)  # fmt: skip


def dtypes() -> Subject:
    small = [noise(9000, dtype=each) for each in DTYPES]
    large = [noise(MEBIBYTE // each.itemsize + 8, dtype=each) for each in DTYPES[:5]]
    empty = [torch.empty(shape, dtype=each) for each in DTYPES for shape in ((0,), (3, 0, 2))]
    scalars = [noise(dtype=each) for each in DTYPES]
    lazy = noise(500, dtype=torch.complex64).conj()
    state = {"small": small, "large": large, "empty": empty, "scalars": scalars, "lazy": lazy}
    return beside(state, [*small, *large, *scalars])


SUBJECTS: list[Callable[[], Subject]] = [
    plain, module, training, wrappers, quantised, sharing, tiny, dtypes,
]  # fmt: skip
CELLS = [
    pytest.param(*cell, id="-".join([cell[0].__name__, *cell[1:]]))
    for cell in product(
        SUBJECTS, ("local", "global"), ("thread", "process"), ("captured", "staged", "committed")
    )
]


def settings_of(chance: random.Random, until: str) -> dict[str, Any]:
    """Draw the size of a block, and memory that holds all or a few blocks."""
    block = chance.choice([MEBIBYTE // 16, MEBIBYTE])
    roomy = until == "captured" or chance.random() < 0.7
    staging = {"block_bytes": block, **({} if roomy else {"bytes": 4 * block})}
    return {"incremental": True, "staging": staging}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("make", "plan", "worker", "until"), CELLS)
def test_each_checkpoint_has_its_own_values(
    make: Callable[[], Subject],
    plan: Any,
    worker: Any,
    until: Any,
    root: Path,
    request: pytest.FixtureRequest,
) -> None:
    chance = random.Random(f"{SEED} {request.node.name}")
    torch.manual_seed(chance.randrange(1 << 32))
    subject, links = make(), Links(root)
    saved: dict[str, dict[str, Any]] = {}
    fields = settings_of(chance, until)
    opened = ckpipe.SyncPipeline(
        root, guard=subject.optimizer, plan=plan, worker=worker, pickle="allow", **fields
    )
    with opened as pipeline:
        for number in range(SAVES):
            before = content(subject.state)
            handle = pipeline.save(subject.state, step=number, until=until)
            subject.change(chance)
            handle.wait()
            saved[str(handle.id)] = before
            assert links.check(handle.id) == handle.report.linked_bytes
        assert links.linked, fields
        for id, values in saved.items():
            check(pipeline, root, id, values)
        *others, last = chance.sample(sorted(saved), SAVES)
        for id in others:
            pipeline.delete(id, force=True)
        check(pipeline, root, last, saved[last])
        pipeline.verify(last)


def check(pipeline: ckpipe.SyncPipeline, root: Path, id: str, values: dict[str, Any]) -> None:
    """Load a checkpoint, and read it with safetensors alone."""
    assert content(loaded_state(pipeline, id)) == values, id
    assert check_stored_values(root, id, values) > MEBIBYTE


OPTIONS: dict[str, Any] = {"incremental": True, "staging": {"block_bytes": MEBIBYTE // 16}}


def saved_bytes(pipeline: ckpipe.SyncPipeline, state: Any, saves: int = 1) -> list[tuple[int, int]]:
    """Save a state some times; return the bytes that each save linked, and those of its files."""
    reports = []
    for _ in range(saves):
        handle = pipeline.save(state)
        handle.wait()
        reports.append(handle.report)
    return [(each.linked_bytes, each.bytes) for each in reports]


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_first_save_after_a_restart_links(root: Path, worker: Any) -> None:
    state: dict[str, Any] = {"large": [noise(300_000) for _ in range(3)], "small": noise(300)}
    with ckpipe.SyncPipeline(root, worker=worker, **OPTIONS) as pipeline:
        (none, every), (still_none, _) = saved_bytes(pipeline, state, 2)
        assert (none, still_none) == (0, 0)
    with ckpipe.SyncPipeline(root, worker=worker, **OPTIONS) as pipeline:
        empty = [torch.empty(300_000) for _ in range(3)]
        target: dict[str, Any] = {"large": empty, "small": torch.empty(300)}
        assert pipeline.load(target) is not None
        change(target["large"][1], random.Random(SEED))
        changed = content(target)
        ((linked, _),) = saved_bytes(pipeline, target)
        assert 2 * state["large"][0].nbytes < linked < every - state["large"][0].nbytes
        assert content(loaded_state(pipeline)) == changed


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_save_that_follows_no_load_writes_all(root: Path, resume: Any) -> None:
    state = {"large": noise(300_000)}
    with ckpipe.SyncPipeline(root, **OPTIONS) as pipeline:
        saved_bytes(pipeline, state, 3)
    with ckpipe.SyncPipeline(root, resume=resume, **OPTIONS) as pipeline:
        if resume == "never":
            assert pipeline.load({"large": torch.empty(300_000)}) is None
        check_first_writes_all(saved_bytes(pipeline, state, 3))


def test_first_save_of_another_world_size_writes_all(root: Path) -> None:
    state = {"large": noise(300_000)}
    for size in (3, 2, 1):
        with ranks(str(root), size, attempt_id=f"run{size}", **OPTIONS) as pipelines:
            for each in pipelines if size < 3 else []:
                assert each.load({"large": torch.empty(300_000)}, per_rank="rank0") is not None
            found = [[saved_bytes(each, state)[0] for each in pipelines] for _ in range(3)]
            for saves in zip(*found, strict=True):
                check_first_writes_all(saves)


def check_first_writes_all(saves: Sequence[tuple[int, int]]) -> None:
    """Check that a run links only from its third save on."""
    (first, _), (second, _), (third, every) = saves
    assert first == second == 0
    assert third == every


def changed_structure(state: dict[str, Any], what: str, chance: random.Random) -> dict[str, Any]:
    """Add, remove, resize or move a tensor of a state."""
    names = [name for name in state if name != "stays"]
    match what:
        case "added":
            return {f"new {len(state)}": noise(chance.choice([300, 300_000])), **state}
        case "removed":
            return {name: each for name, each in state.items() if name != names[0]}
        case "resized":
            return {**state, names[-1]: noise(chance.choice([299, 300_001, 262_144]))}
        case _:
            return {name: state[name] for name in chance.sample(list(state), len(state))}


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_files_with_the_same_header_link_after_the_structure_has_changed(
    root: Path, chance: random.Random, worker: Any
) -> None:
    # A tensor of a size of its own has a file of its own in each of these structures.
    state = {f"t{n}": noise(size) for n, size in enumerate([300, 262_144, 262_144, 300_000, 9000])}
    state["stays"] = noise(280_000)
    links, saved = Links(root), {}
    with ckpipe.SyncPipeline(root, worker=worker, **OPTIONS) as pipeline:
        for number, what in enumerate(["", "", *chance.sample(CHANGES, len(CHANGES)), ""]):
            state = changed_structure(state, what, chance) if what else state
            handle = pipeline.save(state, step=number)
            handle.wait()
            saved[str(handle.id)] = content(state)
            linked = links.check(handle.id)
            assert linked == handle.report.linked_bytes
            assert number < 2 or linked > state["stays"].nbytes, what
        for id, values in saved.items():
            check(pipeline, root, id, values)


CHANGES = ["added", "removed", "resized", "moved"]


@pytest.mark.parametrize("block", [MEBIBYTE // 16, MEBIBYTE])
def test_bytes_with_the_same_checksums_are_written(root: Path, block: int) -> None:
    tensor, chance = noise(3 * MEBIBYTE // 4), random.Random(SEED)
    with ckpipe.SyncPipeline(root, incremental=True, staging={"block_bytes": block}) as pipeline:
        saved_bytes(pipeline, {"w": tensor}, 3)
        before = tensor.clone()
        while torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)) or (
            crc32c(tensor_bytes(tensor)[2]) != crc32c(tensor_bytes(before)[2])
        ):
            change(tensor.copy_(before), chance)
        expected = content({"w": tensor})
        saved_bytes(pipeline, {"w": tensor})
        assert content(loaded_state(pipeline)) == expected
        (values,) = load_file(next(root.glob(f"{pipeline.latest().id}/*"))).values()  # type: ignore[union-attr]
        assert tensor_bytes(values) == expected["w"]


def is_commit(operation: Operation) -> bool:
    return operation.verb == "put" and operation.key.endswith(".json")


def test_save_that_failed_is_no_source(store: Stores, chance: random.Random) -> None:
    state = {"rests": noise(280_000), "moves": noise(300_000)}
    with ckpipe.SyncPipeline(store.url, **OPTIONS) as pipeline:
        saved_bytes(pipeline, state, 3)
        change(state["moves"], chance)
        store.faulty.fail(PermissionDenied("no"), is_commit, times=None)
        for _ in range(2):
            with pytest.raises(PermissionDenied):
                saved_bytes(pipeline, state)
        store.faulty.heal()
        ((linked, every),) = saved_bytes(pipeline, state)
        assert state["rests"].nbytes < linked < every - state["moves"].nbytes
        assert content(loaded_state(pipeline)) == content(state)
