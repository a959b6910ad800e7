"""Nothing shows the credentials in a URL: settings, logs, events, errors, reports and commands."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.cli.app import run
from ckpipe.testing import FaultyBackend, MemoryBackend
from tests.support.command_line import script

SECRETS = ("AKIAKEY", "s3cr3t", "wJalr", "t0k3n")
_numbers = itertools.count()

URLS = [
    "{}://AKIAKEY:s3cr3t@bucket/run",
    "{}://AKIAKEY:s3cr3t/wJalr+x@bucket/run",
    "{}://AKIAKEY:s3c@r3t@bucket:9000/run",
    "{}://bucket/run?sv=1&sig=s3cr3t&access_token=t0k3n",
]


@pytest.fixture(params=URLS)
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a store in memory whose backend takes what it likes for credentials."""
    scheme = f"hidden{next(_numbers)}"
    backend = FaultyBackend(MemoryBackend(f"memory://{scheme}"))

    backend.fail(errors.StoreError("The store has failed"), "open_upload", nth=3)

    ckpipe.register_backend(scheme, lambda url: backend)
    text: str = request.param
    return text.format(scheme)


def check(*texts: str) -> None:
    """Check that no text holds a secret."""
    assert [text for text in texts if any(each in text for each in SECRETS)] == []


def test_settings_do_not_show_them(url: str) -> None:
    settings = ckpipe.Settings(url=url)
    check(repr(settings), str(settings), repr(settings.override(keep_last=3)))
    assert settings.url == url


@pytest.mark.filterwarnings("ignore")
def test_a_run_does_not_show_them(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[object] = []
    state = {"weight": torch.zeros(100)}
    pipeline = ckpipe.SyncPipeline(url, keep_last=1)
    pipeline.events.add(said.append)
    with pipeline:
        for step in (1, 2):
            handle = pipeline.save(state, step=step)
            said += [handle, handle.report, pipeline, pipeline.statistics()]
            handle.wait()
            said += [pipeline.load(state), pipeline.latest(), pipeline.verify(step)]
            said += [pipeline.prune(dry_run=True), pipeline.sweep(dry_run=True)]
        with pytest.raises(errors.StoreError, match="has failed") as failed:
            pipeline.save(state, step=3).wait()
        said += [failed.value, pipeline]
    with pytest.raises(errors.PipelineClosed) as closed:
        pipeline.save(state)
    check(pipeline._repr_html_())
    check(*map(repr, [*said, closed.value, pipeline, pipeline.url]), caplog.text)


NEVER_LEFT = """
import sys, torch, ckpipe
from ckpipe.testing import MemoryBackend, SlowBackend
store = SlowBackend(MemoryBackend())
left_open = []
for number, url in enumerate(sys.argv[1:]):
    ckpipe.register_backend(f"hidden{number}", lambda url: store)
    pipeline = ckpipe.SyncPipeline(url.format(f"hidden{number}"))
    left_open.append(pipeline.__enter__())
    pipeline.save({"weight": torch.ones(3)}, step=1)
"""


def test_a_pipeline_that_was_never_left_does_not_show_them() -> None:
    run = script(NEVER_LEFT, *URLS)
    assert run.code == 0, run.err
    check(run.out, run.err)


@pytest.mark.sample(4)
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_commands_do_not_show_them(
    url: str, more: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with ckpipe.SyncPipeline(url) as pipeline:
        pipeline.save({"weight": torch.zeros(100)}, step=1).wait()
    commands: list[list[str]] = [
        ["ls", url], ["info", url], ["verify", url], ["timeline", url], ["diff", url, "1", "1"],
        ["report", url],
        ["cp", url, str(tmp_path / "copy")], ["export", url, "--form", "torch"],
        ["export", url, str(tmp_path / "hf"), "--form", "hf"], ["pin", url, "1"],
        ["rm", url, "1"], ["rm", url, "7"], ["unpin", url, "1"], ["prune", url, "--keep-last", "1"],
        ["sweep", url], ["ls", url.replace("://", "x://")], ["ls", url.replace("://", ":/")],
    ]  # fmt: skip
    for command in commands:
        run([*more, *command])
        said = capsys.readouterr()
        check(said.out, said.err)


@pytest.mark.parametrize("made", [lambda url: b"s3:/" + url.encode(), lambda url: [url]])
def test_what_is_refused_is_not_repeated(url: str, made: Callable[[str], Any]) -> None:
    with pytest.raises(errors.UsageError) as refused, ckpipe.SyncPipeline(made(url)):
        pass
    check(str(refused.value))


@pytest.mark.parametrize(
    "text",
    [
        "/runs/me@home:8/run", "file:///runs/me@home", "s3://bucket/run@3", "x://host:9000/run@3",
        "s3://bucket/run?versions=1", "from s3://a/b to file:///c@d",
    ],
)  # fmt: skip
def test_urls_without_credentials_are_shown_as_they_are(text: str) -> None:
    assert f"url='{text}'" in repr(ckpipe.Settings(url=text))
