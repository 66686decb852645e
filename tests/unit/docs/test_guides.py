"""A page about a client becomes a script that does what a reader would do."""

from pathlib import Path

import pytest

from tests.support.docs.guides import LISTEN, NotRun, environment, write_script

PAGE = f"""
```sh
export OPENAI_BASE_URL=http://{LISTEN}/v1
```
```python
first = "{LISTEN}"
```
```js
const first = 1;
```
```python
print(first)
```
```sh
curl {LISTEN}/feedback
```
```python
print(2)
```
"""


def written(folder: Path, text: str, program: str) -> dict[str, str]:
    page = folder / "clients.md"
    page.write_text(text)
    write_script(page, program, "127.0.0.1:1", folder)
    return {file.name: file.read_text() for file in folder.iterdir() if file != page}


def test_blocks_between_two_of_shell_are_one_program(tmp_path: Path) -> None:
    found = written(tmp_path, PAGE, "python")
    assert found.pop("page.sh").splitlines() == [
        "export OPENAI_BASE_URL=http://127.0.0.1:1/v1",
        "python 1.py",
        "curl 127.0.0.1:1/feedback",
        "python 3.py",
    ]
    assert found == {"1.py": 'first = "127.0.0.1:1"\n\nprint(first)\n', "3.py": "print(2)\n"}


def test_one_of_two_programs_is_run(tmp_path: Path) -> None:
    found = written(tmp_path, PAGE, "js")
    assert found.keys() == {"page.sh", "1.mjs"}
    assert "node 1.mjs\ncurl" in found["page.sh"]


@pytest.mark.parametrize("language", ["", "toml", "bash"])
def test_a_block_that_nothing_runs_is_an_error(tmp_path: Path, language: str) -> None:
    with pytest.raises(NotRun, match=r"clients\.md:2"):
        written(tmp_path, f"```{language}\nx = 1\n```\n", "python")


def test_a_page_finds_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "ours")
    assert environment(tmp_path).keys() == {"PATH", "HOME"}
