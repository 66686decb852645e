"""What turns rows into a better adapter. The only folder that knows torch, TRL and PEFT."""
