"""Progress and the random number generators: what a run draws after a load."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpipe
from ckpipe import Progress, RngState
from tests.support.pipelines import load_existing
from tests.support.random_numbers import seed

pytestmark = pytest.mark.usefixtures("generators")


def drawn() -> list[float]:
    """A few numbers of every generator, of several distributions."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(random.randrange(10**12)),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        float(np.random.permutation(100)[0]),
        *torch.randn(3).tolist(),
        *torch.randperm(50)[:3].tolist(),
    ]


@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_what_is_drawn_after_a_load_is_what_would_have_been(number: int, before: int) -> None:
    seed(number)
    for _ in range(before):
        drawn()
    saved = RngState().state_dict()
    expected = [drawn(), drawn()]
    seed(number + 1 & 2**32 - 1)
    assert drawn() != expected[0]
    RngState().load_state_dict(saved)
    assert [drawn(), drawn()] == expected


def test_second_half_of_a_pair_of_normal_numbers_survives() -> None:
    # Both generators make two of these at a time, and keep one for the next call.
    seed(3)
    random.gauss(0, 1)
    np.random.standard_normal()
    saved = RngState().state_dict()
    expected = (random.gauss(0, 1), np.random.standard_normal())
    seed(4)
    RngState().load_state_dict(saved)
    assert (random.gauss(0, 1), np.random.standard_normal()) == expected


def test_it_is_shown_as_it_is_made() -> None:
    assert repr(RngState()) == "RngState()"


def test_reading_draws_nothing() -> None:
    seed(5)
    expected = drawn()
    seed(5)
    RngState().state_dict()
    assert drawn() == expected


def test_saved_states_do_not_follow_the_generators() -> None:
    seed(6)
    saved = RngState().state_dict()
    copy = pickle.loads(pickle.dumps(saved))
    drawn()
    assert torch.equal(saved["torch"], copy["torch"])
    assert np.array_equal(saved["numpy"]["state"]["key"], copy["numpy"]["state"]["key"])
    assert np.array_equal(saved["python"]["internal"], copy["python"]["internal"])


def test_generators_and_progress_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    progress = Progress(epoch=3, best=0.5, seen=[1, 2], schedule=None)
    seed(7)
    drawn()
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"rng": RngState(), "progress": progress}, step=1, until="committed")
        expected = drawn()
        seed(8)
        fresh = Progress(epoch=0, stale=True)
        assert pipeline.load({"rng": RngState(), "progress": fresh}) is not None
        assert drawn() == expected
    saved = {"epoch": 3, "best": 0.5, "seen": [1, 2], "schedule": None}
    assert vars(fresh) == saved | {"stale": True}


def test_saves_and_loads_draw_nothing(tmp_path: Path) -> None:
    seed(11)
    expected = drawn()
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        seed(11)
        for step in range(3):
            pipeline.save({"w": torch.zeros(5)}, step=step, until="committed")
        assert pipeline.load() is not None
        assert pipeline.load({"w": torch.zeros(5)}, step=2) is not None
    assert drawn() == expected


def test_generators_that_were_saved_as_arrays_are_loaded(tmp_path: Path) -> None:
    seed(12)
    version, internal, gauss = random.getstate()
    as_it_was = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "internal": np.array(internal, np.uint32), "gauss": gauss},
    }
    expected = drawn()
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"rng": as_it_was}, step=1, until="committed")
        assert pipeline.load({"rng": RngState()}) is not None
    assert drawn() == expected
    RngState().load_state_dict(as_it_was)
    assert drawn() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_generators_of_devices_come_back() -> None:
    torch.cuda.manual_seed_all(9)
    torch.randn(3, device="cuda")
    saved = RngState().state_dict()
    expected = torch.randn(3, device="cuda").tolist()
    RngState().load_state_dict(saved)
    assert torch.randn(3, device="cuda").tolist() == expected


def test_attributes_are_the_state() -> None:
    progress = Progress(epoch=1)
    progress.tokens = 5
    progress.epoch += 1
    assert progress.state_dict() == {"epoch": 2, "tokens": 5}
    assert repr(progress) == "Progress(epoch=2, tokens=5)"


def test_an_attribute_that_an_older_checkpoint_lacks_is_kept_and_named(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        older = Progress(epoch=3, dropped="later")
        pipeline.save({"progress": older, "w": torch.ones(2)}, step=1, until="committed")
        progress = Progress(epoch=0, tokens=5, seen=[1])
        state = {"progress": progress, "w": torch.zeros(2)}
        for chosen, missing in (
            (None, ("progress.tokens", "progress.seen")),
            (["w", "progress.epoch"], ()),
            (["w", "progress.epoch", "progress.tokens"], ("progress.tokens",)),
        ):
            progress.epoch = 0
            result = load_existing(pipeline, state, include=chosen, strict=chosen is None)
            assert set(result.missing) == set(missing)
            assert (progress.epoch, progress.tokens, progress.seen) == (3, 5, [1])
        assert vars(progress) == {"epoch": 3, "tokens": 5, "seen": [1], "dropped": "later"}


def test_state_does_not_follow_the_attributes() -> None:
    progress = Progress(epoch=1)
    state = progress.state_dict()
    progress.epoch = 2
    assert state == {"epoch": 1}


def test_missing_attribute_names_those_that_are_there() -> None:
    with pytest.raises(AttributeError, match=r"no 'epok'; it has \['epoch'\]"):
        _ = Progress(epoch=1).epok
