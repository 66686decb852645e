"""Write all reference pages: `make docs`, or `python -m scripts.reference`."""

from .pages import FOLDER, pages


def main() -> None:
    """Write each page whose text has changed, and print its name."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: docs/reference/{name}")


if __name__ == "__main__":
    main()
