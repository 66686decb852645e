"""YAML as plain values, read by libyaml: PyYAML's parser in Python takes ten times as long."""

from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """Return a text's only document."""
    return yaml.load(text, yaml.CSafeLoader)


def parse_yaml_documents(text: str) -> list[Any]:
    """Return all of a text's documents that are not empty."""
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]
