"""The command ``ckpipe``: looks at checkpoints and keeps house, without opening a pipeline.

Importing ``ckpipe`` does not import this package, which needs the extra ``cli``.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command with the arguments of this process, and exits with its code."""
    try:
        from ckpipe.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write("error: the command needs more packages: pip install 'ckpipe[cli]'\n")
        sys.exit(2)
    except KeyboardInterrupt:  # the packages take a second or two, in which nothing was begun
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


__all__ = ["main"]
