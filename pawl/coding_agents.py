"""Configure coding agents to use Pawl; each session is one episode (pure)."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from store.records import Record

# A reply may take a quarter of the context, and no more tokens than this.
MOST_REPLY_TOKENS: Final = 8192


class Session(Record, frozen=True, kw_only=True):
    """The session that an agent is configured for.

    Attributes:
        url: the proxy's base URL that names the episode, without `/v1`.
        model: the model that the agent requests.
        key: the agent's API key.
        folder: the folder for the agent's configuration files.
        project: the folder in which the agent works.
        context: the model's longest context in tokens; None: unknown.
    """

    url: str
    model: str
    key: str
    folder: Path
    project: Path
    context: int | None = None

    @property
    def reply_tokens(self) -> int | None:
        """Return the longest reply in tokens that the agent may request; None: unknown."""
        return self.context and min(MOST_REPLY_TOKENS, self.context // 4)

    def limits(self, context: str, reply: str) -> dict[str, int]:
        """Return `{context: TOKENS, reply: TOKENS}`, or an empty dict if the limits are unknown."""
        if not (self.context and self.reply_tokens):
            return {}
        return {context: self.context, reply: self.reply_tokens}


class AgentSetup(Record, frozen=True, kw_only=True):
    """An agent's environment variables, arguments before the user's own, and configuration files.

    `files` has JSON documents or texts by their path in the session's folder.
    """

    environment: Mapping[str, str] = {}
    arguments: tuple[str, ...] = ()
    files: Mapping[str, dict[str, Any] | str] = {}


class CodingAgent(Record, frozen=True):
    """A coding agent: the command that installs it, and the function that configures it."""

    install: str
    setup: Callable[[Session], AgentSetup]


def _claude(session: Session) -> AgentSetup:
    limits = session.limits("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_MAX_OUTPUT_TOKENS")
    return AgentSetup(
        environment={
            "ANTHROPIC_BASE_URL": session.url,
            "ANTHROPIC_API_KEY": session.key,
            "ANTHROPIC_MODEL": session.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": session.model,
            "CLAUDE_CONFIG_DIR": str(session.folder),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        | {name: str(tokens) for name, tokens in limits.items()},
        # Without this file Claude Code asks for a login, and whether to use the key.
        files={
            ".claude.json": {
                "hasCompletedOnboarding": True,
                "customApiKeyResponses": {"approved": [session.key[-20:]], "rejected": []},
            }
        },
    )


def _codex(session: Session) -> AgentSetup:
    window = f"model_context_window = {session.context}\n" if session.context else ""
    text = f"""\
model = {_toml(session.model)}
model_provider = "pawl"
check_for_update_on_startup = false
{window}
[model_providers.pawl]
name = "pawl"
base_url = {_toml(session.url + "/v1")}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    return AgentSetup(
        environment={"CODEX_HOME": str(session.folder), "OPENAI_API_KEY": session.key},
        files={"config.toml": text},
    )


def _opencode(session: Session) -> AgentSetup:
    limit = session.limits("context", "output")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{session.url}/v1", "apiKey": session.key},
        "models": {session.model: {"limit": limit} if limit else {}},
    }
    model = f"pawl/{session.model}"
    folders = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
    quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "SHARE")
    return AgentSetup(
        environment={name: str(session.folder) for name in folders}
        | {f"OPENCODE_DISABLE_{name}": "1" for name in quiet},
        files={
            "opencode/opencode.json": {
                "model": model,
                "small_model": model,
                "provider": {"pawl": provider},
            }
        },
    )


def _pi(session: Session) -> AgentSetup:
    model = {"id": session.model} | session.limits("contextWindow", "maxTokens")
    provider = {
        "baseUrl": f"{session.url}/v1",
        "api": "openai-completions",
        "apiKey": session.key,
        "models": [model],
    }
    return AgentSetup(
        environment={"PI_CODING_AGENT_DIR": str(session.folder), "PI_OFFLINE": "1"},
        arguments=("--provider", "pawl", "--model", session.model),
        files={"models.json": {"providers": {"pawl": provider}}},
    )


def _mini(session: Session) -> AgentSetup:
    return AgentSetup(
        environment={
            "OPENAI_BASE_URL": f"{session.url}/v1",
            "OPENAI_API_KEY": session.key,
            "MSWEA_GLOBAL_CONFIG_DIR": str(session.folder),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        arguments=("-m", f"openai/{session.model}"),
    )


def _qwen(session: Session) -> AgentSetup:
    return AgentSetup(
        environment={
            "OPENAI_BASE_URL": f"{session.url}/v1",
            "OPENAI_API_KEY": session.key,
            "OPENAI_MODEL": session.model,
            "QWEN_HOME": str(session.folder),
        },
        arguments=("--auth-type", "openai"),
    )


def _cline(session: Session) -> AgentSetup:
    # In the format that `cline auth` writes.
    settings = {
        "provider": "openai-compatible",
        "apiKey": session.key,
        "model": session.model,
        "baseUrl": f"{session.url}/v1",
    }
    provider = {
        "settings": settings,
        "updatedAt": "2026-01-01T00:00:00.000Z",
        "tokenSource": "manual",
    }
    return AgentSetup(
        environment={"CLINE_DIR": str(session.folder)},
        files={
            "data/settings/providers.json": {
                "version": 1,
                "lastUsedProvider": "openai-compatible",
                "providers": {"openai-compatible": provider},
            }
        },
    )


def _openclaw(session: Session) -> AgentSetup:
    model = {"id": session.model, "name": session.model}
    provider = {
        "baseUrl": f"{session.url}/v1",
        "apiKey": session.key,
        "api": "openai-completions",
        "models": [model | session.limits("contextWindow", "maxTokens")],
    }
    defaults = {
        "model": {"primary": f"pawl/{session.model}"},
        "workspace": str(session.project),
        # Otherwise OpenClaw writes its own files into the project.
        "skipBootstrap": True,
    }
    return AgentSetup(
        environment={
            "OPENCLAW_STATE_DIR": str(session.folder),
            "OPENCLAW_CONFIG_PATH": str(session.folder / "openclaw.json"),
        },
        files={
            "openclaw.json": {
                "models": {"providers": {"pawl": provider}},
                "agents": {"defaults": defaults},
            }
        },
    )


def _aider(session: Session) -> AgentSetup:
    return AgentSetup(
        environment={
            "OPENAI_API_BASE": f"{session.url}/v1",
            "OPENAI_API_KEY": session.key,
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        arguments=("--model", f"openai/{session.model}"),
    )


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Keys: the names of the programs.
CODING_AGENTS: Final = {
    "claude": CodingAgent("npm install -g @anthropic-ai/claude-code", _claude),
    "codex": CodingAgent("npm install -g @openai/codex", _codex),
    "opencode": CodingAgent("npm install -g opencode-ai", _opencode),
    "pi": CodingAgent("npm install -g @earendil-works/pi-coding-agent", _pi),
    "mini": CodingAgent("pip install mini-swe-agent", _mini),
    "qwen": CodingAgent("npm install -g @qwen-code/qwen-code", _qwen),
    "cline": CodingAgent("npm install -g cline", _cline),
    "openclaw": CodingAgent("npm install -g openclaw", _openclaw),
    "aider": CodingAgent("pip install aider-chat", _aider),
}
