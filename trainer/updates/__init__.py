"""Run the stages of one update: claim its episodes, plan it, record it, and recover it."""
