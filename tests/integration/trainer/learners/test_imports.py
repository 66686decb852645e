"""A trainer begins without what it has no use for."""

import subprocess
import sys

from tests.conftest import ROOT

PROGRAM = "import sys, trainer.learners.learner; sys.exit('vllm' in sys.modules)"


def test_a_trainer_imports_no_vllm() -> None:
    """TRL imports it where it is installed, which takes as long as all the rest together."""
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True, timeout=120)
