"""The file of upstreams: every key known, every value usable, and the message names what is not."""

from pathlib import Path

import pytest

from proxy.errors import BadUpstreams
from proxy.upstreams.file import load_upstreams, parse_upstreams

WHOLE = """
[[upstream]]
name = "local"
urls = ["http://a:8000/v1", "http://b:8000/v1/"]
models = ["calculator", "qwen*"]
default = true

[[upstream]]
name = "openai"
urls = ["https://api.openai.com/v1"]
models = ["gpt-*"]
api_key_env = "OPENAI_API_KEY"

[[upstream]]
name = "claude"
urls = ["https://api.anthropic.com/v1"]
models = ["claude-*"]

[[upstream]]
name = "gemini"
kind = "litellm"
provider = "gemini"
models = ["gemini-2.5-pro"]
options = { drop_params = true }
"""
ONE = '[[upstream]]\nname = "a"\nurls = ["http://a/v1"]\nmodels = ["m"]\n'
TWO = ONE + '[[upstream]]\nname = "b"\nurls = ["http://b/v1"]\n'
GEMINI = '[[upstream]]\nname = "g"\nkind = "litellm"\nmodels = ["m"]\n'


def test_a_file_is_read_whole() -> None:
    local, openai, claude, gemini = parse_upstreams(WHOLE, "u.toml")
    assert local.urls == ("http://a:8000/v1", "http://b:8000/v1")
    assert (local.models, local.default, local.kind) == (("calculator", "qwen*"), True, "openai")
    assert (openai.api_key_env, openai.key_style) == ("OPENAI_API_KEY", "authorization")
    assert claude.key_style == "anthropic"
    assert (gemini.provider, gemini.options) == ("gemini", {"drop_params": True})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[upstream]", "u.toml is not TOML"),
        ("", r"there is no table \[\[upstream\]\]; write one"),
        ("upstream = []", r"there is no table \[\[upstream\]\]"),
        ('upstream = "a"', r"there is no table \[\[upstream\]\]"),
        ("[[upstreams]]\nname = 'a'", r"unknown key 'upstreams': every server is a table"),
        (ONE + "url = 1", "upstream 'a': unknown key 'url': did you mean urls?"),
        (ONE + "api_key = 'x'", "upstream 'a': unknown key 'api_key': did you mean api_key_env?"),
        (ONE + "colour = 1", "unknown key 'colour': there are name, kind"),
        ("[[upstream]]\nurls = ['http://a/v1']", "upstream number 1: name: .*; write name = "),
        (ONE.replace('"a"', '"a b"'), "name: .*; write name = "),
        (ONE + "kind = 'vllm'", "kind: .*; write kind = "),
        (ONE + "default = 'yes'", "default: .*; write default = true"),
        (ONE.replace('["http://a/v1"]', '"http://a/v1"'), "urls: .*; write urls = "),
        (ONE.replace("/v1", ""), "does not end in /v1"),
        (ONE.replace("http:", "ftp:"), "is not an http or https URL"),
        (ONE.replace("//a", "//user:secret@a"), "is not an http or https URL"),
        (ONE.replace("//a", "//a:70000"), "has an invalid port"),
        (ONE.replace('["http://a/v1"]', '["http://a/v1", "http://a/v1/"]'), "one replica twice"),
        (ONE.replace('urls = ["http://a/v1"]', ""), "upstream 'a': urls is missing; write urls"),
        (ONE.replace('["m"]', '["*"]'), r"has default = true, not \*"),
        (ONE.replace('["m"]', '["a*b"]'), r"one \* may stand at its end"),
        (ONE.replace('["m"]', "[]"), "no request reaches it: give it models, or default = true"),
        (ONE + "provider = 'x'", 'provider is for kind = "litellm" alone'),
        (ONE + "options = {a = 1}", 'options is for kind = "litellm" alone'),
        (ONE + "default_sampling = { top_p = 2 }", "default_sampling: top_p is 2"),
        (ONE + "default_sampling = { stop = 2 }", "default_sampling: 'stop' is none of temp"),
        (ONE + "tool_parser = ''", "tool_parser: .*; write tool_parser = "),
        (ONE + "default_sampling = 2", "default_sampling: .*; write default_sampling = {"),
        (GEMINI + "urls = ['http://a', 'http://b']", "litellm takes one address only"),
        (GEMINI + "api_key_header = 'x-api-key'", "litellm chooses the header itself"),
        (GEMINI + "options = {api_base = 'x'}", "options.api_base is set by the request"),
        (TWO + "models = ['m']", "'m' is claimed twice, by 'a' and 'b'"),
        (ONE.replace('["m"]', '["m", "m"]'), "'m' is claimed twice, by 'a'; leave"),
        (
            TWO.replace('"b"', '"a"') + "models = ['n']",
            r"two tables \[\[upstream\]\] are named 'a'",
        ),
        (ONE + "default = true\n" + TWO[len(ONE) :] + "default = true", "'a' and 'b' are both"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(BadUpstreams, match=named) as caught:
        parse_upstreams(text, "u.toml")
    assert caught.value.message.startswith("u.toml")


def test_keys_come_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "u.toml"
    path.write_text(WHOLE)
    with pytest.raises(BadUpstreams, match="'openai': api_key_env: the variable OPENAI_API_KEY"):
        load_upstreams(path, {})
    with pytest.raises(BadUpstreams, match="is not set"):
        load_upstreams(path, {"OPENAI_API_KEY": ""})
    assert len(load_upstreams(path, {"OPENAI_API_KEY": "sk"})) == 4


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadUpstreams, match=r"PAWL_UPSTREAMS names .*nope\.toml.*Unset it"):
        load_upstreams(tmp_path / "nope.toml", {})


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadUpstreams, match="the URL of a is not an http or https URL") as refused:
        parse_upstreams(ONE.replace("//a", "//me:s3cret@a"), "u.toml")
    assert "s3cret" not in str(refused.value)
