"""Backends are found by scheme: registered here, or installed by anybody."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpipe.errors import BackendNotFound, SettingsError, UsageError
from ckpipe.store import registry
from ckpipe.store.registry import create_backend, is_registered_here, register_backend, scheme_of
from ckpipe.testing import MemoryBackend

_numbers = itertools.count()


@pytest.fixture
def scheme() -> str:
    """A scheme that no other test uses: registrations last as long as the process."""
    return f"test-registry-{next(_numbers)}"


class Configured(MemoryBackend):
    """A backend with options."""

    def __init__(self, url: str, *, part_bytes: int = 1, region: str) -> None:
        super().__init__()
        self.url, self.part_bytes, self.region = url, part_bytes, region


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


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("/a/b", "file"),
        ("a/b", "file"),
        ("file:///a", "file"),
        ("S3://bucket/x", "s3"),
        ("odd dir/x://y", "file"),
        ("my+store.v2://x", "my+store.v2"),
    ],
)
def test_schemes(url: str, scheme: str) -> None:
    assert scheme_of(url) == scheme


def test_registered_backend_gets_url_and_options(scheme: str) -> None:
    register_backend(scheme, Configured)
    made = create_backend(f"{scheme}://a/b?c#d", {"region": "here", "part_bytes": 7})
    assert isinstance(made, Configured)
    assert (made.url, made.part_bytes, made.region) == (f"{scheme}://a/b?c#d", 7, "here")
    assert is_registered_here(f"{scheme}://x")
    assert not is_registered_here("/a/path")


def test_factory_may_be_any_callable(scheme: str) -> None:
    backend = MemoryBackend()
    register_backend(scheme.upper(), lambda url: backend)
    assert create_backend(f"{scheme}://x") is backend


def test_factory_that_takes_any_option(scheme: str) -> None:
    seen: dict[str, Any] = {}

    def factory(url: str, **options: Any) -> MemoryBackend:
        seen.update(options)
        return MemoryBackend()

    register_backend(scheme, factory)
    create_backend(f"{scheme}://x", {"whatever": 1})
    assert seen == {"whatever": 1}


def test_unknown_option_names_the_nearest(scheme: str) -> None:
    register_backend(scheme, Configured)
    with pytest.raises(SettingsError, match=r"'part_byte'.*Did you mean 'part_bytes'"):
        create_backend(f"{scheme}://x", {"part_byte": 1, "region": "here"})
    with pytest.raises(SettingsError, match="Its options are: part_bytes, region"):
        create_backend(f"{scheme}://x", {"zzz": 1, "region": "here"})
    with pytest.raises(SettingsError, match="'url'"):
        create_backend(f"{scheme}://x", {"url": "again", "region": "here"})


def test_missing_option(scheme: str) -> None:
    register_backend(scheme, Configured)
    with pytest.raises(SettingsError, match="needs the option 'region'"):
        create_backend(f"{scheme}://x")


def test_second_registration_is_refused(scheme: str) -> None:
    register_backend(scheme, Configured)
    with pytest.raises(UsageError, match="already"):
        register_backend(scheme.upper(), MemoryBackend)


@pytest.mark.parametrize("name", ["", "1st", "a b", "a/b", "s3://"])
def test_impossible_schemes(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the scheme"):
        register_backend(name, MemoryBackend)


@pytest.mark.parametrize(("url", "extra"), [("s3://b", "ckpipe[s3]"), ("gs://b", "ckpipe[gcs]")])
def test_missing_extra_is_named(
    install: Callable[[str, dict[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    extra: str,
) -> None:
    install("without-sdk", {scheme_of(url): "ckpipe_no_such_package:Backend"})
    monkeypatch.setattr(sys, "path", sys.path[:1])  # without the entry points of ckpipe itself
    monkeypatch.setattr(registry, "_registered", {})  # nor what other tests have registered
    with pytest.raises(BackendNotFound) as caught:
        create_backend(url)
    assert f"pip install '{extra}'" in str(caught.value)


def test_unknown_scheme_names_the_known(
    install: Callable[[str, dict[str, str]], None], scheme: str
) -> None:
    install("some-stores", {"some-store": "x:Y"})
    register_backend(scheme, MemoryBackend)
    with pytest.raises(BackendNotFound, match=r"'nowhere'.*known are .*'some-store'") as caught:
        create_backend("nowhere://x")
    assert repr(scheme) in str(caught.value)


def test_installed_backend_is_found(
    install: Callable[[str, dict[str, str]], None], scheme: str
) -> None:
    install("a-store", {scheme: "ckpipe.testing:MemoryBackend"})
    assert isinstance(create_backend(f"{scheme}://x"), MemoryBackend)
    register_backend(scheme, lambda url: Configured(url, region="in-process"))
    assert isinstance(create_backend(f"{scheme}://x"), Configured)


def test_two_packages_with_one_scheme(
    install: Callable[[str, dict[str, str]], None], scheme: str
) -> None:
    install("one", {scheme: "ckpipe.testing:MemoryBackend"})
    install("two", {scheme: "ckpipe.testing:MemoryBackend"})
    assert isinstance(create_backend(f"{scheme}://x"), MemoryBackend)
    install("three", {scheme: "ckpipe.testing:SlowBackend"})
    with pytest.raises(BackendNotFound, match="Several installed packages"):
        create_backend(f"{scheme}://x")


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_local_backend_is_installed(tmp_path: Path, form: str) -> None:
    made = create_backend(form.format(tmp_path), {"direct": False})
    assert type(made).__name__ == "LocalBackend"
    assert f"{tmp_path} [buffered" in repr(made)
    assert "ckpipe_local" in sys.modules
