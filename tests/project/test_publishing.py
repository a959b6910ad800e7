"""What is published: metadata, links of README on a registry's page, workflows, policies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpipe import __version__
from hatch_build import page_text

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+")


def workflow(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def targets(text: str) -> list[str]:
    """The targets of links and pictures outside of code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"""(?:\]\(|\b(?:href|src|srcset)=")([^)"\s]+)""", text)


def test_one_version_and_the_extras_of_a_user() -> None:
    project = PROJECT["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project["version"] == __version__ == cited["version"]
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert project["license"] == cited["license"] == "Apache-2.0"
    extras = project["optional-dependencies"]
    assert extras["all"] == ["ckpipe[cli,s3,gcs]"]
    assert not extras.keys() & PROJECT["dependency-groups"].keys()


def test_links_of_readme_hold_on_the_page_of_a_registry() -> None:
    address = "https://example.org/group/ckpipe"
    relative = [each for each in targets(README) if "://" not in each and not each.startswith("#")]
    assert relative
    moved = targets(page_text(README, address, "v1.2.3"))
    for before, after in zip(targets(README), moved, strict=True):
        if before in relative:
            view = "raw" if before.endswith((".png", ".svg")) else "blob"
            assert after == f"{address}/{view}/v1.2.3/{before}"
            assert (ROOT / before.partition("#")[0]).exists()
        else:
            assert after == before


def test_without_an_address_links_of_readme_are_text() -> None:
    text = page_text(README, "", "v1.2.3")
    assert [each for each in targets(text) if "://" not in each and not each.startswith("#")] == []
    assert [each for each in re.findall(r"!\[([^]]+)\]", README) if f"!{each}" in text] == []
    code = re.compile(r"```.*?```", re.DOTALL)
    assert code.findall(text) == code.findall(README)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_pinned_and_have_the_least_rights(path: Path) -> None:
    used = re.findall(r"uses: (.+)", path.read_text(encoding="utf-8"))
    assert [each for each in used if not PINNED.fullmatch(each)] == []
    loaded = workflow(path)
    assert loaded["permissions"] == {}
    assert loaded["concurrency"]
    for job in loaded["jobs"].values():
        assert job["timeout-minutes"]
        rights = {name for name, right in job["permissions"].items() if right == "write"}
        assert rights <= {"id-token", "pages"}
        # A job with such a right runs nothing of the repository.
        assert not rights or all("run" not in step for step in job["steps"])
        for step in job["steps"]:
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_the_versions_that_are_tested_are_those_that_the_pages_promise() -> None:
    loaded = workflow(ROOT / ".github/workflows/tests.yml")
    matrix = loaded["jobs"]["versions"]["strategy"]["matrix"]
    kinds = "\n".join(PROJECT["project"]["classifiers"])
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", kinds)
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    tested = re.search(r"tested with torch (\S+), \S+ and ([\d.]+\d)", page)
    assert tested is not None
    assert matrix["torch"] == list(tested.groups())


def test_a_release_has_its_parts_of_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [each.split()[0] for each in releases][:2] == ["[Unreleased]", f"[{__version__}]"]
    assert len(releases[-1].split()) <= 600
