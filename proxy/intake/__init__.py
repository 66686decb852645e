"""What a request may cost before it is worked on: its size, its shape, and room in memory."""
