"""Upstreams: their file, which of them a model's name leads to, their keys, and no redirect."""

import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.errors import BadUpstreams, Redirected
from proxy.upstreams.file import Style, load_upstreams, parse_upstreams
from proxy.upstreams.litellm import LitellmReply
from proxy.upstreams.server import ANTHROPIC_VERSION, UpstreamKey, check_redirect
from proxy.upstreams.upstreams import ModelTable

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


def test_upstreams_file_is_read_with_all_its_fields() -> None:
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
        (ONE.replace("//a", "//user:s3cret@a"), "the URL of a is not an http or https URL"),
        (ONE.replace("//a", "//a:70000"), "has an invalid port"),
        (ONE.replace('["http://a/v1"]', '["http://a/v1", "http://a/v1/"]'), "one replica twice"),
        (ONE.replace('urls = ["http://a/v1"]', ""), "upstream 'a': urls is missing; write urls"),
        (ONE.replace('["m"]', '["*"]'), r"has default = true, not \*"),
        (ONE.replace('["m"]', '["a*b"]'), r"a prefix ends in \*"),
        (ONE.replace('["m"]', "[]"), "no request reaches it: give it models, or default = true"),
        (ONE + "provider = 'x'", 'provider is for kind = "litellm" alone'),
        (ONE + "options = {a = 1}", 'options is for kind = "litellm" alone'),
        (ONE + "default_sampling = { top_p = 2 }", "default_sampling: top_p = 2"),
        (ONE + "default_sampling = { stop = 2 }", "default_sampling: unknown setting 'stop'"),
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
def test_invalid_upstreams_file_is_refused_with_the_reason(text: str, named: str) -> None:
    with pytest.raises(BadUpstreams, match=named) as caught:
        parse_upstreams(text, "u.toml")
    assert caught.value.message.startswith("u.toml")
    assert "s3cret" not in str(caught.value)


def test_api_keys_of_upstreams_come_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "u.toml"
    path.write_text(WHOLE)
    with pytest.raises(BadUpstreams, match="'openai': api_key_env: the variable OPENAI_API_KEY"):
        load_upstreams(path, {})
    with pytest.raises(BadUpstreams, match="is not set"):
        load_upstreams(path, {"OPENAI_API_KEY": ""})
    assert len(load_upstreams(path, {"OPENAI_API_KEY": "sk"})) == 4


def test_missing_upstreams_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadUpstreams, match=r"PAWL_UPSTREAMS names .*nope\.toml.*Unset it"):
        load_upstreams(tmp_path / "nope.toml", {})


TABLE = ModelTable(
    [["calculator", "qwen*"], ["gpt-*", "qwen-max", "claude@20240620"], ["gpt-oss*"]], default=0
)


@pytest.mark.parametrize(
    ("model", "number"),
    [
        ("calculator", 0),
        ("calculator@3", 0),
        ("qwen", 0),
        ("qwen-7b", 0),
        # A name said whole is before a beginning, and a version goes where its policy goes.
        ("qwen-max", 1),
        ("qwen-max@12", 1),
        ("gpt-4o", 1),
        ("gpt-oss-20b", 2),
        ("gpt-oss-20b@1", 2),
        # Some names have a date where a version stands.
        ("claude@20240620", 1),
        ("claude@20240620@2", 1),
        ("claude", 0),
        ("calculators", 0),
        (None, 0),
    ],
)
def test_model_name_finds_its_upstream(model: str | None, number: int) -> None:
    assert TABLE.find(model) == number


def test_unclaimed_model_has_no_upstream_without_a_default() -> None:
    table = ModelTable([["a"], ["b*"]], default=None)
    assert [table.find(name) for name in ("a", "bb")] == [0, 1]
    assert {table.find(name) for name in ("c", "a@x", "a@", None)} == {None}
    assert table.known == ("a", "b*")


names = st.text(alphabet="ab@1*", min_size=1, max_size=4).filter(lambda name: "*" not in name[:-1])


@given(
    st.lists(st.lists(names, max_size=4), max_size=4),
    st.text(alphabet="ab@1", max_size=6),
    st.integers(0, 99),
)
def test_version_is_at_the_upstream_of_its_policy_unless_named(
    claims: list[list[str]], model: str, version: int
) -> None:
    # A version has no versions of its own.
    assume(re.fullmatch(r".*@\d+", model) is None)
    said = [pattern for patterns in claims for pattern in patterns]
    table = ModelTable(claims, default=None)
    served = f"{model}@{version}"
    if not any(pattern == served or pattern.startswith(f"{model}@") for pattern in said):
        beginnings = [p[:-1] for p in said if p.endswith("*") and served.startswith(p[:-1])]
        if table.find(model) is not None or not beginnings:
            assert table.find(served) == table.find(model)


@given(st.lists(st.lists(names, min_size=1, max_size=3), min_size=1), st.text(alphabet="ab@1"))
def test_upstream_answers_only_models_it_claims(claims: list[list[str]], model: str) -> None:
    number = ModelTable(claims, default=None).find(model)
    if number is not None:
        policy = model.rpartition("@")[0]
        assert any(
            pattern in (model, policy) or (pattern.endswith("*") and model.startswith(pattern[:-1]))
            for pattern in claims[number]
        )


CLIENT = [
    (b"authorization", b"Bearer client"),
    (b"X-Api-Key", b"client"),
    (b"Api-Key", b"client"),
    (b"User-Agent", b"x"),
]
BEARER = (b"Authorization", b"Bearer ours")
PLAIN = (b"x-api-key", b"ours")


@pytest.mark.parametrize(
    ("style", "target", "shown"),
    [
        ("authorization", "/v1/messages", [BEARER]),
        ("x-api-key", "/v1/chat/completions", [PLAIN]),
        ("anthropic", "/v1/chat/completions", [BEARER]),
        ("anthropic", "/v1/messages?beta=true", [ANTHROPIC_VERSION, PLAIN]),
        ("anthropic", "/v1/models", [ANTHROPIC_VERSION, PLAIN]),
    ],
)
def test_upstreams_api_key_is_sent_in_the_header_that_the_server_wants(
    style: Style, target: str, shown: list[tuple[bytes, bytes]]
) -> None:
    assert UpstreamKey("ours", style).with_key(CLIENT, target) == [(b"User-Agent", b"x"), *shown]


def test_clients_anthropic_version_header_is_kept() -> None:
    spoken = (b"Anthropic-Version", b"2099-01-01")
    assert UpstreamKey("ours", "anthropic").with_key([spoken], "/v1/messages") == [spoken, PLAIN]


def test_upstreams_api_key_does_not_show_in_its_repr() -> None:
    assert "ours" not in repr(UpstreamKey("ours", "authorization"))


KEY = "0123456789abcdef"


def is_refused(location: bytes, status: int = 307, key: str | None = KEY) -> bool:
    reply = LitellmReply(status, [(b"Server", b"s"), (b"LOCATION", location)], b"")
    try:
        check_redirect(reply, key)
    except Redirected:
        return True
    return False


@pytest.mark.parametrize(
    "location",
    [
        *(b"http://127.0.0.1:8000/v1/x", b"https://evil.example", b"HTTP:evil.example", b"//evil/"),
        *(b"/\\evil/", b"\\\\evil/", b"/\t/evil/", b" \thttps://evil", b"ht\ttps://evil", b"x:y"),
        *(b"\x01https://evil", b"evil.example/x", b"\xff", b"\x0chttps://evil"),
    ],
)
def test_redirect_that_would_take_an_api_key_elsewhere_is_refused(location: bytes) -> None:
    for status in (300, 301, 302, 303, 307, 308, 399):
        assert is_refused(location, status)
    assert not is_refused(location, key=None)
    assert not is_refused(location, 201)
    assert not is_refused(location, 404)


@pytest.mark.parametrize("location", [b"/v1/models/", b"?a=//b", b"#x", b"../x", b"./x", b".", b""])
def test_redirect_within_the_proxy_is_passed_on(location: bytes) -> None:
    assert not is_refused(location)


def test_each_of_several_location_headers_of_a_redirect_is_checked() -> None:
    reply = LitellmReply(302, [(b"Location", b"/x"), (b"location", b"https://evil")], b"")
    with pytest.raises(Redirected, match="answered 302"):
        check_redirect(reply, KEY)
