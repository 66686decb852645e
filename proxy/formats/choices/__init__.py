"""What chat completions and text completions share: both answer in `choices`."""
