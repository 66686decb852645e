"""Say which tests `make test` leaves to `make slow`: of ten seconds, or files of half a minute."""

from typing import Final

# Folders, files and single tests. Nearly all start whole processes again and again, to kill them,
# to fill their disks, or to have a vLLM of 135M parameters answer for minutes.
SLOW: Final = (
    "tests/e2e/any_model",
    "tests/e2e/whole_model",
    "tests/e2e/with_own_server/test_mixture.py",
    "tests/e2e/with_own_server/test_replayed_tool_tags.py",
    "tests/e2e/with_own_server/test_scenario.py",
    "tests/integration/controller/test_canaries_killed.py",
    "tests/integration/deleting/test_killed_while_removing.py",
    "tests/integration/deleting/test_killed_beside.py",
    "tests/integration/docs/test_images.py",
    "tests/integration/docs/test_prometheus.py",
    "tests/integration/docs/test_wheel.py",
    "tests/integration/docs/test_code_blocks.py::test_commands_of_the_page_about_keys_run",
    "tests/integration/faults/test_durability.py::test_segment_cut_at_any_byte_loses_only_the_cut_record",
    "tests/integration/faults/test_faulty_processes.py",
    "tests/integration/faults/test_full_disk.py",
    "tests/integration/console/test_browser.py",
    "tests/integration/pawl/rollout/test_evaluate.py",
    "tests/integration/pawl/rollout/test_rollout.py",
    "tests/integration/pawl/test_unusable_databases.py",
    "tests/integration/pawl/serving/test_rolling_upgrade.py",
    "tests/integration/proxy/test_limits.py",
    "tests/integration/proxy/vllm/test_vllm_templates.py",
    "tests/integration/store/test_embedded.py",
    "tests/integration/store/updates/test_claims_by_policy.py",
    "tests/integration/trainer/killed",
    "tests/integration/trainer/learners/test_dense_gradient.py",
    "tests/integration/trainer/learners/test_families.py",
    "tests/integration/trainer/learners/test_processes.py",
    "tests/integration/trainer/learners/test_sharing.py",
    "tests/integration/trainer/publishing/test_files_by_state.py",
    "tests/integration/trainer/publishing/test_hostile_imports.py",
    "tests/integration/trainer/recovery/test_misconfigured.py",
    "tests/integration/trainer/test_distillation.py::test_policy_moves_towards_its_teacher",
)


def is_slow(nodeid: str) -> bool:
    """Tell whether a test belongs to `make slow`."""
    return any(
        nodeid.startswith(one) and nodeid[len(one) :][:1] in ("", "/", ":", "[") for one in SLOW
    )
