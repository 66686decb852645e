"""Unfit machines are told so in one line, before anything is started."""

import socket
from pathlib import Path

import pytest

from pawl.stack.preflight import NotReady, check_disk, check_memory, check_ports


@pytest.mark.parametrize(
    ("purpose", "variable"),
    [
        ("proxy", "PAWL_LISTEN"),
        ("proxy admin", "PAWL_ADMIN_LISTEN"),
        ("vLLM", "PAWL_VLLM_PORT"),
        ("trainer metrics", "PAWL_TRAINER_LISTEN"),
        ("steward", "PAWL_STEWARD_LISTEN"),
    ],
)
def test_a_taken_port_is_named_with_its_variable(purpose: str, variable: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(NotReady, match=rf"port {port} \({purpose}\).*\({variable}\)"):
            check_ports({purpose: port})
    check_ports({purpose: port})


def test_too_little_memory_and_disk_are_said_with_figures(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="GiB of memory are free, 1e\\+09 are needed"):
        check_memory(1e9)
    with pytest.raises(NotReady, match="GiB are free on the disk"):
        check_disk(tmp_path / "not" / "there", 1e9)
    check_memory(0.001)
    check_disk(tmp_path, 0.001)
