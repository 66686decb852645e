"""Train a policy's line again without some episodes (`pawl policies rebuild`)."""
