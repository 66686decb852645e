"""Forward and backward passes that make training on a CPU fast and the same each time."""
