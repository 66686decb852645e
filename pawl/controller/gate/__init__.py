"""Judge a version by the live rewards of its episodes: pure, without I/O and without a clock."""
