"""Learn PPO's critic, beside the adapter, and estimate advantages from its values."""
