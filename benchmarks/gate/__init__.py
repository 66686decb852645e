"""The gate's mistakes and its speed, simulated."""
