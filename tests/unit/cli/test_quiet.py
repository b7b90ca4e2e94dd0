"""Commands that import transformers show no lines of torchao about GPU extensions."""

import subprocess
import sys

import pytest


def test_torchao_is_quiet_in_commands() -> None:
    pytest.importorskip("torchao")
    begin = "from torchserve_openvino.report.quiet import quiet_libraries\nquiet_libraries()\n"
    code = f"{begin}import logging, torch, torchao\nlogging.getLogger('torchao').error('an error')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "an error" in done.stderr
    assert "Failed to load" not in done.stderr and "_pytree" not in done.stderr
