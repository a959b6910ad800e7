"""Servers of object stores to try things against: ``make servers``."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from tests.support import gcs_servers, s3_servers

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end(*_: object) -> NoReturn:
    """Leave the blocks that end the servers and remove their folder; no other signal stops that."""
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit()


def main() -> None:
    """Run SeaweedFS and the GCS emulator with a bucket each, until a signal ends them."""
    for each in ENDS:
        signal.signal(each, end)
    s3_servers.set_up_process()
    gcs_servers.set_up_process()
    with (
        tempfile.TemporaryDirectory() as folder,
        s3_servers.seaweedfs(Path(folder)) as s3,
        gcs_servers.emulator(Path(folder)) as gcs,
    ):
        s3.make_bucket("demo")
        gcs.make_bucket("demo")
        print("S3:")
        print(
            f"  export AWS_ACCESS_KEY_ID={s3_servers.KEY} AWS_SECRET_ACCESS_KEY={s3_servers.SECRET}"
        )
        print(f"  python examples/s3_quickstart.py s3://demo/run-1 --endpoint-url {s3.url}")
        print("Google Cloud Storage:")
        print(f"  export STORAGE_EMULATOR_HOST={gcs.url}")
        print("  ckpipe bench gs://demo/run-1")
        print("Ctrl-C stops the servers and forgets their data.", flush=True)
        signal.pause()  # a handler that raises ends it


if __name__ == "__main__":
    main()
