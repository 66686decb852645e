"""Refuse requests of tenants that name what is kept for all of them, or say what becomes of them.

A provider keeps files and the like under one account, and whose they are is not known. Where a
request goes, with whose key, and before which others is not for one of several tenants to say.
Requests of the default tenant may: the provider's account is its own.
"""

from collections.abc import Mapping
from typing import Any

from proxy.errors import BadRequest, NotKept
from proxy.formats.kept import kept_name
from proxy.formats.steering import PRIORITY, goes_before, misspelt_name, place_name
from store.tenants import DEFAULT


def check_fields(tenant: str, fields: Mapping[str, Any]) -> None:
    """Check that fields, of an object, a form or a query, name nothing that is not the tenant's.

    Raises:
        NotKept: they name a file or the like, whose it is not known.
        BadRequest: they say where the request goes, with which key, or before which others.
    """
    if tenant == DEFAULT:
        return
    kept = kept_name(fields)
    if kept is not None:
        raise NotKept(
            f"{kept} names what is kept for all tenants under one account, and it is not known "
            "whose it is: send the content itself in the request",
            param=kept,
            code="kept_for_all_tenants",
        )
    place = place_name(fields)
    if place is not None:
        raise BadRequest(
            f"{place} says where the model server sends the request, or with whose key, and that "
            "is not for a tenant of several to say: leave it out",
            param=place,
            code="place_not_chosen",
        )
    if goes_before(fields):
        raise BadRequest(
            "priority would have the request worked on before or after other tenants': leave it "
            "out",
            param=PRIORITY,
            code="priority_not_chosen",
        )
    misspelt = misspelt_name(fields)
    if misspelt is not None:
        raise BadRequest(
            f"{misspelt} is a field's name to some servers, and to others it is not: write "
            f"{misspelt.casefold()}",
            param=misspelt,
            code="unclear_body",
        )
