"""Links between records: calls of one episode, and feedback with its target."""
