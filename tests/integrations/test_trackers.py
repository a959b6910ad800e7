"""The recipes for trackers in the docs, run offline and read back with the tracker's own reader."""

from __future__ import annotations

import inspect
import json
import os
import re
import sqlite3
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from tests.support.command_line import forked

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "trackers.md"
_FENCE = re.compile(r'^```python title="(\w+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PARTS = dict(_FENCE.findall(PAGE.read_text(encoding="utf-8")))

# The state is far larger than all that a tracker may write.
LARGE = PARTS["training"].replace("zeros(1000)", "zeros(1_000_000)")
SEEN = "pipeline.on_complete((seen := []).append)\n"
READ = """
from tests.integrations import test_trackers
test_trackers.read_back(test_trackers.{tracker}, globals())
"""


def read_back(reader: Callable[..., None], found: dict[str, Any]) -> None:
    """Check what ckpipe has told, and give a reader the names of a recipe that it asks for."""
    (event,) = found["seen"]
    numbers, address = found["facts"](event), f"{found['pipeline'].url}/{event.info.id}"
    assert set(numbers) == {"checkpoint/bytes", "checkpoint/seconds", "loss"}
    assert numbers["checkpoint/bytes"] > 4_000_000
    root, _, name = address.rpartition("/")
    assert ckpipe.load(root, step=name).state["w"].shape == (1_000_000,)
    found |= {"numbers": numbers, "address": address}
    reader(**{name: found[name] for name in inspect.signature(reader).parameters})


def wandb(wandb: Any, run: Any, address: str) -> None:
    run.finish()
    wandb.teardown()  # waits for its service, which writes the file
    (log,) = Path("wandb").glob("offline-run-*/*.wandb")
    content = log.read_bytes()
    assert b"checkpoint/bytes" in content
    assert b"loss" in content
    assert f"{address}/rank-00000.safetensors".encode() in content  # the reference
    size = sum(each.stat().st_size for each in Path("wandb").rglob("*") if each.is_file())
    assert size < 2_000_000, "the data have been copied"


def mlflow(client: Any, run_id: str, address: str, numbers: dict[str, float]) -> None:
    data = client.get_run(run_id).data
    assert data.tags["checkpoint/5"] == address
    assert data.metrics == numbers
    (metric,) = client.get_metric_history(run_id, "loss")
    assert (metric.step, metric.value) == (5, 0.5)
    assert client.list_artifacts(run_id) == []


def tensorboard(writer: Any, address: str, numbers: dict[str, float]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer.close()
    read = EventAccumulator("logs")
    read.Reload()
    for name, value in numbers.items():
        (scalar,) = read.Scalars(name)
        assert (scalar.step, scalar.value) == (5, torch.tensor(value).item())
    (text,) = read.Tensors("checkpoint/address/text_summary")
    assert text.tensor_proto.string_val == [address.encode()]


def trackio(run: Any, address: str, numbers: dict[str, float]) -> None:
    run.finish()
    (base,) = Path("trackio").glob("*.db")
    ((step, text),) = sqlite3.connect(base).execute("select step, metrics from metrics")
    assert step == 5
    assert json.loads(text) == {**numbers, "checkpoint/address": address}


SPANS = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
"""


def opentelemetry(exporter: Any, address: str, numbers: dict[str, float]) -> None:
    (span,) = exporter.get_finished_spans()
    assert span.attributes == {**numbers, "checkpoint/step": 5, "checkpoint/address": address}
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(numbers["checkpoint/seconds"])


READERS = {each.__name__: each for each in (wandb, mlflow, tensorboard, trackio, opentelemetry)}
INSTALLED = {"opentelemetry": "opentelemetry.sdk"}


def needs(package: str) -> pytest.MarkDecorator:
    try:
        missing = find_spec(package) is None
    except ModuleNotFoundError:  # of its parent
        missing = True
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@pytest.mark.parametrize(
    "tracker",
    [pytest.param(name, marks=needs(INSTALLED.get(name, name))) for name in READERS],
)
def test_a_recipe_tells_the_tracker_of_the_checkpoint(tmp_path: Path, tracker: str) -> None:
    program = tmp_path / "program.py"
    before = SPANS if tracker == "opentelemetry" else ""
    parts = [before, PARTS["facts"], SEEN, PARTS[tracker], LARGE, READ.format(tracker=tracker)]
    program.write_text("".join(parts))
    offline = {
        "HOME": str(tmp_path),  # caches and settings of trackers
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }
    done = forked(program, cwd=tmp_path, env={**os.environ, **offline})
    assert done.code == 0, done.out + done.err


def test_each_recipe_is_python_and_has_its_test() -> None:
    assert PARTS.keys() == {"facts", "training", *READERS}
    for name, part in PARTS.items():
        compile(part, name, "exec")
