"""Fill a database by SQL with a ledger of any size, like one after months of use.

It has three policies with thirty trained versions each; runs of 12 to 28 calls by three agents;
tasks in groups of eight; tool events, rewards and changed rewards, updates with consumed episodes,
and the history of versions. The rows are consistent, as readers expect. `python -m
benchmarks.ledger URL` fills an empty database.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import asyncpg
from msgspec import to_builtins
from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.storage import agent_calls
from controller.comparison import ArmFigures, Figures, PartFigures
from store.database import make_engine
from store.link.outages import IN_OUTAGE
from store.schema.migrate import upgrade
from store.schema.partitions import ensure_partition
from store.values.packing import pack_ids, pack_logprobs
from store.write.ingest import Ingester
from trainer.recipes.recipe import PublishOptions, load_recipe

EPISODES, DAYS = 50_000, 10
POLICIES: Final = ("code", "sql", "support")
VERSIONS: Final = 30
# Name and calls of one long run, in which each call repeats all before it.
LONG_RUN, LONG_RUN_TURNS = "the-long-run", 200
# Episodes that an update trains; the other episodes of its version expired.
TRAINED: Final = 256
GROUP: Final = 8
CALL_EVERY_MS: Final = 7_000
BATCH: Final = 5_000

# Format strings of a call. Arguments: its number, policy, place and tool; number and tool; policy,
# task, place and tool.
_REPLY: Final = (
    '{"id":"chatcmpl-%1$s","object":"chat.completion","created":1795000000,"model":"%2$s",'
    '"choices":[{"index":0,"message":{"role":"assistant","content":"Step %3$s: the test still '
    'fails in the parser, so I look at it with the tool %4$s before I change anything.",'
    '"tool_calls":[{"id":"call_%1$s","type":"function","function":{"name":"%4$s","arguments":'
    '"{\\"path\\": \\"src/parser.py\\"}"}}]},"finish_reason":"tool_calls"}]}'
)
_TOOL_CALLS: Final = (
    '[{"id":"call_%1$s","name":"%2$s","arguments":"{\\"path\\": \\"src/parser.py\\"}"}]'
)
_REQUEST: Final = (
    '{"model":"%1$s","messages":[{"role":"system","content":"You repair programs, step by step, '
    'with the tools that you are given."},{"role":"user","content":"Task %2$s, step %3$s: make the '
    'failing test pass, and change as little as you can."},{"role":"tool","tool_call_id":"call_0",'
    '"content":"%4$s: 3 passed, 1 failed in 0.42 s"}]}'
)
_METRICS: Final = {
    "groups": 32,
    "episodes": 256,
    "earlier_members": 0,
    "trained_episodes": 228,
    "dropped": {"no_spread": 28},
    "air_mean": 0.8,
    "staleness_mean": 0.4,
    "tool_events": 2400,
    "signal_episodes": 228.0,
    "step_share": 0.94,
    "grad_norm": 0.4,
    "optimizer_steps": 2,
    "learning_rate": 2e-4,
    "rows": 700,
    "recomputed_rows": 0,
    "sampled_tokens": 123_000,
    "row_tokens": 328_000,
    "computed_tokens": 250_000,
    "clip_share": 0.03,
    "entropy": 0.9,
    "drift_kl": 0.0004,
    "drift_logp_mean_abs": 0.01,
    "staleness_kl": 0.001,
    "ratio_cut_share": 0.01,
    "masked_share": 0.0,
    "kl_tokens": 4096,
}
_EVIDENCE: Final = {
    "verdict": "better",
    "figures": to_builtins(
        Figures(
            new=ArmFigures(200, 10, 4, 0, 0.62),
            old=ArmFigures(210, 12, 4, 0, 0.55),
            difference=0.07,
            lower=0.01,
            upper=0.13,
            better=24.0,
            better_needed=20.0,
            worse=0.4,
            worse_needed=40.0,
            guards=[PartFigures("failed requests", 0.02, 0.02, 0.3, 60.0)],
        )
    ),
    "rule": PublishOptions(mode="canary").model_dump(),
}

_FUNCTIONS: Final = """
CREATE FUNCTION pg_temp.made_at(ms bigint, number bigint) RETURNS uuid
LANGUAGE sql IMMUTABLE AS $$ SELECT (lpad(to_hex(ms), 12, '0') || '7' ||
    lpad(to_hex(number % 4096), 3, '0') || '8' || left(md5(number::text), 15))::uuid $$;
CREATE FUNCTION pg_temp.chance(number bigint, seed bigint) RETURNS float8
LANGUAGE sql IMMUTABLE AS $$ SELECT (hashint8extended(number, seed) & 1048575) / 1048576.0 $$;
CREATE FUNCTION pg_temp.at(ms bigint) RETURNS timestamptz
LANGUAGE sql IMMUTABLE AS $$ SELECT to_timestamp(ms / 1000.0) $$;
"""
# One run in twenty has no score, one in twenty is an evaluation, one in fifty failed, one in a
# hundred was joined to another run, one in two hundred is quarantined.
_RUNS: Final = """
CREATE TEMP TABLE runs AS
SELECT *, pg_temp.made_at(ms, n * 64) AS id, policy || '/' || (k / {group}) % {tasks} AS task,
    12 + n % 17 AS calls,
    CASE WHEN n % 100 = 37 THEN pg_temp.made_at(ms - 3 * {pace}, (n - 3) * 64) END AS root,
    CASE WHEN n % 20 = 13 THEN 'eval' ELSE 'train' END AS split,
    CASE WHEN n % 20 = 3 OR n % 50 = 7 THEN NULL
        WHEN policy = 'sql'
            THEN round(least(1, pg_temp.chance(n, 1) * 0.6 + version * 0.014)::numeric, 3)
        WHEN pg_temp.chance(n, 1) < 0.3 + 0.015 * version THEN 1 ELSE 0 END::float8 AS reward,
    n % 50 = 7 AS failed
FROM (SELECT n, n / 3 AS k, (ARRAY['code', 'sql', 'support'])[1 + n % 3] AS policy,
        least({versions}, n * ({versions} + 1) / {episodes})::int AS version,
        {first} + n * {pace} AS ms
    FROM generate_series(0::bigint, {episodes} - 1) n) numbered;
CREATE INDEX ON runs (n);
ANALYZE runs;
"""
_EPISODES: Final = """
INSERT INTO episodes (id, key, method, task, task_named, task_from, policy, policy_version,
    first_call_id, last_call_id, last_call_at, failed, scored_at, reward, linked, root, split,
    quarantined_reason)
SELECT id, 'run-' || n, 'header', task, true, id, policy, version, id,
    pg_temp.made_at(ms + (calls - 1) * {call_ms}, n * 64 + calls - 1),
    pg_temp.at(ms + (calls - 1) * {call_ms}), failed,
    CASE WHEN reward IS NOT NULL THEN pg_temp.at(ms + calls * {call_ms}) END, reward, true, root,
    split, CASE WHEN n % 200 = 11 THEN {outage} END
FROM runs
"""
_CALLS: Final = """
INSERT INTO transitions (id, method, confidence, agent, policy, policy_version, status, http_status,
    reply, trainable, reason, dialect, served_model, stream, response_id, sampling, tool_calls,
    usage, finish, started_at, first_chunk_ms, total_ms, retry, split, arm, episode_id, request,
    prompt_ids, sampled_ids, sampled_logprobs)
SELECT pg_temp.made_at(ms, number), 'header', 'certain',
    (ARRAY['planner', 'coder', 'tester'])[1 + i % 3], policy, version,
    CASE WHEN refused THEN 'upstream_error' ELSE 'complete' END,
    CASE WHEN refused THEN 422 ELSE 200 END,
    convert_to(format($1::text, number, policy, i, tool), 'UTF8'),
    NOT (refused OR number % 25 = 4),
    CASE WHEN refused THEN 'error_reply' WHEN number % 25 = 4 THEN 'greedy' END,
    'chat', policy || '@' || version, i % 2 = 0, 'chatcmpl-' || number,
    '{{"temperature":1.0,"top_p":1.0,"top_k":0}}',
    CASE WHEN i < calls - 1 THEN format($2::text, number, tool) ELSE '[]' END::json,
    '{{"prompt_tokens":40,"completion_tokens":24,"total_tokens":64}}',
    CASE WHEN i < calls - 1 THEN 'tool_calls' ELSE 'stop' END, pg_temp.at(ms), 80 + number % 40,
    900 + number % 3000, 0, split, CASE WHEN n % 10 = 0 THEN 'control' ELSE 'serving' END, id,
    convert_to(format($3::text, policy, task, i, tool), 'UTF8'), $4::bytea, $5::bytea, $6::bytea
FROM (SELECT r.n, r.ms + i * {call_ms} AS ms, r.n * 64 + i AS number, i, calls, policy, version,
        task, split, id, failed AND i = calls - 1 AS refused,
        (ARRAY['read_file', 'run_tests', 'search', 'edit'])[1 + i % 4] AS tool
    FROM runs r, generate_series(0, r.calls - 1) i
    WHERE r.n >= $7::bigint AND r.n < $8::bigint) calls
"""
_REST: Final = """
INSERT INTO episode_policies (episode_id, policy, own_version, own_latest, version, latest, task,
    scored_at, reward, failed, last_call_at, claimable)
SELECT id, policy, policy_version, policy_version, policy_version, policy_version, task, scored_at,
    reward, failed, last_call_at, split = 'train' AND quarantined_reason IS NULL
FROM episodes WHERE root IS NULL AND key LIKE 'run-%';
INSERT INTO tool_events (id, episode_id, asked_by, tool_id, name, status, detail, ms, source, at)
SELECT pg_temp.made_at(at, number), id, pg_temp.made_at(asked, number - 1), 'call_' || number - 1,
    (ARRAY['read_file', 'run_tests', 'search', 'edit'])[1 + (i - 1) % 4],
    CASE number % 10 WHEN 6 THEN 'error' WHEN 8 THEN 'timeout' WHEN 9 THEN 'malformed'
        ELSE 'ok' END,
    CASE WHEN number % 10 = 6 THEN 'exit status 1' END, number % 900, 'header', pg_temp.at(at)
FROM (SELECT ms + i * {call_ms} AS at, ms + (i - 1) * {call_ms} AS asked, n * 64 + i AS number, i,
        id FROM runs, generate_series(1, calls - 1) i WHERE (n + i) % 2 = 0) events;
INSERT INTO feedback_requests (id, idempotency_key, body_hash, at)
SELECT pg_temp.made_at(ms + calls * {call_ms}, n), 'scored-' || n, md5(n::text),
    pg_temp.at(ms + calls * {call_ms}) FROM runs WHERE reward IS NOT NULL;
INSERT INTO feedback (id, metric, value, label, target_kind, target, episode_id, request_id, at)
SELECT pg_temp.made_at(ms + calls * {call_ms}, n * 4 + place), metric, value, label, 'episode',
    'run-' || n, id, pg_temp.made_at(ms + calls * {call_ms}, n),
    pg_temp.at(ms + calls * {call_ms} + later)
FROM runs, LATERAL (VALUES (0, 'reward', reward, NULL, 0),
    (1, 'judge_tests', round(pg_temp.chance(n, 2)::numeric, 2)::float8, NULL, 0),
    (2, 'judge_style', NULL, (ARRAY['good', 'fair', 'poor'])[1 + n % 3], 0),
    (3, 'reward', reward, NULL, 60000)) said (place, metric, value, label, later)
WHERE reward IS NOT NULL AND (place < 3 OR n % 50 = 1);
INSERT INTO judgements (episode_id, judge, outcome, reason, attempts, last_call_at, at)
SELECT id, 'tests', CASE WHEN n % 20 = 3 THEN 'cannot_tell' ELSE 'judged' END,
    CASE WHEN n % 20 = 3 THEN 'the log ends before the verdict' END, 1,
    pg_temp.at(ms + (calls - 1) * {call_ms}), pg_temp.at(ms + calls * {call_ms})
FROM runs WHERE n % 4 = 3;
INSERT INTO updates (id, policy, parent_version, version, state, recipe, metrics, group_size,
    oldest_version, claimed_at, finished_at)
SELECT pg_temp.made_at(ms, v * 4 + place), policy, v - 1, v, 'done', {recipe}::jsonb,
    {metrics}::jsonb || jsonb_build_object(
        'reward_mean', 0.3 + 0.015 * v, 'loss', 0.02 * pg_temp.chance(v, 5) - 0.01,
        'kl_to_base', 0.002 * v, 'effective_sample_size', 0.8 + 0.2 * pg_temp.chance(v, 6),
        'tokens_per_second', 2000 + v * 10, 'train_seconds', 60 + v), {group}, greatest(0, v - 4),
    pg_temp.at(ms), pg_temp.at(ms + 90000)
FROM (SELECT policy, v, place, {first} + v * {episodes}::bigint * {pace} / ({versions} + 1) AS ms
    FROM generate_series(1, {versions}) v,
        unnest(ARRAY['code', 'sql', 'support']) WITH ORDINALITY p (policy, place)) made;
INSERT INTO updates (id, policy, parent_version, version, state, recipe, metrics, claimed_at,
    finished_at)
SELECT pg_temp.made_at((extract(epoch FROM claimed_at) * 1000)::bigint + 100000,
        row_number() OVER ()),
    policy, parent_version, NULL, CASE WHEN version % 10 = 9 THEN 'abandoned' ELSE 'expired' END,
    recipe, CASE WHEN version % 10 = 9 THEN '{{"error": "CUDA out of memory"}}'
        ELSE '{{"dropped": {{"stale": 300}}}}' END::jsonb,
    claimed_at + interval '100 s', claimed_at + interval '101 s' FROM updates;
WITH ranked AS (
    SELECT e.episode_id, e.policy, e.version + 1 AS version,
        row_number() OVER (PARTITION BY e.policy, e.version ORDER BY e.episode_id) AS place
    FROM episode_policies e WHERE e.claimable AND e.scored_at IS NOT NULL AND e.version < {versions}
), spent AS (
    SELECT r.*, u.id AS update_id FROM ranked r JOIN updates u ON u.policy = r.policy
        AND CASE WHEN r.place <= {trained} THEN u.version = r.version
            ELSE u.state = 'expired' AND u.parent_version = r.version - 1 END
), marked AS (
    UPDATE episode_policies e SET claimed_by = s.update_id FROM spent s
    WHERE (e.episode_id, e.policy) = (s.episode_id, s.policy)
)
INSERT INTO consumptions (episode_id, policy, update_id, trained, reason, at)
SELECT s.episode_id, s.policy, s.update_id, place <= {trained} AND place % 9 > 0,
    CASE WHEN place > {trained} THEN 'stale' WHEN place % 9 = 0 THEN 'alone' END, u.finished_at
FROM spent s JOIN updates u ON u.id = s.update_id;
INSERT INTO policies (name, version, state, served_name, created_at, changed_at, share, gate)
SELECT name, 0, 'retired', 'm', pg_temp.at({first}), pg_temp.at({first}), NULL, {gate}::jsonb
FROM unnest(ARRAY['code', 'sql', 'support']) name;
INSERT INTO policies (name, version, state, served_name, adapter_path, update_id, created_at,
    changed_at, share, gate, unloaded_at, files_deleted_at)
SELECT policy, version, state, policy || '@' || version,
    '/var/lib/pawl/adapters/' || policy || '/' || version, id, finished_at, finished_at,
    CASE WHEN state = 'canary' THEN 0.1 END, {gate}::jsonb,
    CASE WHEN version < {versions} - 4 AND state = 'retired'
        THEN finished_at + interval '1 day' END,
    CASE WHEN version < {versions} - 9 AND state <> 'rolled_back'
        THEN finished_at + interval '2 days' END
FROM (SELECT id, policy, version, finished_at,
    CASE WHEN version = {versions} AND policy = 'sql' THEN 'canary'
        WHEN version = {versions} THEN 'serving'
        WHEN version = {versions} - 1 AND policy = 'sql' THEN 'serving'
        WHEN version % 10 = 4 THEN 'rejected' WHEN version % 15 = 8 THEN 'rolled_back'
        ELSE 'retired' END AS state FROM updates WHERE version IS NOT NULL) made;
INSERT INTO policy_events (id, name, version, from_state, to_state, reason, actor, evidence, at)
SELECT pg_temp.made_at((extract(epoch FROM p.created_at) * 1000)::bigint + step * 60000,
        row_number() OVER ()),
    name, version, from_state, to_state, reason, actor, evidence,
    created_at + step * interval '1 minute'
FROM (SELECT name, version, state AS now, created_at FROM policies) p, LATERAL (VALUES
    (1, NULL, 'written', 'an update made it', 'trainer', NULL::jsonb),
    (2, 'written', 'loaded', 'every server has it', 'controller', NULL),
    (3, 'loaded', 'canary', 'it is tried', 'controller', NULL),
    (4, 'canary', CASE WHEN now = 'rejected' THEN 'rejected' ELSE 'serving' END,
        CASE WHEN now = 'rejected' THEN 'it is worse' ELSE 'it is better' END, 'controller',
        {evidence}::jsonb),
    (5, 'serving', now, 'another version serves', 'controller', NULL)
) steps (step, from_state, to_state, reason, actor, evidence)
WHERE (version > 0 OR step IN (1, 2, 4)) AND (now <> 'canary' OR step < 4)
    AND (step < 5 OR now IN ('retired', 'rolled_back'));
"""


async def fill_database(
    database_url: str,
    episodes: int = EPISODES,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Fill an empty database with `episodes` runs of twenty calls on average, and a long one."""
    began, pace = time.monotonic(), DAYS * 86_400_000 // episodes
    # The last runs ended an hour ago.
    first = datetime.now(UTC) - timedelta(days=DAYS, hours=1)
    recipe = load_recipe("default").model_dump(mode="json")
    values: dict[str, object] = {
        "first": round(first.timestamp() * 1000),
        "pace": pace,
        "episodes": episodes,
        "versions": VERSIONS,
        "tasks": max(1, episodes // (len(POLICIES) * GROUP * 3)),
        "group": GROUP,
        "trained": TRAINED,
        "call_ms": CALL_EVERY_MS,
        "outage": f"'{IN_OUTAGE}'",
        "recipe": f"$json${json.dumps(recipe)}$json$",
        "gate": f"$json${json.dumps(recipe['publish'])}$json$",
        "metrics": f"$json${json.dumps(_METRICS)}$json$",
        "evidence": f"$json${json.dumps(_EVIDENCE)}$json$",
    }
    await upgrade(database_url)
    engine = make_engine(database_url)
    async with engine.begin() as connection:
        for day in range(DAYS + 2):
            await ensure_partition(connection, (first + timedelta(days=day)).date())
    driver = await asyncpg.connect(database_url)
    try:
        await driver.execute("SET synchronous_commit = off; SET work_mem = '128MB'")
        await driver.execute(_FUNCTIONS)
        await driver.execute(_RUNS.format(**values))
        await driver.execute(_EPISODES.format(**values))
        packed = (pack_ids(range(40)), pack_ids(range(24)), pack_logprobs([-0.5] * 24))
        for start in range(0, episodes, BATCH):
            texts = (_REPLY, _TOOL_CALLS, _REQUEST)
            chosen = _CALLS.format(**values)
            await driver.execute(chosen, *texts, *packed, start, start + BATCH)
            say(f"{start + BATCH:,} episodes after {time.monotonic() - began:.0f} s")
        await driver.execute(_REST.format(**values))
        await _store_long_run(engine)
        await driver.execute("VACUUM ANALYZE")
    finally:
        await driver.close()
        await engine.dispose()
    say(f"filled after {time.monotonic() - began:.0f} s")


async def _store_long_run(engine: AsyncEngine) -> None:
    calls = agent_calls(random.Random(7), LONG_RUN_TURNS)
    served = {"episode": LONG_RUN, "policy": "code", "policy_version": VERSIONS, "agent": "coder"}
    await Ingester().store(engine, [replace(call, **served) for call in calls])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("database_url")
    parser.add_argument("--episodes", type=int, default=EPISODES, help=f"({EPISODES})")
    options = parser.parse_args()
    asyncio.run(fill_database(options.database_url, options.episodes, print))


if __name__ == "__main__":
    main()
