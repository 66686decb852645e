"""The images: pinned, built alike, and of files that are there."""

import re

import pytest

from tests.unit.deploy.test_compose import DOCKERFILES, ROOT, instructions


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_base_images_are_pinned_and_the_same(dockerfile: str) -> None:
    bases = {rest.split()[0] for name, rest in instructions(dockerfile) if name == "FROM"}
    assert len(bases) == 1
    assert all(re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base) for base in bases)


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_is_copied_is_there_and_reaches_the_builder(dockerfile: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text().split()
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore
    for name, rest in instructions(dockerfile):
        if name != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.partition("/")[0] in allowed, source


def test_the_two_images_are_built_alike() -> None:
    def shared(role: str) -> list[tuple[str, str]]:
        found = instructions(f"Dockerfile.{role}")
        end = [index for index, (name, _) in enumerate(found) if name == "FROM"][1]
        steps = [(name, rest.replace(f"{role}.txt", "lock")) for name, rest in found[:end]]
        # The proxy's image compiles it; the trainer's has no use for that.
        return [(name, rest) for name, rest in steps if not rest.startswith("apt-get")]

    assert shared("proxy") == shared("trainer")
