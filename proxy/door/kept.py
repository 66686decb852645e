"""Refuse requests of tenants that name what a provider keeps under one account for all of them."""

from collections.abc import Mapping
from typing import Any

from proxy.errors import BadRequest, NotKept
from proxy.formats.base import ModelRequest
from proxy.formats.kept import all_fields, kept_name
from store.tenants import DEFAULT


def check_kept(tenant: str, request: ModelRequest) -> None:
    """Check that a request names no file or the like, whose it is not known.

    Those of the default tenant may: the provider's account is its own.

    Raises:
        NotKept: it names one.
        BadRequest: a field cannot be read, and may name one.
    """
    if tenant == DEFAULT:
        return
    try:
        fields = all_fields(request)
    except ValueError as error:
        raise BadRequest(
            f"The body cannot be read ({error}), so it is not known what it names: send numbers "
            "of fewer digits, or texts in their place",
            code="invalid_json",
        ) from error
    check_fields(tenant, fields)


def check_fields(tenant: str, fields: Mapping[str, Any]) -> None:
    """Check that fields, of an object or a form, name nothing that is kept, as `check_kept` does.

    Raises:
        NotKept: they do.
    """
    name = None if tenant == DEFAULT else kept_name(fields)
    if name is not None:
        raise NotKept(
            f"{name} names what is kept for all tenants under one account, and it is not known "
            "whose it is: send the content itself in the request",
            param=name,
            code="kept_for_all_tenants",
        )
