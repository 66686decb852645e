"""Show a person the episodes without a score, or with a doubtful one, and post the person's score.

A score goes to the proxy's `/feedback` with the viewer's own API key, like any client's.
"""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

import aiohttp
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from console.episode import numbers_of
from console.pages import Refusal, console_of, form, page, reading, require, uuid_in, viewer_of
from console.versions import chosen_policy
from pawl.judging.answers import Away, Statement
from pawl.judging.feedback import ACCEPTED_STATUSES, feedback_url, post_once
from store.errors import Damaged
from store.judging import (
    REVIEW_KEY_PREFIX,
    ReviewReason,
    Scale,
    key_to_review,
    review_queue,
    scales_of,
)
from store.read.detail import episode_detail
from store.tenants import DEFAULT

# Episodes of the queue that are listed beside the one shown.
PAGE_SIZE: Final = 12
# Values on a metric's scale that have a number key.
STEPS: Final = 5
# The description of each part of the queue.
REASONS: Final[Mapping[ReviewReason, str]] = {
    "unscored": "Ended ten minutes ago or more, and nobody has scored them.",
    "disagreeing": "Two judges or API keys scored them, and differ by more than a quarter of the "
    "metric’s range.",
    "uncertain": "A judge could not tell or failed, or stated a confidence below 0.5.",
}


def steps_of(scale: Scale) -> list[float]:
    """Return the scores of the number keys 1, 2, …: `STEPS` values evenly up the scale (pure)."""
    width = scale.high - scale.low
    return [round(scale.low + width * step / (STEPS - 1), 6) for step in range(STEPS)]


def statements_of(
    given: Mapping[str, str], scales: Sequence[Scale], episode: str
) -> list[Statement]:
    """Convert a form about an episode to statements for `/feedback` (pure).

    A correction becomes a statement about its call, with the episode's first value.

    Raises:
        Refusal: the form has no value, or one outside its metric's scale.
    """
    statements = []
    for scale in scales:
        stated = given.get(f"value:{scale.metric}", "").strip()
        if stated:
            value = stated if stated in scale.texts else _parse_score(stated, scale)
            statements.append({"metric": scale.metric, "value": value, "episode": episode})
    if not statements:
        raise Refusal(400, "There is no score", "Choose a value, or skip it.")
    if correction := given.get("correction", "").replace("\r\n", "\n").strip():
        of_call = statements[0] | {"call": given.get("call", ""), "correction": correction}
        statements.append({name: of_call[name] for name in of_call if name != "episode"})
    return statements


def _parse_score(stated: str, scale: Scale) -> float:
    with suppress(ValueError):
        value = float(stated)
        if scale.low <= value <= scale.high:
            return value
    how = f"{scale.metric}: write a number from {scale.low:g} to {scale.high:g}."
    raise Refusal(400, "This is no score", how)


async def review(request: Request) -> Response:
    """Show the next episode of the queue, or post a score and go on to the next."""
    # A key can score only its own tenant's episodes, even if the viewer may see all tenants'.
    tenant = viewer_of(request).tenant or DEFAULT
    query = request.query_params
    reason: ReviewReason = next((kind for kind in REASONS if kind == query.get("kind")), "unscored")
    if request.method == "POST":
        return await _post_score(request, tenant, reason)
    before, until = uuid_in(query.get("before")), uuid_in(query.get("at"))
    async with reading(request) as connection:
        policy, policies = await chosen_policy(request, connection, tenant)
        if policy is None:
            return page(request, "review.html", policy=None, policies=policies)
        scales = await scales_of(connection, policy.name)
        queue = await review_queue(
            connection,
            policy.name,
            reason,
            scales,
            tenant,
            before=before,
            until=until,
            most=PAGE_SIZE,
        )
        calls = await _call_labels(connection, queue[0].episode_id) if queue else {}
        done = await _scores(connection, uuid_in(query.get("done")), tenant)
    return page(
        request,
        "review.html",
        policy=policy,
        policies=policies,
        reasons=REASONS,
        reason=reason,
        queue=queue,
        scales=scales,
        calls=calls,
        steps=steps_of(scales[0]) if len(scales) == 1 and not scales[0].texts else [],
        once=secrets.token_urlsafe(12),
        done=done,
        is_first=before is None and until is None,
    )


async def _scores(connection: AsyncConnection, episode: UUID | None, tenant: str) -> str | None:
    """Return an episode's key and scores as text; None if the tenant has no such episode."""
    key = None if episode is None else await key_to_review(connection, episode, tenant)
    if episode is None or key is None:
        return None
    scores = []
    with suppress(Damaged):
        detail = await episode_detail(connection, episode)
        scores = [one for one in detail.statements if one.counts and not one.call] if detail else []
    return ", ".join([key, *(f"{one.metric} {one.label or one.value}" for one in scores)])


async def _call_labels(connection: AsyncConnection, episode: UUID) -> dict[UUID, str]:
    """Return the labels of the calls that can be corrected, by id, the last call first."""
    try:
        detail = await episode_detail(connection, episode)
    except Damaged:
        return {}
    if detail is None:
        return {}
    numbers = numbers_of(detail)
    return {
        call.id: f"call {numbers[call.id]}, {call.agent}"
        for call in detail.calls[::-1]
        if call.sampled_tokens and call.id not in detail.tools.repeated_by
    }


async def _post_score(request: Request, tenant: str, reason: ReviewReason) -> Response:
    """Post a form's scores; sending the form (field `once`) again adds nothing."""
    require(request, "feedback")
    given = await form(request)
    episode, once = uuid_in(given.get("episode")), given.get("once", "")
    async with reading(request) as connection:
        policy, _ = await chosen_policy(request, connection, tenant)
        key = None if episode is None else await key_to_review(connection, episode, tenant)
        scales = [] if policy is None else await scales_of(connection, policy.name)
    if policy is None or key is None or not once.isascii():
        raise Refusal(404, "There is no such episode", "It may have been deleted.")
    statements = statements_of(given, scales, key)
    console, credential = console_of(request), request.state.credential
    url = feedback_url(console.settings.listen)
    credentials = {} if credential is None else {"Authorization": f"Bearer {credential}"}
    try:
        async with aiohttp.ClientSession() as session:
            status, answer = await post_once(
                session, url, statements, REVIEW_KEY_PREFIX + once[:64], credentials
            )
    except Away as error:
        raise Refusal(
            502,
            "The proxy does not answer",
            f"{url} {error}. The score may not have been posted: go back and send it again, which "
            "counts once. PAWL_LISTEN has to be the proxy's address.",
        ) from error
    if status not in ACCEPTED_STATUSES:
        why = f"{url} answered {status}: {answer}"
        raise Refusal(max(status, 400), "The proxy refused the score", why)
    query = {"policy": policy.name, "kind": reason, "before": episode, "done": episode}
    return RedirectResponse(console.url("review", query=query), 303)


ROUTES: Final = [Route("/review", review, name="review", methods=["GET", "POST"])]
