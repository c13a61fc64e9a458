"""The simulator's scripts with vLLM 0.33's scheduler."""

import json

from tests.vllm_0_33.conftest import RunScript
from tools.set_up import ROOT

_SCRIPT = """
import json, logging
import vllm
logging.disable(logging.CRITICAL)
from tests.simulation.script import play
outcomes = [play(seed) for seed in range(100, 125)]
print(json.dumps([vllm.__version__, sum(o.num_blocks_loaded for o in outcomes)]))
"""


def test_scripts(run_on_vllm_033: RunScript) -> None:
    version, num_blocks_loaded = json.loads(run_on_vllm_033(_SCRIPT).splitlines()[-1])
    assert version.startswith("0.33.")
    assert num_blocks_loaded > 0


def test_real_models(run_on_vllm_033: RunScript) -> None:
    """Groups as 0.33 plans them, and scripts with them."""
    arguments = [
        *("--rootdir", str(ROOT), "--config-file", str(ROOT / "pyproject.toml")),
        *("-q", "-p", "no:cacheprovider", str(ROOT / "tests/simulation/test_real_models.py")),
    ]
    run_on_vllm_033(f"import pytest, sys; sys.exit(pytest.main({arguments!r}))")
