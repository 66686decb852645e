"""Share what chat completions and text completions have alike: both answer in `choices`."""
