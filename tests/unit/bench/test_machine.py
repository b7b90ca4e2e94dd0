"""What a machine still has, and what interrupts wait for."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from torchserve_openvino.bench.machine import available_memory
from torchserve_openvino.bench.processes import signals_later


def test_a_container_has_no_more_memory_than_its_limit(tmp_path: Path) -> None:
    def container(limit: str) -> int:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("70000000\n")
        (tmp_path / "memory.stat").write_text("anon 50000000\ninactive_file 15000000\nactive_file 5000000\n")
        return available_memory(tmp_path)

    # Files that were read count as free.
    assert container("100000000") == 50_000_000
    assert container("60000000") == 10_000_000
    assert container("max") > 100_000_000
    assert abs(available_memory(tmp_path / "absent") - psutil.virtual_memory().available) < 2 * 2**30


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), signals_later():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
