"""What is known of dtypes without torch is what torch says of them."""

from __future__ import annotations

import subprocess
import sys

from ckpipe.format.data_file import item_bytes
from ckpipe.format.dtypes import DTYPES


def test_sizes_are_those_of_torch() -> None:
    assert {name: item_bytes(name) for name in DTYPES} == {
        name: dtype.itemsize for name, dtype in DTYPES.items()
    }
    assert item_bytes("float3") is None


def test_common_dtypes_need_no_torch() -> None:
    code = (
        "import sys; from ckpipe.format.data_file import item_bytes; "
        "assert item_bytes('bfloat16') == 2; assert 'torch' not in sys.modules; "
        "assert item_bytes('float4_e2m1fn_x2') == 1; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
