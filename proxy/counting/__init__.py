"""Count in several processes, in shared memory, which no full or failing disk can stop."""
