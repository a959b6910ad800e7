"""Saves that return before all is copied: what they wait for, and who waits for them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import nn

import ckpipe
from ckpipe import errors
from tests.inner.slow_copies import SlowCopies
from tests.support.actors import PATIENCE, DaemonThreads, is_free
from tests.support.pipelines import Stores, awaited_state, loaded_state

BLOCK = 1 << 16
MANY = 3000
"""Tensors that are copied at once, since so many cost more to watch than to copy."""


PATIENT: dict[str, Any] = {"lock": {"max_step_wait_seconds": PATIENCE}}
"""A step waits for as long as a copy takes, on a machine that is busy, too."""


class Training:
    """A small model in which everything holds the number of the step."""

    def __init__(self, width: int = 200) -> None:
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.average = torch.zeros(width, width)
        self.fill(0)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        self.optimizer.step()
        self.fill(0)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "average": self.average}

    @torch.no_grad()
    def fill(self, value: float) -> None:
        for tensor in (*self.model.parameters(), self.average):
            tensor.fill_(value)
        for buffer in self.model.buffers():
            buffer.fill_(value)

    @torch.no_grad()
    def forward(self) -> None:
        """Change what a forward pass and an average may change: all that no optimizer owns."""
        for tensor in (*self.model.buffers(), self.average):
            tensor.add_(1)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    return SlowCopies(monkeypatch)


def open_pipeline(store: Stores, training: Training, **fields: Any) -> ckpipe.SyncPipeline:
    staging = {"block_bytes": BLOCK}
    return ckpipe.SyncPipeline(
        store.url, guard=training.optimizer, staging=staging, **PATIENT | fields
    )


def saved_numbers(state: Any) -> set[float]:
    """The values of all tensors that hold the number of a step."""
    tensors = [*state["model"].values(), state["average"]]
    return {value for tensor in tensors for value in tensor.float().unique().tolist()}


def load(pipeline: ckpipe.SyncPipeline, step: int) -> Any:
    return loaded_state(pipeline, step)


def begun(
    pipeline: ckpipe.SyncPipeline, slow: SlowCopies, state: Any, step: int = 0
) -> ckpipe.SyncSaveHandle:
    """Save until captured, and wait until the rest is about to be copied."""
    handle = pipeline.save(state, step=step, until="captured")
    assert slow.reached.wait(PATIENCE)
    return handle


def test_returns_before_what_the_optimizer_owns_is_copied(store: Stores, slow: SlowCopies) -> None:
    training = Training()
    with open_pipeline(store, training) as pipeline:
        handle = begun(pipeline, slow, training.state)
        assert handle.status == "capturing"
        assert handle.report.captured_seconds is not None
        assert handle.report.staged_seconds is None
        training.forward()
        with pytest.raises(TimeoutError):
            handle.wait_staged(0)
        slow.go_on.set()
        handle.wait()
        assert saved_numbers(load(pipeline, 0)) == {0.0}


def test_a_guarded_step_waits_for_the_rest(
    store: Stores, slow: SlowCopies, threads: DaemonThreads
) -> None:
    training = Training()
    with open_pipeline(store, training) as pipeline:
        handle = begun(pipeline, slow, training.state)
        step = threads.waiting(pipeline.lock, training.optimizer.step)
        assert not step.done()
        slow.go_on.set()
        step.result(PATIENCE)
        handle.wait()
        assert saved_numbers(load(pipeline, 0)) == {0.0}
        pipeline.save(training.state, step=1, until="committed")
        assert len(saved_numbers(load(pipeline, 1))) > 1


@pytest.mark.parametrize("bracket", ["step", "mutating"])
def test_a_step_that_would_wait_too_long_goes_on_and_the_save_fails(
    store: Stores, slow: SlowCopies, bracket: str
) -> None:
    training = Training()
    with open_pipeline(store, training, lock={"max_step_wait_seconds": 0.05}) as pipeline:
        handle = begun(pipeline, slow, training.state, step=3)
        if bracket == "step":
            training.optimizer.step()
        else:
            with pipeline.lock.mutating():
                training.fill(9)
        slow.go_on.set()
        with pytest.raises(errors.CaptureTooSlow, match=r"0\.05 s.*step 3"):
            handle.wait()
        assert handle.status == "failed"
        assert [each for each in pipeline.steps() if each.complete] == []
        assert is_free(pipeline.lock)
        pipeline.save(training.state, step=4, until="captured").wait()
        assert [each.step for each in pipeline.steps()] == [4]


def test_a_captured_save_holds_its_own_step(store: Stores) -> None:
    weight = torch.nn.Parameter(torch.zeros(500_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    with ckpipe.SyncPipeline(store.url, guard=optimizer) as pipeline:
        for step in range(3):
            handle = pipeline.save({"weight": weight}, step=step, until="captured")
            optimizer.step()
        handle.wait()
        for step in range(3):
            expected = torch.full_like(weight, -float(step))
            assert torch.equal(loaded_state(pipeline, step)["weight"], expected)


async def test_a_coroutine_that_never_awaits_trains_on(store: Stores) -> None:
    training = Training()
    async with ckpipe.Pipeline(store.url, guard=training.optimizer, **PATIENT) as pipeline:
        handles = []
        for number in range(5):
            handle = await pipeline.save(training.state, step=number, until="captured")
            handles.append(handle)
            training.forward()
            training.optimizer.step()  # blocks this loop, on which nothing of the save depends
            with pipeline.lock.mutating():
                training.fill(number + 1)
        for number, handle in enumerate(handles):
            await handle
            assert saved_numbers(await awaited_state(pipeline, number)) == {float(number)}


async def test_a_save_that_a_task_began_waits_for_a_step_of_its_thread(store: Stores) -> None:
    training = Training()

    def wait_for_the_save(*_: Any) -> None:
        while pipeline.statistics().saves != {"capturing": 1}:
            threading.Event().wait(0.001)

    async with ckpipe.Pipeline(store.url, guard=training.optimizer) as pipeline:
        task = asyncio.create_task(pipeline.save(training.state, step=0))
        await asyncio.sleep(0)
        training.optimizer.register_step_post_hook(wait_for_the_save)
        training.optimizer.step()
        await (await task)
        found = await awaited_state(pipeline, 0)
        weight = next(training.model.parameters())
        assert torch.equal(found["model"]["0.weight"], weight)


async def test_handles_wait_for_it_too(store: Stores) -> None:
    training = Training()
    async with ckpipe.Pipeline(store.url, guard=training.optimizer) as pipeline:
        handle = await pipeline.save(training.state, until="captured")
        await asyncio.gather(handle.captured(), handle.staged(), handle.committed())
        assert handle.report.captured_seconds is not None
        plain = await pipeline.save(training.state)
        await plain.captured()
        assert plain.report.captured_seconds is None


def test_is_refused_without_a_guard_and_by_a_small_budget(store: Stores) -> None:
    training = Training()
    with (
        ckpipe.SyncPipeline(store.url) as pipeline,
        pytest.raises(errors.UsageError, match="guarded optimizer"),
    ):
        pipeline.save(training.state, until="captured")
    staging = {"bytes": 2 * BLOCK, "block_bytes": BLOCK}
    with ckpipe.SyncPipeline(store.url, guard=training.optimizer, staging=staging) as pipeline:
        for _ in range(2):  # with a plan to be made, and with one that is there
            with pytest.raises(errors.UsageError, match="staging"):
                pipeline.save(training.state, until="captured")
        pipeline.save(training.state, until="committed")
        with pytest.raises(errors.UsageError, match="captured"):
            pipeline.save(training.state, until="later")  # type: ignore[arg-type]


def test_a_state_without_tensors_is_saved(store: Stores) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ckpipe.SyncPipeline(store.url, guard=optimizer) as pipeline:
        for step in range(2):
            pipeline.save({"optimizer": optimizer}, step=step, until="captured").wait()
        assert load(pipeline, 1)["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_many_small_tensors_are_copied_before_it_returns(store: Stores, slow: SlowCopies) -> None:
    parameters = [torch.zeros(8, requires_grad=True) for _ in range(MANY)]
    optimizer = torch.optim.SGD(parameters)
    with ckpipe.SyncPipeline(store.url, guard=optimizer, **PATIENT) as pipeline:
        state = {"parameters": parameters, "average": torch.zeros(32 << 20, dtype=torch.uint8)}
        for step in range(2):  # the second finds all as it was
            handle = pipeline.save(state, step=step, until="captured")
            with torch.no_grad():
                torch._foreach_add_(parameters, 1)
            optimizer.step()  # waits for nothing
            handle.wait(PATIENCE)
            assert handle.report.captured_seconds is not None
            found = torch.stack(load(pipeline, step)["parameters"])
            assert bool((found == step).all())
    assert not slow.reached.is_set()


def test_small_tensors_without_an_owner_do_not_keep_large_ones_from_being_copied_late(
    store: Stores, slow: SlowCopies
) -> None:
    training = Training()
    others = [torch.zeros(8) for _ in range(MANY)]
    with open_pipeline(store, training) as pipeline:
        handle = begun(pipeline, slow, training.state | {"others": others})
        assert handle.report.staged_seconds is None
        slow.go_on.set()
        handle.wait()
        assert saved_numbers(load(pipeline, 0)) == {0.0}


def test_a_parameter_changed_outside_of_the_step_fails_the_save(
    store: Stores, slow: SlowCopies
) -> None:
    training = Training()
    with open_pipeline(store, training) as pipeline:
        handle = begun(pipeline, slow, training.state)
        with torch.no_grad():
            training.model[0].weight.clamp_(-1, 1)  # type: ignore[operator]
        slow.go_on.set()
        with pytest.raises(errors.StateChanged, match=r"0\.weight"):
            handle.wait()
        assert is_free(pipeline.lock)


@pytest.mark.parametrize("width", [200, 20])  # copied one by one, and many in one call
@pytest.mark.parametrize("change", ["data", "resize_"])
def test_memory_that_is_exchanged_outside_of_the_step_fails_the_save(
    store: Stores, slow: SlowCopies, change: str, width: int
) -> None:
    training = Training(width)
    with open_pipeline(store, training) as pipeline:
        handle = begun(pipeline, slow, {"optimizer": training.optimizer})
        weight = next(training.model.parameters())
        momentum = training.optimizer.state[weight]["momentum_buffer"]
        if change == "data":
            momentum.data = torch.ones_like(momentum)  # no version counts this
        else:
            momentum.resize_(2 * width, 2 * width)
        slow.go_on.set()
        with pytest.raises(errors.StateChanged, match="momentum_buffer"):
            handle.wait()
        assert is_free(pipeline.lock)


@pytest.mark.parametrize("width", [200, 20])  # copied one by one, and many in one call
@pytest.mark.parametrize(
    "uncounted",
    [
        lambda weight: weight.data,
        lambda weight: weight.detach().numpy(),
        lambda weight: torch.utils.dlpack.from_dlpack(weight.detach()).data,
    ],
    ids=["data", "numpy", "dlpack"],
)
def test_writes_that_torch_does_not_count_fail_the_save(
    store: Stores, slow: SlowCopies, uncounted: Any, width: int
) -> None:
    training = Training(width)
    weight, *_ = weights = list(training.model.parameters())
    state = {"weights": weights, "optimizer": training.optimizer}
    with open_pipeline(store, training) as pipeline:
        for step in range(2):  # with a plan to be made, and with one that is there
            slow.reached.clear()
            slow.go_on.clear()
            handle = begun(pipeline, slow, state, step=step)
            version = weight._version
            uncounted(weight)[:] = step + 5.0  # as a swap of averaged weights does
            assert weight._version == version
            slow.go_on.set()
            with pytest.raises(errors.StateChanged, match=r"weights\.0"):
                handle.wait()
        assert is_free(pipeline.lock)
        pipeline.save(state, step=2, until="captured").wait()
        assert torch.equal(load(pipeline, 2)["weights"][0], weight)


def test_a_cancelled_save_lets_the_trainer_go(store: Stores, slow: SlowCopies) -> None:
    training = Training()
    with open_pipeline(store, training) as pipeline:
        handle = begun(pipeline, slow, training.state)
        slow.go_on.set()
        handle.cancel()
        training.optimizer.step()
        assert is_free(pipeline.lock)
        assert handle.status in ("cancelled", "committed")


def test_leaving_on_an_exception_finishes_a_save_that_was_captured(
    store: Stores, slow: SlowCopies
) -> None:
    training = Training()
    handles: list[ckpipe.SyncSaveHandle] = []

    def train() -> None:
        with open_pipeline(store, training) as pipeline:
            handles.append(pipeline.save(training.state, step=0, until="captured"))
            slow.go_on.set()
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert handles[0].status == "committed"


def test_a_load_breaks_no_copy_that_it_waits_for(
    store: Stores, slow: SlowCopies, threads: DaemonThreads
) -> None:
    training = Training()
    with open_pipeline(store, training, lock={"max_step_wait_seconds": 1e-6}) as pipeline:
        slow.go_on.set()
        pipeline.save(training.state, step=0).wait()
        training.fill(1)
        slow.go_on.clear()
        handle = begun(pipeline, slow, training.state, step=1)
        loading = threads.waiting(pipeline.lock, pipeline.load, training.state, step=0)
        pipeline.load(step=0)  # which is none of the state's business
        assert not loading.done()
        slow.go_on.set()
        loading.result(PATIENCE)
        handle.wait()
        assert saved_numbers(load(pipeline, 1)) == {1.0}
        assert saved_numbers({**training.state, "model": training.model.state_dict()}) == {0.0}


# ---- who owns what ----


def committed(pipeline: ckpipe.SyncPipeline, handle: ckpipe.SyncSaveHandle) -> Any:
    handle.wait()
    return load(pipeline, handle.step)


def test_a_learning_rate_that_a_scheduler_writes_to_is_copied_at_once(
    store: Stores, slow: SlowCopies
) -> None:
    model = nn.Linear(100, 100)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with ckpipe.SyncPipeline(store.url, guard=optimizer) as pipeline:
        for step in range(3):
            loss = model(torch.ones(2, 100)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            before = [each.detach().clone() for each in model.parameters()]
            expected = float(optimizer.param_groups[0]["lr"])
            slow.reached.clear()
            slow.go_on.clear()
            handle = begun(pipeline, slow, state, step=step)
            optimizer.zero_grad(set_to_none=False)
            scheduler.step()
            slow.go_on.set()
            found = committed(pipeline, handle)
            assert float(found["optimizer"]["param_groups"][0]["lr"]) == expected
            assert all(map(torch.equal, found["model"].values(), before))


def test_what_another_optimizer_owns_is_copied_at_once(store: Stores, slow: SlowCopies) -> None:
    mine, other = Training(), Training()
    with open_pipeline(store, mine) as pipeline:
        handle = begun(pipeline, slow, [mine.state, other.state])
        other.optimizer.step()
        slow.go_on.set()
        handle.wait()
        for each in load(pipeline, 0):
            assert saved_numbers(each) == {0.0}


def test_tensors_whose_changes_torch_does_not_count_are_captured(store: Stores) -> None:
    training = Training()
    with torch.inference_mode():
        uncounted = torch.full((50,), 7.0)
    parameter = next(training.model.parameters())
    training.optimizer.state[parameter]["uncounted"] = uncounted
    with open_pipeline(store, training) as pipeline:
        handle = pipeline.save(training.state, step=0, until="captured")
        found = committed(pipeline, handle)
        assert torch.equal(found["optimizer"]["state"][0]["uncounted"], uncounted)


def test_a_buffer_that_reaches_into_a_parameter_is_copied_at_once(
    store: Stores, slow: SlowCopies
) -> None:
    flat = torch.zeros(60_000)
    parameter = nn.Parameter(flat[:40_000])
    optimizer = torch.optim.SGD([parameter])
    with ckpipe.SyncPipeline(store.url, guard=optimizer) as pipeline:
        handle = pipeline.save({"parameter": parameter, "flat": flat}, step=0, until="captured")
        flat.data[50_000:].fill_(1)  # torch counts changes of a tensor and its views together
        slow.go_on.set()
        found = committed(pipeline, handle)
        assert found["flat"].eq(0).all()
        assert found["parameter"].data_ptr() == found["flat"].data_ptr()


def test_an_embedding_that_writes_in_its_forward_pass_fails_the_save(
    store: Stores, slow: SlowCopies
) -> None:
    embedding = nn.Embedding(100, 8, max_norm=0.1)
    optimizer = torch.optim.SGD(embedding.parameters())
    with ckpipe.SyncPipeline(store.url, guard=optimizer) as pipeline:
        handle = begun(pipeline, slow, {"model": embedding})
        embedding(torch.arange(100))
        slow.go_on.set()
        with pytest.raises(errors.StateChanged, match="max_norm"):
            handle.wait()


def test_closures_and_several_optimizers(store: Stores) -> None:
    model = nn.ModuleList(nn.Linear(30, 30) for _ in range(2))
    first = torch.optim.LBFGS(model[0].parameters(), max_iter=3)
    second = torch.optim.AdamW(model[1].parameters(), foreach=True)

    def closure() -> Any:
        model.zero_grad()
        loss = model[1](model[0](torch.ones(2, 30))).square().sum()
        loss.backward()
        return loss

    state = {"model": model, "first": first, "second": second}
    with ckpipe.SyncPipeline(store.url, guard=[first, second], **PATIENT) as pipeline:
        for step in range(4):
            wanted = {name: each.clone() for name, each in model.state_dict().items()}
            handle = pipeline.save(state, step=step, until="captured")
            first.step(closure)  # type: ignore[no-untyped-call]
            second.step()
            found = committed(pipeline, handle)["model"]
            assert all(torch.equal(found[name], each) for name, each in wanted.items())


# ---- who waits for whom ----


@pytest.mark.parametrize("until_", ["captured", "staged"])
def test_a_backward_under_the_lock_and_a_step_elsewhere_go_on(
    store: Stores, threads: DaemonThreads, until_: Any
) -> None:
    """One thread steps from within its backward pass, another steps by itself, a third saves."""
    training, other = Training(50), Training(50)
    weight = training.model[0].weight
    assert isinstance(weight, nn.Parameter)
    step_at_once: Any = weight.register_post_accumulate_grad_hook
    step_at_once(lambda _: training.optimizer.step())
    rounds = 30

    with open_pipeline(store, training, staging_bytes=64 * BLOCK) as pipeline:
        pipeline.guard(other.optimizer)

        def backward() -> None:
            for _ in range(rounds):
                with pipeline.lock.mutating():
                    training.model(torch.ones(2, 50)).sum().backward()

        def step() -> None:
            for _ in range(rounds):
                other.optimizer.step()

        working = [threads.submit(backward), threads.submit(step)]
        handles = []
        while not all(each.done() for each in working):
            handles.append(pipeline.save([training.state, other.state], until=until_))
        for each in working:
            each.result(PATIENCE)
        for handle in handles:
            handle.wait()
        assert is_free(pipeline.lock)


# ---- the staged tensors ----


async def test_staged_tensors_are_lent_to_coroutines(store: Stores, slow: SlowCopies) -> None:
    training = Training()
    async with ckpipe.Pipeline(store.url, guard=training.optimizer) as pipeline:
        handle = await pipeline.save(training.state, until="captured")
        assert await asyncio.to_thread(slow.reached.wait, PATIENCE)
        with pytest.raises(errors.UsageError, match="not all copied yet"):
            await handle.staged_state().__aenter__()
        slow.go_on.set()
        await handle.staged()
        async with handle.staged_state() as lent:
            assert saved_numbers(lent) == {0.0}
        await handle


async def test_a_cancelled_save_keeps_the_lock_while_a_thread_still_reads(
    store: Stores, slow: SlowCopies
) -> None:
    training = Training()
    async with ckpipe.Pipeline(store.url, guard=training.optimizer) as pipeline:
        handle = await pipeline.save(training.state, until="captured")
        assert await asyncio.to_thread(slow.reached.wait, PATIENCE)
        cancelling = asyncio.create_task(handle.cancel())
        await asyncio.sleep(0)
        await pipeline.trim()  # comes after it on the pipeline's loop
        assert [use.side for use in pipeline.lock.statistics().holders] == ["capturing"]
        slow.go_on.set()
        await asyncio.wait_for(cancelling, PATIENCE)
        training.optimizer.step()
        assert handle.status == "cancelled"
        assert is_free(pipeline.lock)


def test_a_change_beside_a_captured_save_is_never_saved(store: Stores) -> None:
    weight = torch.nn.Parameter(torch.zeros(4_000_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with ckpipe.SyncPipeline(store.url, guard=optimizer) as pipeline:
        for step in range(3):
            handle = pipeline.save({"weight": weight}, step=step, until="captured")
            with torch.no_grad():
                weight.fill_(step + 1.0)
            try:
                handle.wait()
            except errors.StateChanged:
                continue  # as long as the copy had not ended
            assert torch.equal(load(pipeline, step)["weight"], torch.full_like(weight, float(step)))
