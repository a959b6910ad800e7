"""Servers of object stores to try things against: ``make servers``."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from pathlib import Path

from tests.support import gcs_servers, s3_servers


def main() -> None:
    """Run SeaweedFS and the GCS emulator with a bucket each, until Ctrl-C."""
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
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
