"""Settings: mistyped variables stop the start, by name."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from pawl.settings import UnreadSettings, known_variables, read_settings, refuse_unread
from proxy.settings import ProxySettings
from store.settings import StoreSettings, address
from trainer.settings import TrainerSettings


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_mistyped_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnreadSettings, match=r"PAWL_UPSTREM_URL.*PAWL_UPSTREAM_URL"):
        refuse_unread({"PAWL_UPSTREM_URL": "http://x/v1"})


def test_a_mistyped_line_in_the_env_file_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PAWL_COLOUR=red\n")
    with pytest.raises(UnreadSettings, match="PAWL_COLOUR"):
        refuse_unread({})


def test_the_variables_of_the_contract_are_read() -> None:
    contract = {
        "PAWL_UPSTREAM_URL",
        "PAWL_LISTEN",
        "PAWL_ADMIN_LISTEN",
        "PAWL_SPOOL_DIR",
        "PAWL_ADAPTER_DIR",
        "PAWL_RECIPE",
    }
    assert contract <= known_variables()
    refuse_unread(dict.fromkeys(contract, "x") | {"HOME": "/"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PAWL_LISTEN", "8100"),
        ("PAWL_LISTEN", "host:99999"),
        ("PAWL_UPSTREAM_URL", "not a url"),
        ("PAWL_DEFAULT_TEMPERATURE", "-1"),
        ("PAWL_DEFAULT_SAMPLING", "top_p=2"),
        ("PAWL_DEFAULT_SAMPLING", "top_p"),
        ("PAWL_DEFAULT_SAMPLING", "temperature=0.5"),
        ("PAWL_DEFAULT_SAMPLING", "mirostat=2"),
        ("DATABASE_URL", "mysql://x/y"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UnreadSettings, match=name):
        read_settings(ProxySettings)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "PAWL_WORKERS",
            "many",
            r"PAWL_WORKERS is 'many': .* valid integer.*; it sets: processes that take calls",
        ),
        ("PAWL_LISTEN", "8100", "PAWL_LISTEN: '8100' is not an address: write HOST:PORT"),
        ("DATABASE_URL", "mysql://x/y", "^DATABASE_URL must be a postgresql:// URL"),
        ("PAWL_UPSTREAM_URL", "ftp://me:secret@x", "^PAWL_UPSTREAM_URL: (?!.*secret).*; it sets:"),
    ],
)
def test_an_unusable_value_is_explained(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UnreadSettings, match=message):
        read_settings(ProxySettings)


def test_what_a_server_samples_with_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings(ProxySettings).sampling_defaults == {"temperature": 1.0}
    monkeypatch.setenv("PAWL_DEFAULT_TEMPERATURE", "0.6")
    monkeypatch.setenv("PAWL_DEFAULT_SAMPLING", "top_p=0.95, top_k=20")
    found = read_settings(ProxySettings).sampling_defaults
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    # vLLM takes no 20.0 for it.
    assert isinstance(found["top_k"], int)


def test_settings_are_frozen_and_secrets_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:hunter2@h/d")
    settings = StoreSettings()
    assert "hunter2" not in repr(settings)
    with pytest.raises(ValidationError):
        settings.data_dir = Path("x")


def test_addresses() -> None:
    assert address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert address("[::1]:80") == ("::1", 80)


def test_replicas_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAWL_REPLICA_URLS", "http://b:8000/v1, http://c:8000/v1")
    urls = read_settings(TrainerSettings).replica_urls
    assert [str(url) for url in urls] == ["http://b:8000/v1", "http://c:8000/v1"]
    monkeypatch.setenv("PAWL_REPLICA_URLS", "http://b:8000/v1, c:8000")
    with pytest.raises(UnreadSettings, match="PAWL_REPLICA_URLS"):
        read_settings(TrainerSettings)


def test_the_file_of_upstreams_is_unset_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings(ProxySettings).upstreams is None
    monkeypatch.setenv("PAWL_UPSTREAMS", "u.toml")
    assert read_settings(ProxySettings).upstreams == Path("u.toml")
