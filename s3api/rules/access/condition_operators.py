"""Condition operators of policies.

Source: "IAM JSON policy elements: Condition operators" in the IAM User Guide.

A name is in lower case and may have a set qualifier before it (`forallvalues:`, `foranyvalue:`) and
`ifexists` behind it. A request's value is a tuple of texts, None where the key is absent. Negated
operators hold for an absent key, others do not; `ForAllValues` holds for it, `ForAnyValue` does
not.
"""

import ipaddress
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from s3api.rules.access.glob import is_fixed, matches

_SETS: Final = ("forallvalues:", "foranyvalue:")
_REMEMBERED: Final = 1024
_IF_EXISTS: Final = "ifexists"
_WILDCARD: Final = re.compile(r"\$\{[*?$]\}|([*?])")
_NARROW_PREFIX: Final = {4: 8, 6: 32}

Match = Callable[[str, str], bool]


def holds(name: str, patterns: Sequence[str], values: tuple[str, ...] | None) -> bool:
    """Returns whether the operator holds for the key's patterns in the policy and values in the
    request."""
    qualifier, operator, if_exists = _split(name)
    if operator == "null":
        return any((values is None) == (each.lower() == "true") for each in patterns)
    if values is None and if_exists:
        return True
    match, negated = _OPERATORS[operator]
    if values is None:
        return qualifier == _SETS[0] or (negated and not qualifier)

    def holds_for(value: str) -> bool:
        return any(match(each, value) for each in patterns) is not negated

    if qualifier == _SETS[0] or (negated and not qualifier):
        return all(holds_for(value) for value in values)
    return any(holds_for(value) for value in values)


def is_known(name: str) -> bool:
    """Returns whether there is such an operator."""
    _, operator, if_exists = _split(name)
    return operator in _OPERATORS or (operator == "null" and not if_exists)


def are_valid(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether an operator of that name can take the patterns; variables are accepted
    unchecked."""
    _, operator, _ = _split(name)
    check = _CHECKS.get(operator.replace("not", ""))
    return bool(patterns) and (
        check is None or all("${" in each or check(each) for each in patterns)
    )


def is_narrow_network(pattern: str) -> bool:
    """Returns whether a network is small enough to be no public one: /8 (IPv4), /32 (IPv6) or
    longer."""
    network = _network(pattern)
    return network is not None and network.prefixlen >= _NARROW_PREFIX[network.version]


def _split(name: str) -> tuple[str, str, bool]:
    qualifier = next((each for each in _SETS if name.startswith(each)), "")
    operator = name.removeprefix(qualifier)
    return qualifier, operator.removesuffix(_IF_EXISTS), operator.endswith(_IF_EXISTS)


def _equals(pattern: str, value: str) -> bool:
    """Compares without wildcards: the value of a variable is still escaped."""
    return matches(_star_free(pattern), value)


def _star_free(pattern: str) -> str:
    if is_fixed(pattern):
        return pattern
    return _WILDCARD.sub(lambda match: f"${{{match[1]}}}" if match[1] else match[0], pattern)


def _equals_ignoring_case(pattern: str, value: str) -> bool:
    return _equals(pattern.lower(), value.lower())


def _is_arn(pattern: str, value: str) -> bool:
    """Compares each of the six parts separately: a star does not reach over a colon."""
    ours, theirs = pattern.split(":", 5), value.split(":", 5)
    return len(ours) == len(theirs) and all(map(matches, ours, theirs))


def _is_bool(pattern: str, value: str) -> bool:
    return pattern.lower() == value.lower()


def _is_inside(pattern: str, value: str) -> bool:
    network = _network(pattern)
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return network is not None and (mapped or address) in network


@lru_cache(_REMEMBERED)
def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _time(text: str) -> float | None:
    """Returns Unix seconds of an ISO 8601 time or of a number of seconds."""
    if (seconds := _number(text)) is not None:
        return seconds
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _compared(
    read: Callable[[str], float | None], compare: Callable[[float, float], bool]
) -> Match:
    def match(pattern: str, value: str) -> bool:
        limit, number = read(pattern), read(value)
        return limit is not None and number is not None and compare(number, limit)

    return match


def _comparisons(family: str, read: Callable[[str], float | None]) -> dict[str, tuple[Match, bool]]:
    equal = _compared(read, lambda value, limit: value == limit)
    return {
        f"{family}equals": (equal, False),
        f"{family}notequals": (equal, True),
        f"{family}lessthan": (_compared(read, lambda value, limit: value < limit), False),
        f"{family}lessthanequals": (_compared(read, lambda value, limit: value <= limit), False),
        f"{family}greaterthan": (_compared(read, lambda value, limit: value > limit), False),
        f"{family}greaterthanequals": (_compared(read, lambda value, limit: value >= limit), False),
    }


# Name -> how one pattern and one value match, whether the operator wants that none does.
_OPERATORS: Final[dict[str, tuple[Match, bool]]] = {
    "stringequals": (_equals, False),
    "stringnotequals": (_equals, True),
    "stringequalsignorecase": (_equals_ignoring_case, False),
    "stringnotequalsignorecase": (_equals_ignoring_case, True),
    "stringlike": (matches, False),
    "stringnotlike": (matches, True),
    "arnequals": (_is_arn, False),
    "arnnotequals": (_is_arn, True),
    "arnlike": (_is_arn, False),
    "arnnotlike": (_is_arn, True),
    "bool": (_is_bool, False),
    "binaryequals": (_equals, False),
    "ipaddress": (_is_inside, False),
    "notipaddress": (_is_inside, True),
    **_comparisons("numeric", _number),
    **_comparisons("date", _time),
}


def _is_truth(text: str) -> bool:
    return text.lower() in ("true", "false")


_CHECKS: Final[dict[str, Callable[[str], bool]]] = {
    "bool": _is_truth,
    "null": _is_truth,
    "ipaddress": lambda text: _network(text) is not None,
    **{name: lambda text: _number(text) is not None for name in _comparisons("numeric", _number)},
    **{name: lambda text: _time(text) is not None for name in _comparisons("date", _time)},
}
