"""PPO's critic: its head beside the adapter, and the advantages that follow from its values."""
