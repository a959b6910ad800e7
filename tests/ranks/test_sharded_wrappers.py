"""Wrapper tensors as local tensors of DTensors: each rank gets its own shard back, or a new one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import ckpipe
from ckpipe import errors
from ckpipe.distributed import training_state
from tests.support.placed_tensors import rank_of
from tests.support.stored_files import data_bytes
from tests.support.wrapper_tensors import CONTEXT, Scaled, equal, scaled

ROWS = [Shard(0)]


@pytest.fixture
def cut() -> Iterator[None]:
    """Tell how parts of the class are cut: along rows."""

    def along_rows(name: str, dim: int) -> int | None:
        assert dim == 0
        return 0

    ckpipe.register_wrapper(Scaled, cut=along_rows)
    yield
    ckpipe.register_wrapper(Scaled)


def part(
    whole: Scaled,
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    *,
    blank: bool = False,
) -> DTensor:
    """What a rank has of a wrapper whose rows are cut."""
    mesh = init_device_mesh("cpu", mesh_shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    codes, scale = whole.codes, whole.scale
    for n, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            codes, scale = codes.chunk(n)[index].clone(), scale.chunk(n)[index].clone()
    if blank:
        codes, scale = torch.zeros_like(codes), torch.zeros_like(scale)
    local = Scaled(codes, scale, whole.context, codes.shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def ranks(n: int) -> Iterator[int]:
    for rank in range(n):
        with rank_of(rank, n):
            yield rank


def save(root: Path, n: int, mesh: tuple[int, ...], placements: Sequence[Placement]) -> None:
    for _ in ranks(n):
        state = {"w": part(scaled(8), mesh, placements), "n": 1}
        with ckpipe.SyncPipeline(str(root), attempt_id="one") as pipeline:
            pipeline.save(state, step=1).wait()


def check_loads(root: Path, n: int, mesh: tuple[int, ...], placements: Sequence[Placement]) -> None:
    for rank in ranks(n):
        target = {"w": part(scaled(8), mesh, placements, blank=True), "n": 0}
        local = target["w"]._local_tensor  # type: ignore[attr-defined]
        ckpipe.load(root, target, step=1)
        assert target["w"]._local_tensor is local  # type: ignore[attr-defined]
        assert equal(local, part(scaled(8), mesh, placements)._local_tensor), rank


@pytest.mark.parametrize(
    ("n", "mesh", "placements"),
    [
        (2, (2,), ROWS),
        (3, (3,), ROWS),  # parts of different sizes
        (4, (2, 2), [Replicate(), Shard(0)]),
        (4, (4,), [Replicate()]),
        (1, (1,), ROWS),
    ],
)
def test_each_rank_gets_its_shard_back(
    tmp_path: Path, n: int, mesh: tuple[int, ...], placements: Sequence[Placement]
) -> None:
    save(tmp_path, n, mesh, placements)
    check_loads(tmp_path, n, mesh, placements)


def test_replicas_of_a_shard_are_written_once(tmp_path: Path) -> None:
    save(tmp_path, 4, (2, 2), [Replicate(), Shard(0)])
    assert sum(data_bytes(tmp_path)) == scaled(8).codes.nbytes + scaled(8).scale.nbytes


@pytest.mark.parametrize(
    ("n", "mesh", "placements"),
    [
        (1, (1,), ROWS),
        (4, (4,), ROWS),
        (2, (2,), [Replicate()]),
        (4, (2, 2), [Replicate(), Shard(0)]),
    ],
)
def test_other_shards_are_refused_by_key(
    tmp_path: Path, n: int, mesh: tuple[int, ...], placements: Sequence[Placement]
) -> None:
    save(tmp_path, 2, (2,), ROWS)
    for _ in ranks(n):
        target = {"w": part(scaled(8), mesh, placements, blank=True), "n": 0}
        with pytest.raises(errors.StructureMismatch, match="its shard") as caught:
            ckpipe.load(tmp_path, target, step=1, per_rank="rank0")
        assert caught.value.key == "w"
        assert target["n"] == 0


def test_another_order_of_ranks_is_another_shard(tmp_path: Path) -> None:
    save(tmp_path, 2, (2,), ROWS)
    for _ in ranks(2):
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [1, 0])
        local = part(scaled(8), (2,), ROWS, blank=True)._local_tensor
        size, stride = torch.Size((8, 3)), (3, 1)
        turned = DTensor.from_local(local, mesh, ROWS, run_check=False, shape=size, stride=stride)
        with pytest.raises(errors.StructureMismatch, match="its shard"):
            ckpipe.load(tmp_path, {"w": turned, "n": 0}, step=1)


def test_a_shard_is_not_made_without_a_target(tmp_path: Path) -> None:
    save(tmp_path, 2, (2,), ROWS)
    with pytest.raises(errors.StructureMismatch, match="shard of one rank") as caught:
        ckpipe.load(tmp_path, per_rank="rank0")
    assert caught.value.key == "w"


@pytest.mark.sample(5)
@pytest.mark.parametrize("loading", [1, 2, 4])
@pytest.mark.parametrize("saving", [1, 2, 4])
def test_a_class_that_tells_how_it_is_cut_loads_into_any_mesh(
    tmp_path: Path, cut: None, saving: int, loading: int
) -> None:
    save(tmp_path, saving, (saving,), ROWS)
    check_loads(tmp_path, loading, (loading,), ROWS)
    if loading == 4:
        check_loads(tmp_path, 4, (2, 2), [Shard(0), Replicate()])
    assert equal(ckpipe.load(tmp_path).state["w"], scaled(8))


def test_parts_that_are_not_equal_load_into_the_same_mesh_only(tmp_path: Path, cut: None) -> None:
    save(tmp_path, 3, (3,), ROWS)
    check_loads(tmp_path, 3, (3,), ROWS)
    for _ in ranks(2):
        target = {"w": part(scaled(8), (2,), ROWS, blank=True), "n": 0}
        with pytest.raises(errors.StructureMismatch, match="its shard"):
            ckpipe.load(tmp_path, target, step=1, per_rank="rank0")


class Momentum(torch.optim.SGD):
    """SGD whose state is made for the test."""


def trainer(mesh: tuple[int, ...], *, stepped: bool) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Module()
    whole = torch.arange(24.0).view(8, 3)
    device_mesh = init_device_mesh("cpu", mesh)
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    local = whole.chunk(mesh[0])[coordinate[0]].clone()
    weight = DTensor.from_local(local, device_mesh, ROWS, run_check=False)
    model.weight = torch.nn.Parameter(weight)
    optimizer = Momentum(model.parameters(), momentum=0.9)
    if stepped:
        state = part(scaled(8), mesh, ROWS)
        optimizer.state[model.weight] = {"momentum_buffer": state}
    return model, optimizer


@pytest.mark.parametrize("registered", [False, True])
def test_optimizer_state_is_made_for_a_new_process(
    tmp_path: Path, registered: bool, request: pytest.FixtureRequest
) -> None:
    if registered:
        request.getfixturevalue("cut")
    for _ in ranks(2):
        with ckpipe.SyncPipeline(str(tmp_path), attempt_id="one") as pipeline:
            pipeline.save({"t": training_state(*trainer((2,), stepped=True))}, step=1).wait()
    for n in (2, 4) if registered else (2,):
        for _ in ranks(n):
            model, optimizer = trainer((n,), stepped=False)
            result = ckpipe.load(tmp_path, {"t": training_state(model, optimizer)}, step=1)
            assert not result.missing
            made = optimizer.state[model.weight]["momentum_buffer"]
            assert made.placements == (Shard(0),)
            assert equal(made._local_tensor, part(scaled(8), (n,), ROWS)._local_tensor)
    assert scaled().context == CONTEXT


@pytest.mark.parametrize("saving", [1, 2])
def test_the_context_of_a_part_follows_its_size(tmp_path: Path, cut: None, saving: int) -> None:
    ckpipe.register_wrapper(Scaled, cut=lambda name, dim: dim, resize=lambda _, size: {"of": size})

    def sized(n: int, *, stepped: bool) -> tuple[torch.nn.Module, Any]:
        model, optimizer = trainer((n,), stepped=stepped)
        if stepped:
            local = optimizer.state[model.weight]["momentum_buffer"]._local_tensor
            local.context = {"of": local.shape}
        return model, optimizer

    for _ in ranks(saving):
        with ckpipe.SyncPipeline(str(tmp_path), attempt_id="one") as pipeline:
            pipeline.save({"t": training_state(*sized(saving, stepped=True))}, step=1).wait()
    whole = ckpipe.load(tmp_path).state["t"]["optimizer"]["state"]["weight"]["momentum_buffer"]
    assert equal(whole, scaled(8, context={"of": torch.Size((8, 3))}))
    for n in (1, 2, 4):
        for _ in ranks(n):
            for stepped in (False, True):
                model, optimizer = sized(n, stepped=stepped)
                if stepped:
                    optimizer.state[model.weight]["momentum_buffer"]._local_tensor.codes.zero_()
                ckpipe.load(tmp_path, {"t": training_state(model, optimizer)}, step=1)
                made = optimizer.state[model.weight]["momentum_buffer"]._local_tensor
                assert made.context == {"of": torch.Size((8 // n, 3))}
                expected = part(scaled(8, context=made.context), (n,), ROWS)
                assert equal(made, expected._local_tensor)
