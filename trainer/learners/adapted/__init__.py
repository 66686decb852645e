"""Give a base model an adapter: on which of its layers, and how PEFT is told."""
