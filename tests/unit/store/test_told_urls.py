"""A URL with a name and a password in it is told without them."""

import pytest

from proxy.upstreams.server import Replica
from store.settings import without_login
from trainer.publishing.model_server import ModelServer


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("https://name:secret@h/v1", "https://h/v1"),
        ("http://name:p%40ss@[::1]:8000/v1", "http://[::1]:8000/v1"),
    ],
)
def test_a_url_is_told_without_its_login(url: str, told: str) -> None:
    assert without_login(url) == told


def test_a_model_server_is_called_by_its_address_alone() -> None:
    assert ModelServer("http://name:secret@127.0.0.1:1/v1/").url == "http://127.0.0.1:1/v1"
    assert Replica("http://name:secret@127.0.0.1:1/v1", None).root == "http://127.0.0.1:1"
