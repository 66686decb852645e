"""Make a few calls by hand: is it up, and does it answer as it should?"""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from benchmarks.proxy import wire


class WrongAnswer(Exception):
    """Report that a peer answers, and not with what the model server said."""


def answers(url: str) -> bool:
    """Return whether a GET of it is a 200."""
    try:
        with urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (URLError, HTTPError, http.client.HTTPException, OSError):
        return False


def fetched(url: str, body: object | None = None) -> Any:
    """Return the JSON that is there, or that a POST of `body` gives."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=30) as response:
        return json.load(response)


def one_call(
    url: str, mark: str, chars: int = wire.PROMPT_CHARS, key: str = wire.KEY
) -> tuple[Mapping[str, str], Any]:
    """Return headers and reply of one call.

    Raises:
        WrongAnswer: it is not a 200.
    """
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", at.path, wire.prompt(mark, chars), headers)
        response = connection.getresponse()
        said = response.read()
        if response.status != 200:
            raise WrongAnswer(f"{url} answers {response.status}: {said[:200]!r}")
        return dict(response.getheaders()), json.loads(said)
    finally:
        connection.close()


def check_reply(reply: Any, tokens: int) -> None:
    """Raise `WrongAnswer` unless the text is the model server's, whole."""
    said = reply["choices"][0]["message"]["content"]
    if said != "word " * (3 * tokens):
        raise WrongAnswer(f"the reply's text is another: {said[:80]!r}")


def check_hidden(headers: Mapping[str, str], reply: Any) -> None:
    """Raise `WrongAnswer` unless the ids that Pawl asked for were taken out again."""
    choice = reply["choices"][0]
    left = [choice["token_ids"], choice["logprobs"], reply["prompt_token_ids"]]
    if left != [None, None, None] or "x-pawl-call" not in {name.lower() for name in headers}:
        raise WrongAnswer("ids were passed on to a client that did not ask, or x-pawl-call is gone")
