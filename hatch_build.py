"""Compile ``ckpipe/memory/_native.c``, while a wheel is built or as ``python hatch_build.py``.

Without a compiler the wheel is pure Python, and ckpipe copies and sums up with libraries.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

_LIBRARY = "ckpipe/memory/_native.so"
# -O3 unrolls the loops over registers. No -march: the library asks the processor what it has.
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden")


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
    """Give hatchling the hook, by the name that it looks for."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class NativeBuildHook(BuildHookInterface[Any]):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if compile_native(Path(self.root)):
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["artifacts"].append(_LIBRARY)
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{platform}"

    return NativeBuildHook


if __name__ == "__main__":
    sys.exit(not compile_native(Path(__file__).parent))
