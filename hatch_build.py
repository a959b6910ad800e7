"""Compile ``ckpipe/memory/_native.c``, while a wheel is built or as ``python hatch_build.py``.

Without a compiler the wheel is pure Python, and ckpipe copies and sums up with libraries. Each
wheel lists its contents and requirements in an SBOM (PEP 770). ``make_dist.py`` gives the tag of a
wheel for others in ``CKPIPE_WHEEL_TAG``, and the page of the repository, to which links of README
lead, in ``CKPIPE_REPOSITORY``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_LIBRARY = "ckpipe/memory/_native.so"
# -O3 unrolls the loops over registers. No -march: the library asks the processor what it has.
# -s leaves out the paths of this machine.
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-s")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_TARGET = re.compile(r"""(\]\(|\b(?:href|src|srcset)=")(?!\w+:|#)([^)"\s]+)""")
_PICTURE = re.compile(r"""!\[[^]]*\]\((?!\w+:)[^)]+\)|<(?:img|source)\b[^>]*="(?!\w+:)[^>]*>""")
_LINK = re.compile(r"\[([^][]*)\]\((?!\w+:|#)[^)]+\)")
_PICTURES = (".png", ".svg", ".jpg", ".webp", ".gif")


def compile_native(root: Path) -> bool:
    """Compile the library beside its source; False, after one line that says why, if that fails.

    Args:
        root: The directory of the project.
    """
    library = root / _LIBRARY
    source = library.with_suffix(".c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    # Processes may use the library that is there, so a new file takes its place.
    descriptor, temporary = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [*compiler, *_FLAGS, f'-DSOURCE_HASH="{digest}"', "-o", temporary, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.split("\n")
            problem = next((line for line in lines if "error" in line), lines[0])
        else:
            os.chmod(temporary, 0o755)
            os.replace(temporary, library)
            return True
    except OSError as error:
        problem = str(error)
    finally:
        Path(temporary).unlink(missing_ok=True)
    print(f"ckpipe: {source.name} is not compiled, which costs speed: {problem}", file=sys.stderr)
    return False


def get_build_hook() -> type[Any]:
    """Give hatchling the hook of a wheel, by the name that it looks for."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class WheelBuildHook(BuildHookInterface[Any]):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            tag = os.environ.get("CKPIPE_WHEEL_TAG") or f"py3-none-{platform}"
            native = not tag.endswith("-any") and compile_native(Path(self.root))
            if native:
                build_data["artifacts"].append(_LIBRARY)
                build_data["pure_python"] = False
                build_data["tag"] = tag
            self.folder = tempfile.TemporaryDirectory(prefix="ckpipe-sbom-")
            sbom = Path(self.folder.name, "ckpipe.cdx.json")
            library = Path(self.root, _LIBRARY) if native else None
            sbom.write_text(json.dumps(bill_of_materials(self.metadata.core, library), indent=1))
            build_data["sbom_files"].append(str(sbom))

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            self.folder.cleanup()

    return WheelBuildHook


def bill_of_materials(project: Any, library: Path | None) -> dict[str, Any]:
    """List the compiled library, and the packages that an installer adds, as CycloneDX has it.

    Args:
        project: The metadata of the project, as hatchling has read them.
        library: The file of the compiled library, where the wheel has one.
    """
    own = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{project.name}@{project.version}",
        "name": project.name,
        "version": project.version,
        "purl": f"pkg:pypi/{project.name}@{project.version}",
        "licenses": [{"expression": project.license_expression}],
    }
    extras = project.optional_dependencies_complex.values()
    optional = [each for extra in extras for each in extra.values() if each.name != project.name]
    packages = _packages(optional, "optional")
    packages |= _packages(project.dependencies_complex.values(), "required")
    components = [packages[name] for name in sorted(packages)]
    if library is not None:
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        hashes = [{"alg": "SHA-256", "content": digest}]
        components.append({"type": "file", "bom-ref": _LIBRARY, "name": _LIBRARY, "hashes": hashes})
    needs = {"ref": own["bom-ref"], "dependsOn": [each["bom-ref"] for each in components]}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [needs],
    }


def _packages(requirements: Iterable[Any], scope: str) -> dict[str, dict[str, Any]]:
    found = {}
    for each in requirements:
        purl = f"pkg:pypi/{each.name}"
        package = {"type": "library", "bom-ref": purl, "name": each.name, "purl": purl}
        package |= {"scope": scope, "isExternal": True}
        if specifiers := sorted(map(str, each.specifier)):
            package["versionRange"] = f"vers:pypi/{'|'.join(specifiers)}"
        found[each.name] = package
    return found


def get_metadata_hook() -> type[Any]:
    """Give hatchling the hook of README and urls, by the name that it looks for."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface

    class PageMetadataHook(MetadataHookInterface):
        def update(self, metadata: dict[str, Any]) -> None:
            text = Path(self.root, "README.md").read_text(encoding="utf-8")
            address = os.environ.get("CKPIPE_REPOSITORY", "").rstrip("/")
            at = f"v{metadata['version']}"
            text = page_text(text, address, at)
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
            if address:
                metadata["urls"] = {
                    "Repository": address,
                    "Documentation": f"{address}/blob/{at}/docs/index.md",
                    "Changelog": f"{address}/blob/{at}/CHANGELOG.md",
                    "Issues": f"{address}/issues",
                }

    return PageMetadataHook


def page_text(text: str, address: str, at: str) -> str:
    """Make README's relative links hold outside the repository.

    Args:
        text: README.
        address: The page of the repository. If it is empty, links become plain text.
        at: The tag of the release.
    """

    def absolute(found: re.Match[str]) -> str:
        view = "raw" if found[2].endswith(_PICTURES) else "blob"
        return f"{found[1]}{address}/{view}/{at}/{found[2]}"

    parts = _FENCE.split(text)
    for number in range(0, len(parts), 2):  # fences stand between
        if address:
            parts[number] = _TARGET.sub(absolute, parts[number])
        else:
            parts[number] = _LINK.sub(r"\1", _PICTURE.sub("", parts[number]))
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(not compile_native(Path(__file__).parent))
