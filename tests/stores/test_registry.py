"""Backends are found by scheme: registered here, or installed by anybody."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import ckpipe
from ckpipe import register_backend
from ckpipe.errors import BackendNotFound, SettingsError, UsageError
from ckpipe.testing import MemoryBackend

_numbers = itertools.count()


@pytest.fixture
def scheme() -> str:
    """A scheme that no other test uses: registrations last as long as the process."""
    return f"test-registry-{next(_numbers)}"


class Noted(MemoryBackend):
    """A backend that is noted when it is made."""

    made: ClassVar[list[Noted]] = []

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.made.append(self)


class NotedToo(Noted):
    """Another such backend."""


class Configured(Noted):
    """A backend with options."""

    def __init__(self, url: str, *, part_bytes: int = 1, region: str) -> None:
        super().__init__(url)
        self.part_bytes, self.region = part_bytes, region


def opened(url: str, options: dict[str, Any] | None = None) -> Noted:
    """Open a pipeline; return the backend that was made for it."""
    backends = {url.partition(":")[0].lower(): options} if options else {}
    with ckpipe.SyncPipeline(url, backends=backends):
        return Noted.made.pop()


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, dict[str, str]], None]:
    """Install a package that has nothing but entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, entry_points: dict[str, str]) -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key} = {value}" for key, value in entry_points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[ckpipe.backends]", *lines]))

    return install


def test_a_scheme_has_any_case_and_some_signs(scheme: str) -> None:
    register_backend(name := f"my+{scheme}.v2", Noted)
    assert opened(f"{name.upper()}://x").url == f"{name.upper()}://x"


def test_registered_backend_gets_url_and_options(scheme: str) -> None:
    register_backend(scheme, Configured)
    made = opened(f"{scheme}://a/b?c#d", {"region": "here", "part_bytes": 7})
    assert isinstance(made, Configured)
    assert (made.url, made.part_bytes, made.region) == (f"{scheme}://a/b?c#d", 7, "here")


def test_factory_that_takes_any_option(scheme: str) -> None:
    seen: dict[str, Any] = {}

    def factory(url: str, **options: Any) -> MemoryBackend:
        seen.update(options)
        return Noted(url)

    register_backend(scheme.upper(), factory)
    opened(f"{scheme}://x", {"whatever": 1})
    assert seen == {"whatever": 1}


def test_unknown_option_names_the_nearest(scheme: str) -> None:
    register_backend(scheme, Configured)
    with pytest.raises(SettingsError, match=r"'part_byte'.*Did you mean 'part_bytes'"):
        opened(f"{scheme}://x", {"part_byte": 1, "region": "here"})
    with pytest.raises(SettingsError, match="Its options are: part_bytes, region"):
        opened(f"{scheme}://x", {"zzz": 1, "region": "here"})
    with pytest.raises(SettingsError, match="'url'"):
        opened(f"{scheme}://x", {"url": "again", "region": "here"})


def test_missing_option(scheme: str) -> None:
    register_backend(scheme, Configured)
    with pytest.raises(SettingsError, match="needs the option 'region'"):
        opened(f"{scheme}://x")


def test_second_registration_is_refused(scheme: str) -> None:
    register_backend(scheme, Configured)
    with pytest.raises(UsageError, match="already"):
        register_backend(scheme.upper(), MemoryBackend)


@pytest.mark.parametrize("name", ["", "1st", "a b", "a/b", "s3://"])
def test_impossible_schemes(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the scheme"):
        register_backend(name, MemoryBackend)


@pytest.mark.parametrize(("url", "extra"), [("s3://b", ".[s3]"), ("gs://b", ".[gcs]")])
def test_missing_extra_is_named(
    install: Callable[[str, dict[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    extra: str,
) -> None:
    install("without-sdk", {url.partition(":")[0]: "ckpipe_no_such_package:Backend"})
    monkeypatch.setattr(sys, "path", sys.path[:1])  # without the entry points of ckpipe itself
    monkeypatch.setattr("ckpipe.store.registry._registered", {})  # nor those of other tests
    with pytest.raises(BackendNotFound) as caught:
        opened(url)
    assert f"pip install '{extra}'" in str(caught.value)


def test_unknown_scheme_names_the_known(
    install: Callable[[str, dict[str, str]], None], scheme: str
) -> None:
    install("some-stores", {"some-store": "x:Y"})
    register_backend(scheme, MemoryBackend)
    with pytest.raises(BackendNotFound, match=r"'nowhere'.*known are .*'some-store'") as caught:
        opened("nowhere://x")
    assert repr(scheme) in str(caught.value)


def test_installed_backend_is_found(
    install: Callable[[str, dict[str, str]], None], scheme: str
) -> None:
    install("a-store", {scheme: "tests.stores.test_registry:Noted"})
    assert type(opened(f"{scheme}://x")) is Noted
    register_backend(scheme, lambda url: Configured(url, region="in-process"))
    assert isinstance(opened(f"{scheme}://x"), Configured)


def test_two_packages_with_one_scheme(
    install: Callable[[str, dict[str, str]], None], scheme: str
) -> None:
    install("one", {scheme: "tests.stores.test_registry:Noted"})
    install("two", {scheme: "tests.stores.test_registry:Noted"})
    assert type(opened(f"{scheme}://x")) is Noted
    install("three", {scheme: "ckpipe.testing:SlowBackend"})
    with pytest.raises(BackendNotFound, match="Several installed packages"):
        opened(f"{scheme}://x")


def test_folders_of_one_age_are_told_apart(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "one", tmp_path / "other"]
    for place, name in zip(places, ("Noted", "NotedToo"), strict=True):
        folder = place / "a_store-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: a-store\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(
            f"[ckpipe.backends]\n{scheme} = tests.stores.test_registry:{name}\n"
        )
        os.utime(place, (1, 1))
    before = sys.path
    for place, kind in zip(places, (Noted, NotedToo), strict=True):
        monkeypatch.setattr(sys, "path", [str(place), *before])
        assert type(opened(f"{scheme}://x")) is kind


@pytest.mark.parametrize("entry", ["a\0b", None, 7])
def test_an_entry_of_the_path_that_is_none_is_told(
    entry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, entry])
    with pytest.raises(BackendNotFound, match=r"Remove from sys\.path"):
        ckpipe.SyncPipeline(tmp_path).open()


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/odd dir/x://y"])
def test_local_backend_is_installed(tmp_path: Path, form: str) -> None:
    with ckpipe.SyncPipeline(form.format(tmp_path), backends={"file": {"direct": False}}) as made:
        made.save({"a": 1}, step=1).wait()
    root = tmp_path / form.removeprefix("file://").format(".")
    assert len(list(root.glob("step-000000000001.*.json"))) == 1
