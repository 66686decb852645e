"""Take recorded calls: forward, answer and capture them."""
