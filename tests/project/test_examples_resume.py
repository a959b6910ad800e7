"""The examples that resume, run as programs of their own."""

from __future__ import annotations

import re
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpipe
from tests.project.test_examples import EXAMPLES, indexes, run_example
from tests.support.fork_server import ForkedProgram


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("epoch")]


def test_a_run_stopped_in_an_epoch_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    whole = run_example("resume.py", "--checkpoints", "whole", folder=tmp_path)
    assert whole.code == 0, whole.err
    assert len(losses(whole.out)) == 40
    parts = []
    for stop in ("7", "1000"):
        part = run_example(
            "resume.py", "--checkpoints", "parts", "--stop-after", stop, folder=tmp_path
        )
        assert part.code == 0, part.err
        parts += losses(part.out)
    assert parts == losses(whole.out)
    assert indexes(tmp_path / "parts") == [7, 30, 40], "and the one resumed from"


# torchdata calls what torch has deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_loader_of_torchdata_goes_on_in_the_middle_of_its_epoch(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        data = torch.arange(40)
        return stateful.StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=0)

    torch.manual_seed(3)
    first = loader()
    batches = iter(first)
    seen = [next(batches) for _ in range(4)]
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"loader": first, "rng": ckpipe.RngState()}, step=4, until="committed")
        seen += list(batches)
        torch.manual_seed(99)
        second = loader()
        pipeline.load({"loader": second, "rng": ckpipe.RngState()})
    rest = list(second)
    assert len(rest) == 6
    assert torch.equal(torch.cat(rest), torch.cat(seen[4:]))


def test_a_signal_makes_a_run_save_the_step_it_is_in(tmp_path: Path) -> None:
    with ForkedProgram(EXAMPLES / "resume.py", "--epochs", 100000, cwd=tmp_path) as process:
        lines = [process.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("epoch 1"):
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        lines += process.communicate()[0].splitlines()
    assert process.returncode == 0
    last = int(lines[-1].split()[3])
    assert indexes(tmp_path / "resume-checkpoints")[-1] == last


def test_a_recipe_resumes_and_ends_in_another_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    finetune = runpy.run_path(str(EXAMPLES / "finetune_recipe.py"))["finetune"]
    finetune(tmp_path / "whole", 30, None)
    whole = capsys.readouterr().out.splitlines()
    finetune(tmp_path / "parts", 30, 15)
    capsys.readouterr()
    finetune(tmp_path / "parts", 30, None)
    torch.set_num_threads(threads)
    assert capsys.readouterr().out.splitlines() == whole[10:], "it went on after step 10"
    assert indexes(tmp_path / "parts") == [10, 20, 30]
    (folder,) = (tmp_path / "parts").glob("*.hf")
    (file,) = folder.glob("*.safetensors")
    names = {f"{layer}.adapter_{side}" for layer in (0, 2) for side in ("in", "out")}
    assert set(load_file(file)) == names, "adapters only"


def test_a_recipe_says_little_of_checkpoints() -> None:
    source = (EXAMPLES / "finetune_recipe.py").read_text()
    recipe = source.partition("def finetune(")[2].partition("\nif __name__")[0]
    words = r"\b(ckpipe|pipeline|restored|state|trained)\b"
    assert len(re.findall(f"^.*{words}.*$", recipe, re.MULTILINE)) < 10
