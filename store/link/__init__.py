"""Link records: calls of one episode with each other, and feedback with its target."""
