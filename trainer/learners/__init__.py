"""What turns rows into a better adapter. The only folder that knows torch, TRL and PEFT."""

import warnings

# TRL's own vLLM client is not used: which vLLM it supports is nothing to us.
warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
