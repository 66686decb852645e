"""Learners: they turn rows into a better adapter; the only folder that needs torch, TRL, PEFT."""

import warnings

# TRL warns about vLLM versions that its own client does not support; Pawl does not use it.
warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
