"""Runs in the order of torchtitan's Trainer, with its own parts, which a case may kill.

The trainer itself needs an accelerator. As a script this is a process that has imported torchtitan
and forks the ranks of each case.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

import ckpipe
from ckpipe.errors import CheckpointNotFound, UsageError
from ckpipe.integrations.torchtitan import CkpipeCheckpointManager
from ckpipe.testing import SlowBackend
from ckpipe_local import LocalBackend
from tests.integrations.trainer_ranks import begin_rank, whole
from tests.support.fork_server import Case, serve
from tests.support.killed_runs import die, mortal_backend

STEPS, INTERVAL = 20, 3


class Samples(IterableDataset[Any]):
    """Endless samples of a rank, which go on where a state says."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.count += 1
            yield torch.full((4,), float(self.count % 7 + 10 * self.rank))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Adapter(BaseStateDictAdapter):
    """Gives each weight another name."""

    def __init__(self) -> None:
        self.fqn_to_index_mapping, self.hf_assets_path = None, None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        self.from_quantized = from_quantized
        return HuggingFaceStorageReader(path)


class Run:
    """The parts of a trainer that its checkpoint manager sees, and its loop."""

    def __init__(self, case: Case, kind: Any = CkpipeCheckpointManager) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.step, self.ntokens_seen, self.adapter = 0, 0, Adapter()
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        config: Any = default_adamw(lr=0.05)
        config.implementation = "for-loop"
        self.optimizers = config.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        samples = Samples(self.rank)
        self.loader = ParallelAwareDataloader(
            samples, self.rank, dist.get_world_size(), batch_size=2
        )
        torch.manual_seed(8 + self.rank)
        fields = {"interval": INTERVAL, "folder": "ckpt", **case.get("fields", {})}
        if kind is CkpipeCheckpointManager:
            fields["settings"] = {"staging": {"block_bytes": 65536}, **case.get("settings", {})}
        self.checkpointer = kind.Config(enable=True, **fields).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=self.adapter if case.get("adapter", True) else None,
            base_folder=case["out"],
        )
        self.losses: list[float] = []
        self.seen: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, steps: int = STEPS, step: int = -1) -> bool:
        loaded: bool = self.checkpointer.load(step=step)
        batches = iter(self.loader)
        while self.step < steps:
            self.step += 1
            inputs = next(batches)
            self.ntokens_seen += inputs.numel()
            self.optimizers.zero_grad()
            loss = (self.model(inputs) - inputs.sum(1, keepdim=True) / 40).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.seen.append(inputs[:, 0].tolist())
            self.losses.append(loss.item())
            self.checkpointer.save(self.step, last_step=self.step == steps)
            self.end_here()
        self.checkpointer.close()
        return loaded

    def end_here(self) -> None:
        if self.step == self.case.get("dies"):
            self.checkpointer.maybe_wait_for_saving()
            dist.barrier()
            die()

    def outcome(self) -> dict[str, Any]:
        return {
            "weights": whole(self.model.state_dict()),
            "optimizer": whole(self.optimizers.state_dict()),
            "schedule": self.schedulers.state_dict(),
            "counters": self.state_dict(),
            "random": torch.rand(1).item(),
            "losses": self.losses,
            "seen": self.seen,
        }


def train(case: Case) -> None:
    """Go on from the newest checkpoint to the end, and note all that it has come to."""
    if case.get("fields", {}).get("folder", "").startswith("mortal"):
        killed = case.get("victim") == dist.get_rank()
        mortal_backend(case if killed else {"root": case["root"]})
    run = Run(case)
    run.train()
    torch.save(run.outcome(), f"{case['out']}.result-{dist.get_rank()}")


def weights(run: Run) -> dict[str, Any]:
    return dict(whole(run.model.state_dict()))


def of(case: Case, name: str, **more: Any) -> Case:
    folder = Path(case["out"]) / name
    return {**case, "out": str(folder), "root": str(folder / "ckpt"), **more}


def settings_keep_their_meaning(case: Case) -> None:
    one = of(case, "one", fields={"keep_latest_k": 2, "enable_first_step_checkpoint": True})
    run = Run(one)
    assert not run.train(2)
    run = Run(one)
    assert run.train(14)
    dist.barrier()
    # The checkpoint that a run has resumed from stays.
    with ckpipe.SyncPipeline(one["root"], read_only=True, solo=True) as pipeline:
        assert {info.step for info in pipeline.steps() if info.complete} == {1, 9, 12}
    # The last save is the model alone, in a root of its own.
    expected = weights(run)
    target = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    assert ckpipe.load(f"{one['root']}-last", target).step == 14
    assert all(map(torch.equal, target["model"].values(), expected.values()))
    # The rest goes on from the newest whole one, or from one that is named.
    run = Run({**one, "fields": {"load_only": True, "exclude_from_loading": ["optimizer"]}})
    assert run.checkpointer.load(9)
    assert run.step == 9
    assert not run.optimizers.optimizers[0].state
    assert not run.checkpointer.save(9, last_step=True)
    with pytest.raises(CheckpointNotFound):
        run.checkpointer.load(5)
    run.checkpointer.close()
    with pytest.raises(UsageError, match="other"):
        Run({**one, "fields": {"exclude_from_loading": ["other"]}})
    run = Run(of(case, "new", settings={"resume": "must"}))
    with pytest.raises(CheckpointNotFound):
        run.checkpointer.load()
    run.checkpointer.close()


def settings_of_ckpipe_hold(case: Case) -> None:
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpipe").addHandler(handler)
    logging.getLogger("ckpipe").setLevel(logging.INFO)
    one = of(case, "one", settings={"keep_last": 1})
    Run(one).train(8)
    dist.barrier()
    # Its rules decide in place of keep_latest_k.
    with ckpipe.SyncPipeline(one["root"], read_only=True, solo=True) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == [6]
    for excluded, data in (([], "the loader has its saved state"), (["dataloader"], "")):
        said.clear()
        run = Run({**one, "fields": {"exclude_from_loading": excluded, "load_only": True}})
        assert run.checkpointer.load()
        run.checkpointer.close()
        lines = [each for each in said if "resumed step 6 from" in each]
        assert [each.partition(": ")[2] for each in lines] == [data] * (run.rank == 0)
    with pytest.raises(UsageError, match="The setting initial has no effect with torchtitan"):
        Run({**one, "settings": {"initial": "weights"}})
    os.environ["CKPIPE_PREEMPTION"] = "1"
    with pytest.raises(UsageError, match=r"\(from CKPIPE_PREEMPTION\) has no effect"):
        Run(one)


def first_weights_are_loaded(case: Case) -> None:
    source = of(case, "source", fields={"last_save_model_only": False})
    run = Run(source)
    run.train(4)
    own = Run(of(case, "own"), CheckpointManager)
    own.train(3)
    assert Path(own.checkpointer.folder, "step-3").is_dir()
    for path, expected in (
        (source["root"], weights(run)),
        (f"{own.checkpointer.folder}/step-3", None),
    ):
        fields = {"initial_load_path": path}
        again = Run(of(case, path[-4:], fields=fields))
        assert again.checkpointer.load()
        assert again.step == 0
        assert not again.optimizers.optimizers[0].state
        if expected is None:
            target = own.checkpointer.states["model"].state_dict()
            load_dcp(target, checkpoint_id=path)
            expected = whole(target)
        assert all(map(torch.equal, weights(again).values(), expected.values()))
        again.checkpointer.close()


def weights_of_hugging_face_come_and_go(case: Case) -> None:
    fields = {"last_save_in_hf": True, "export_dtype": "bfloat16"}
    one = of(case, "one", fields=fields)
    run = Run(one)
    run.train(4)
    dist.barrier()
    (file,) = Path(f"{one['root']}-last").rglob("model*.safetensors")
    path = {"initial_load_path": str(file.parent), "initial_load_in_hf": True}
    again = Run(of(case, "again", fields={**path, "initial_load_in_hf_quantized": True}))
    assert again.checkpointer.load()
    assert again.adapter.from_quantized  # it dequantises, if it has the code
    expected = [each.bfloat16().float() for each in weights(run).values()]
    assert all(map(torch.equal, weights(again).values(), expected))
    again.checkpointer.close()
    with pytest.raises(UsageError, match="needs a sd_adapter"):
        Run(of(case, "none", adapter=False, fields=fields))


def last_weights_begin_a_run(case: Case) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"export_dtype": "bfloat16"}, {"last_save_in_hf": True, "export_dtype": "float16"},
    ]  # fmt: skip
    for number, saved in enumerate(kinds):
        one = of(case, f"one-{number}", fields=saved)
        Run(one).train(4)
        dist.barrier()
        run = Run(one)
        run.train(8)  # the later one of two saves of a last step counts
        dist.barrier()
        dtype = getattr(torch, saved.get("export_dtype", "float32"))
        expected = [each.to(dtype).float() for each in weights(run).values()]
        root, in_hf = f"{one['root']}-last", "last_save_in_hf" in saved
        for asked in ({}, {"initial_load_in_hf": True})[: 1 + in_hf]:
            fields = {"initial_load_path": root, **asked}
            again = Run(of(case, f"again-{number}{len(asked)}", fields=fields))
            assert again.checkpointer.load()
            assert again.step == 0
            assert all(map(torch.equal, weights(again).values(), expected))
            again.train(2)
        for more, text in (
            ({"fields": {"initial_load_path": root, "initial_load_model_only": False}}, "only"),
            ({"fields": {"initial_load_path": root}, "adapter": False}, "no sd_adapter"),
        ):
            again = Run(of(case, f"refused-{number}-{len(more)}", **more))
            refused = in_hf or text == "only"
            with pytest.raises(UsageError, match=text) if refused else nullcontext():
                again.checkpointer.load()
            again.checkpointer.close()


def mistakes_are_told_by_the_config(case: Case) -> None:
    kind: Any = CkpipeCheckpointManager.Config
    assert kind(async_mode="Async").async_mode == "async"  # as torchtitan's own takes it
    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"async_mode": "asinc"}, "Invalid async_mode: 'asinc'"),
        *(({"async_mode": each}, "Invalid async_mode") for each in (None, 3, ["async"])),
        ({"export_dtype": "float64"}, "Invalid export_dtype: 'float64'"),
        *(({"export_dtype": each}, "Invalid export_dtype") for each in (None, 3, ["float32"])),
        *(({"settings": each}, "Invalid settings") for each in (None, [1], "keep_last", {3: 4})),
        ({"settings": {"keep_lst": 3}}, "keep_lst"),
        ({"settings": {"save_every_steps": 3}}, "save_every_steps has no effect"),
        ({"interval": 0}, "interval"),
    )
    for fields, text in mistakes:
        with pytest.raises(ValueError, match=text):
            kind(enable=True, **fields)


def a_load_waits_for_its_save(case: Case) -> None:
    slow = SlowBackend(LocalBackend(case["root"]), latency=0.01)
    ckpipe.register_backend("slow", lambda url: slow)
    for number, mode in enumerate(("async", "async_with_pinned_mem")):
        fields = {"async_mode": mode, "interval": 1, "folder": "slow://store"}
        run = Run(of(case, mode, fields=fields))
        for step, asked in ((1, -1), (2, -1), (3, 3), (3, 3)):
            step, asked = step + 10 * number, asked if asked < 0 else asked + 10 * number
            run.step = step
            run.ntokens_seen += 1
            seen = run.ntokens_seen
            assert run.checkpointer.save(step)
            run.checkpointer.maybe_wait_for_staging()
            run.ntokens_seen = -1
            assert run.checkpointer.load(asked)
            assert (run.step, run.ntokens_seen) == (step, seen)
            dist.barrier()  # a rank that loads sees no later save of another
        run.checkpointer.close()


def _live(case: Case, rank: int, number: int) -> None:
    begin_rank(case, rank, number)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    vars(sys.modules[__name__])[case["do"]](case)


if __name__ == "__main__":
    serve(_live)
