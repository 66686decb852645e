"""How each coding agent is set up: where it is pointed, and that its files stay in its folder."""

import json
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from pawl.coding_agents import CODING_AGENTS, AgentSetup, Session

URL = "http://127.0.0.1:8100/task/t/episode/e"
SESSION = Session(
    url=URL,
    model="my-policy",
    key="a-key",
    folder=Path("/own"),
    project=Path("/work"),
    context=16_384,
)
# The variable by which each agent that has files finds its folder.
FOLDERS = {
    "claude": "CLAUDE_CONFIG_DIR",
    "codex": "CODEX_HOME",
    "opencode": "XDG_CONFIG_HOME",
    "pi": "PI_CODING_AGENT_DIR",
    "mini": "MSWEA_GLOBAL_CONFIG_DIR",
    "qwen": "QWEN_HOME",
    "cline": "CLINE_DIR",
    "openclaw": "OPENCLAW_STATE_DIR",
}


def text_of(setup: AgentSetup) -> str:
    return json.dumps([setup.environment, setup.arguments, setup.files])


@pytest.mark.parametrize("name", CODING_AGENTS)
def test_coding_agent_is_configured_with_address_model_and_api_key(name: str) -> None:
    text = text_of(CODING_AGENTS[name].setup(SESSION))
    # Anthropic's client adds /v1 itself.
    assert (f"{URL}/v1" in text) == (name != "claude")
    assert all(value in text for value in (URL, "my-policy", "a-key"))


@pytest.mark.parametrize("name", CODING_AGENTS)
def test_config_files_of_a_coding_agent_stay_in_the_sessions_folder(name: str) -> None:
    setup = CODING_AGENTS[name].setup(SESSION)
    paths = [PurePosixPath(file) for file in setup.files]
    assert not any(path.is_absolute() or ".." in path.parts for path in paths)
    assert "HOME" not in setup.environment
    if name in FOLDERS:
        assert setup.environment[FOLDERS[name]] == "/own"
    else:
        assert not paths


@pytest.mark.parametrize("name", ["claude", "codex", "opencode", "pi", "openclaw"])
def test_context_length_is_set_if_known_and_left_out_otherwise(name: str) -> None:
    unknown = Session(url=URL, model="m", key="k", folder=SESSION.folder, project=SESSION.project)
    assert "16384" in text_of(CODING_AGENTS[name].setup(SESSION))
    assert "null" not in text_of(CODING_AGENTS[name].setup(unknown))
    assert "None" not in text_of(CODING_AGENTS[name].setup(unknown))


def test_reply_may_take_a_quarter_of_the_context() -> None:
    environment = CODING_AGENTS["claude"].setup(SESSION).environment
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "4096"


def test_codex_gets_valid_toml_for_any_model_name() -> None:
    named = Session(
        url=URL, model='a "ü"\\b', key="k", folder=SESSION.folder, project=SESSION.project
    )
    text = CODING_AGENTS["codex"].setup(named).files["config.toml"]
    assert isinstance(text, str)
    read = tomllib.loads(text)
    assert read["model"] == 'a "ü"\\b'
    assert read["model_providers"][read["model_provider"]] == {
        "name": "pawl",
        "base_url": f"{URL}/v1",
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
