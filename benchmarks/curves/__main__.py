"""Run `python -m benchmarks.curves`: what several seeds of a scenario learned, beside each other.

    python -m benchmarks.curves --to docs/images/curves-math.png \
        "GRPO=var/examples/math,var/examples/math-1" "SFT=var/examples/math-sft"

Reads the `summary.json` of runs of `make example`, a label with its seeds' folders each. Prints a
table in Markdown: held-out reward before and after, mean and range of the seeds. Draws the reward
at work by the leading policy's versions, and the held-out reward over the updates.
"""

import argparse
import json
from pathlib import Path

from benchmarks.curves.picture import draw
from benchmarks.curves.runs import Run, run_of, table


def _group(text: str) -> tuple[str, list[Path]]:
    label, mark, folders = text.partition("=")
    if not mark or not folders:
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=FOLDER,FOLDER: name its folders")
    return label, [Path(folder) for folder in folders.split(",")]


def _read(folder: Path) -> Run:
    path = folder / "summary.json"
    if not path.exists():
        raise SystemExit(f"{path} does not exist: run `make example` with `--var {folder}` first")
    return run_of(json.loads(path.read_text()))


def main() -> None:
    """Print the table, and draw the picture where it is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="+", type=_group, metavar="LABEL=FOLDER,FOLDER")
    parser.add_argument("--to", type=Path, help="draw the curves into this PNG file")
    options = parser.parse_args()
    groups = {label: [_read(folder) for folder in folders] for label, folders in options.groups}
    print(table(groups).markdown())
    if options.to is not None:
        draw(options.to, groups)


if __name__ == "__main__":
    main()
