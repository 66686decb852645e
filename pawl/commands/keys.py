"""`pawl keys …`: make, list and revoke the API keys of the proxy's ports."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from pawl.commands.common import (
    AsJson,
    OfTenant,
    in_transaction,
    make_table,
    with_flags,
    write_lines,
)
from store.grants import SCOPE_USES
from store.records import Record
from store.tenants import DEFAULT

if TYPE_CHECKING:
    from store.keys import ApiKey

app = typer.Typer(
    no_args_is_help=True,
    help="Make, list and revoke the API keys that the proxy's ports ask for.",
)

InJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class KeyFlags(Record, frozen=True, kw_only=True):
    """The arguments of `pawl keys create`."""

    name: Annotated[
        str, typer.Argument(help="Name of the key, by which it is revoked.", show_default=False)
    ]
    scope: Annotated[
        str,
        typer.Option(
            help="What it may be used for, comma-separated: "
            + "; ".join(f"{scope} ({allowed})" for scope, allowed in SCOPE_USES.items())
            + "."
        ),
    ] = "infer,feedback"
    tenant: Annotated[
        str,
        typer.Option(
            help="Tenant that the key belongs to: a client with it sees and scores only this "
            "tenant's data, and its calls train this tenant's policies."
        ),
    ] = DEFAULT
    per_minute: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Requests that may begin in any minute, in one proxy; each statement of feedback "
            "counts as one.",
        ),
    ] = None
    at_once: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Requests that may run at once, in one proxy."),
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2_000_000_000,
            help="Tokens, of prompts and replies, after which no call may begin in that minute.",
        ),
    ] = None
    as_json: InJson = False


@app.command()
@with_flags(KeyFlags)
def create(flags: KeyFlags) -> None:
    """Make a key and print it. It cannot be shown again: only its hash is kept.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). Proxies take the key
    within two seconds. Once there is a key, both ports refuse every request without one.

    Status 2: a key that is not revoked has this name already, a scope is unknown, or a tenant other
    than the default one was to have a key with the scope admin.
    """
    from store.grants import Limits
    from store.keys import create_key, parse_scopes

    scopes = parse_scopes(flags.scope)
    limits = Limits(
        per_minute=flags.per_minute,
        at_once=flags.at_once,
        tokens_per_minute=flags.tokens_per_minute,
    )
    new = in_transaction(
        lambda connection: create_key(connection, flags.name, scopes, limits, flags.tenant)
    )
    if flags.as_json:
        line = msgspec.json.encode(msgspec.to_builtins(new.about) | {"key": new.key})
        sys.stdout.buffer.write(line + b"\n")
        return
    print(new.key)
    whose = "" if flags.tenant == DEFAULT else f" of tenant {flags.tenant}"
    about = f"key {flags.name} ({new.about.id}){whose} for {','.join(scopes)}"
    print(f"{about}: keep it, it is not shown again", file=sys.stderr)


@app.command("list")
def list_all(tenant: OfTenant = None, as_json: AsJson = False) -> None:
    """List the keys, revoked ones too: names, ids, scopes and times, never a secret.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR); nothing is changed
    in it.
    """
    from store.keys import list_keys

    listed = in_transaction(lambda connection: list_keys(connection, tenant))
    write_lines(listed, keys_table, as_json=as_json)


def keys_table(keys: "Sequence[ApiKey]") -> Table:
    from store.keys import ApiKey

    def shown(key: ApiKey) -> Iterable[Any]:
        row = msgspec.structs.asdict(key) | {"scopes": ",".join(key.scopes)}
        for name in ("created_at", "revoked_at"):
            row[name] = row[name] and f"{row[name]:%Y-%m-%d %H:%M} UTC"
        return row.values()

    return make_table(ApiKey.__struct_fields__, map(shown, keys))


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="Name or id of the key.", show_default=False)],
    tenant: OfTenant = None,
    as_json: InJson = False,
) -> None:
    """Revoke a key: proxies that reach the database refuse it within two seconds.

    Calls under way are finished. After the last key is revoked nobody may call, not even on
    loopback, until a new one is made.

    Status 2: no key with this name or id exists that is not revoked already.
    """
    from store.keys import revoke_key

    revoked = in_transaction(lambda connection: revoke_key(connection, key, tenant))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(revoked) + b"\n")
    else:
        print(f"key {revoked.name} ({revoked.id}) is revoked")
