"""Settings that must stand before torch and transformers are imported, by the tests and by the servers they start."""

from __future__ import annotations

import os
import subprocess

# Servers of several processes share few cores: a torch thread that waits for a core holds up its whole parallel region.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests use models made here: a name that is not a folder is a mistake, not something to download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch  # after the settings above

from tests.e2e import commands
from tests.e2e.warm import forked_children, warm

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # our Triton kernels run, slowly, on the CPU
    forked_children()  # engines in the tests' own processes, too, start in seconds


@pytest.fixture
def forked_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and their engines are forked from a process that has imported SGLang, or import it once for all theirs.

    On a GPU, and where `SGLANG_EXT_TEST_SPAWN` is set, they start as users start them.
    """
    environment = commands.forking()
    if not environment:
        return
    warm()  # it starts as ever, before its environment and `Popen` change
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "Popen", commands.popen)


SLOW = (
    "e2e/test_access.py::test_server_info",
    "e2e/test_bad_requests.py::test_a_long_chat",
    "e2e/test_bad_requests.py::test_a_refused_stream_aborts_nobody[double_p]",
    "e2e/test_bad_requests.py::test_every_field",
    "e2e/test_bad_requests.py::test_the_end_of_a_stream",
    "e2e/test_beside_encoding.py",
    "e2e/test_cascade.py::test_five_hundred_mixed_requests",
    "e2e/test_cascade_kernels.py",
    "e2e/test_cascade_restarts.py",
    "e2e/test_command_line.py",
    "e2e/test_dashboard.py",
    "e2e/test_death.py",
    "e2e/test_demo.py::test_demo_on",
    "e2e/test_demo.py::test_failed_answers",
    "e2e/test_double_p.py::test_retracted",
    "e2e/test_double_p_hybrid.py::test_retracted",
    "e2e/test_double_p_kernels.py",
    "e2e/test_drafting.py::test_retracted",
    "e2e/test_drafting.py::test_tokens_are_drawn_from_the_model_s_distribution",
    "e2e/test_drafting_elsewhere.py",
    "e2e/test_drafting_kernels.py",
    "e2e/test_drain.py",
    "e2e/test_faults.py::test_streams_finish_on_the_version_they_began_on",
    "e2e/test_faults_pressure.py",
    "e2e/test_faults_start.py::test_a_real_launch",
    "e2e/test_faults_start.py::test_the_attention_backend_alone",
    "e2e/test_fleet.py",
    "e2e/test_float8_kernels.py",
    "e2e/test_fourth_system.py",
    "e2e/test_garbage.py",
    "e2e/test_labels.py",
    "e2e/test_likely.py",
    "e2e/test_ltri.py::test_answers_are_the_papers[retracted]",
    "e2e/test_ltri_forks.py",
    "e2e/test_ltri_ranks.py",
    "e2e/test_ltri_settings.py",
    "e2e/test_planned.py",
    "e2e/test_pool_host.py",
    "e2e/test_pool_life.py::test_cancelling_at_every_moment",
    "e2e/test_priorities.py",
    "e2e/test_router.py",
    "e2e/test_router_conversations.py",
    "e2e/test_soak.py",
    "e2e/test_stock.py",
    "e2e/test_stress.py",
    "e2e/test_tenants.py",
    "e2e/test_tensor_parallel.py",
    "e2e/test_turns.py",
    "e2e/test_without_interpreter.py",
    "kernels/test_attend.py",
    "kernels/test_cascade_update.py",
    "kernels/test_cells.py::test_shares_on_host",
    "kernels/test_float8.py",
    "kernels/test_joint.py",
    "kernels/test_kmeans.py::test_sums_in_cuda",
    "kernels/test_local_map.py",
    "kernels/test_span_index.py",
    "kernels/test_top_p.py",
    "kernels/test_view_triton.py",
    "launch/test_bench_beside.py::test_a_checkout",
    "launch/test_bench_cascade.py::test_rows",
    "launch/test_bench_dbsa.py::test_a_pool_leaves",
    "launch/test_bench_dbsa.py::test_both_engines",
    "launch/test_bench_double_p.py::test_the_command",
    "launch/test_bench_double_p_baselines.py",
    "launch/test_bench_double_p_captured.py",
    "launch/test_bench_drafts.py::test_drafts_in_an_engine",
    "launch/test_bench_ltri.py",
    "launch/test_doctor.py::test_the_installed_package",
    "launch/test_quality.py::test_a_method_in_an_engine",
    "launch/test_quality_book.py::test_books_in_engines",
    "launch/test_quality_ruler.py::test_needles_in_engines",
    "models/test_starts.py::test_answers",
    "models/test_starts.py::test_models_with_windows_or_states",
    "oracle/test_ltri.py",
    "plugin/test_cascade_rows.py::test_some_queries_count",
    "plugin/test_clustered_backend.py",
    "plugin/test_ltri_kernels.py::test_ends_of_prompts",
    "plugin/test_ltri_kernels.py::test_whole_streams",
    "plugin/test_ltri_lanes.py::test_no_races",
    "plugin/test_ltri_lanes.py::test_races_are_found",
    "plugin/test_planned.py",
    "plugin/test_policies.py::test_a_policy_that_returns_none",
    "plugin/test_warm_up.py::test_rows_over_clusters",
    "serving/test_versions.py::test_processes",
)
"""How the names of slow tests begin, which `make test` leaves out: of those that take ten seconds, and of files that
take half a minute, where others look at the same systems and kernels."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.removeprefix("tests/").startswith(SLOW):
        item.add_marker(pytest.mark.slow)
