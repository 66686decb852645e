"""Run `python -m benchmarks.stitching`; what it does is in `command.py`."""

from benchmarks.stitching.command import main

if __name__ == "__main__":
    main()
