"""Say which tests `make test` leaves to `make slow`: each takes ten seconds and more of a core."""

from typing import Final

# Folders, files and single tests. What a folder's other tests show, a change is told in minutes;
# these show it again of whole processes: killed, on full disks, with vLLM and clients for minutes.
SLOW: Final = (
    "tests/e2e/any_model",
    "tests/e2e/test_clients.py",
    "tests/e2e/test_loop.py",
    "tests/e2e/test_messages_and_responses.py",
    "tests/e2e/test_processes_killed.py",
    "tests/e2e/test_responses.py",
    "tests/e2e/with_own_server/test_cpu_lora_server.py",
    "tests/e2e/with_own_server/test_mixture.py",
    "tests/e2e/with_own_server/test_replayed_tool_tags.py",
    "tests/integration/deleting/test_killed_beside.py",
    "tests/integration/docs/test_keys_page.py",
    "tests/integration/faults/spool",
    "tests/integration/faults/test_faulty_processes.py",
    "tests/integration/faults/test_full_disk.py",
    "tests/integration/pawl/serving/test_compiled.py",
    "tests/integration/pawl/steward/test_killed_stewards.py",
    "tests/integration/proxy/test_limits.py",
    "tests/integration/trainer/killed",
    "tests/integration/trainer/publishing/test_files_by_state.py",
    "tests/integration/trainer/recovery/test_misconfigured.py",
)


def is_slow(nodeid: str) -> bool:
    """Tell whether a test belongs to `make slow`."""
    return any(
        nodeid.startswith(one) and nodeid[len(one) :][:1] in ("", "/", ":", "[") for one in SLOW
    )
