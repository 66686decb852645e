"""Train adapters on rows; only this folder of the trainer needs torch, TRL and PEFT."""

import logging
import warnings

# TRL warns about vLLM versions that its own client does not support; Pawl does not use it.
warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
# bitsandbytes, which PEFT imports, warns of a kernel for CPUs that it takes from a hub.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
