"""Let programs or models read finished episodes and score them."""
