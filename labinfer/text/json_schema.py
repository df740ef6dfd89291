"""fit_schema: reduces a JSON schema (as zod, pydantic and OpenAPI write them) to the keywords that a grammar can enforce.

Keywords are those of JSON Schema 2020-12. Keywords of older drafts, and OpenAPI's ``nullable``, are converted to them.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.json_depth import MAX_DEPTH, exceeds_max_depth
from labinfer.text.schema_exclusion import SchemaExclusion

NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of JSON Schema whose value is an object that maps names to schemas."""
SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE_SCHEMAS = ("items", "additionalProperties")
PLAIN_KEYWORDS = frozenset(
    ("enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems", "minLength")
    + ("maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
)
UNHELD_KEYWORDS = frozenset(
    ("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames")
    + ("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties")
)
"""Keywords that llguidance's grammars cannot enforce. A keyword that is neither here nor supported by llguidance does not restrict
values."""
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # keywords that llguidance supports
JSON_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
OTHER_TYPE_NAMES = {
    "float": "number",
    "double": "number",
    "int": "integer",
    "long": "integer",
    "bool": "boolean",
    "str": "string",
    "dict": "object",
    "list": "array",
    "none": "null",
}
"""Type names of programming languages that clients use by mistake → type names of JSON Schema."""
UNSUPPORTED_PATTERN = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\[bB]")
"""Parts of regular expressions that grammars cannot enforce: lookaround, backreferences and word boundaries."""
MAX_SCHEMA_BYTES = 1 << 18
"""Maximum length in bytes of a schema as JSON, including parts that a grammar ignores, such as descriptions."""
MAX_PLACE = 80
"""Maximum length, in characters, of a location in a schema that an error or a warning quotes."""
MAX_NAMED = 8
"""Maximum number of keywords that an error or a warning names."""


def fit_schema(schema: dict[str, Any], field: str, strict: bool, left_out: list[str] | None = None) -> dict[str, Any]:
    """Convert a schema to one that llguidance can read. The converted schema has options that say which parts llguidance may
    ignore.

    Args:
        field: field of the request that has the schema, for errors and warnings.
        strict: whether the whole schema must be enforced.
        left_out: list to which a warning is added if parts of the schema are left out.

    Raises:
        UserError: the schema is nested too deeply or too long, or ``strict`` is true and no grammar can enforce a part.
    """
    if exceeds_max_depth(schema):
        raise UserError(f"{field}: the schema is nested more than {MAX_DEPTH} levels deep; flatten it")
    num_bytes = len(msgspec.json.encode(schema))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise UserError(f"{field}: the schema has {num_bytes} bytes, more than {MAX_SCHEMA_BYTES}; make it shorter")
    fitter = _Fitter(schema, field, num_bytes, strict)
    fitted = fitter.fit(schema, "")
    if fitter.unheld:
        names = list(dict.fromkeys(fitter.unheld))
        what = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
        if strict:
            raise UserError(f"{field}: strict is true, but a grammar cannot enforce {what}; leave them or strict out")
        if left_out is not None:
            left_out.append(f"{field}: a grammar cannot enforce {what}; these were ignored")
    given, options = schema.get("x-guidance"), {} if strict else {"lenient": True, "coerce_one_of": True}
    options |= given if isinstance(given, dict) else {}
    return fitted | ({"x-guidance": options} if options else {})


def check_property_counts(schema: dict[str, Any], field: str) -> None:
    """Refuse a schema with a ``minProperties`` that an answer could satisfy by writing one property several times.

    Args:
        field: field of the request that has the schema, for errors.

    Raises:
        UserError: a grammar cannot enforce a ``minProperties``; the message quotes it.
    """
    unchecked: list[Any] = [schema]
    while unchecked:
        part = unchecked.pop()
        if not isinstance(part, dict):
            continue
        if _can_repeat_names(part):
            raise UserError(
                f"{field}: a grammar cannot enforce minProperties {part['minProperties']!r:.20}, as names could be "
                "repeated; name more of the properties under required, or lower it"
            )
        for keyword in NAMED_SCHEMAS:
            unchecked += part[keyword].values() if isinstance(part.get(keyword), dict) else ()
        for keyword in SCHEMA_LISTS:
            unchecked += part[keyword] if isinstance(part.get(keyword), list) else ()
        unchecked += (part.get(keyword) for keyword in SINGLE_SCHEMAS)


def _can_repeat_names(schema: dict[str, Any]) -> bool:
    """Whether an object could satisfy ``minProperties`` of ``schema`` by writing one property several times.

    llguidance counts a property that is not in ``properties`` each time it is written, and does not count optional
    properties in ``properties``. Properties under ``required`` are always written, and one further property always has
    another name.
    """
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, bool) or not isinstance(least, (int, float)):
        return False
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    return least > len(names) + 1


def json_type(name: str) -> str:
    """JSON Schema's name of the type that a client calls ``name``, perhaps as in a programming language. Unknown names are returned
    unchanged."""
    lower = name.lower()
    return OTHER_TYPE_NAMES.get(lower, lower if lower in JSON_TYPES else name)


class _Fitter:
    """Rebuilds a schema from the keywords that grammars can enforce, and records keywords that they cannot.

    Args:
        root: the whole schema, for references.
        field: field of the request that has the schema, for errors.
        num_bytes: length of ``root`` as JSON.
        strict: whether no part of the schema may be left out.
    """

    def __init__(self, root: dict[str, Any], field: str, num_bytes: int, strict: bool):
        self._exclusion, self._field, self._strict = SchemaExclusion(root, num_bytes), field, strict
        self.unheld: list[str] = []

    def fit(self, schema: Any, place: str) -> Any:
        """Rebuild ``schema``, which is at a location such as ``tags.items`` in the whole schema."""
        if not isinstance(schema, dict):
            return schema  # true and false are schemas as well
        fitted: dict[str, Any] = {}
        for keyword, value in _newer(schema).items():
            if keyword in NAMED_SCHEMAS and isinstance(value, dict):
                inside = f"{place}." if place else ""
                fitted[keyword] = {
                    name: self.fit(part, f"{inside}{name:.{MAX_PLACE}}"[:MAX_PLACE]) for name, part in value.items()
                }
            elif keyword in SCHEMA_LISTS and isinstance(value, list):
                if keyword == "oneOf" and self._may_be_any(value, place) and "anyOf" not in schema:
                    keyword = "anyOf"
                fitted[keyword] = [self.fit(part, place) for part in value]
            elif keyword in SINGLE_SCHEMAS:
                fitted[keyword] = self.fit(value, f"{place}.items" if keyword == "items" and place else place)
            elif keyword == "type":
                fitted[keyword] = self._read_types(value, place)
            elif keyword == "minProperties" and _can_repeat_names(schema):
                self._leave_out(f"minProperties {value!r:.20} of names that could be repeated", place)
            elif keyword in PLAIN_KEYWORDS:
                fitted[keyword] = value
            elif keyword in UNHELD_KEYWORDS:
                if not _is_implied(keyword, value):
                    self._leave_out(keyword, place)
            elif keyword in ("$ref", "pattern", "format"):
                if _can_hold(keyword, value):
                    fitted[keyword] = value
                else:
                    self._leave_out(f"{keyword} {str(value)[:60]!r}", place)
        return fitted

    def _read_types(self, value: Any, place: str) -> Any:
        names = [json_type(name) if isinstance(name, str) else name for name in _as_list(value)]
        for name in names:
            if name not in JSON_TYPES:
                where = f" (at {place[:80]})" if place else ""
                raise UserError(f"{self._field}: unknown type {name!r:.40}{where}; use one of {', '.join(JSON_TYPES)}")
        return names if isinstance(value, list) else names[0]

    def _may_be_any(self, schemas: list[Any], place: str) -> bool:
        """Whether ``anyOf`` may replace the keyword ``oneOf`` with ``schemas``."""
        if self._exclusion.holds([_newer(part) if isinstance(part, dict) else part for part in schemas]):
            return True
        if not self._strict:
            self._leave_out("the exclusion of oneOf", place)
        return not self._strict  # if strict, llguidance refuses oneOf that it cannot prove exclusive

    def _leave_out(self, what: str, place: str) -> None:
        self.unheld.append(f"{what} (at {place})" if place else what)


def _newer(schema: dict[str, Any]) -> dict[str, Any]:
    """Copy of ``schema`` without older forms of keywords, which are converted, and without keywords whose value is null. Some
    clients serialize unset fields as null."""
    newer = {keyword: value for keyword, value in schema.items() if value is not None or keyword == "const"}
    if isinstance(items := newer.get("items"), list):  # tuples before version 2020-12
        newer["prefixItems"] = items
        newer["items"] = newer.pop("additionalItems", True)
    for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(is_exclusive := newer.get(exclusive), bool):  # draft 4
            del newer[exclusive]
            if is_exclusive and limit in newer:
                newer[exclusive] = newer.pop(limit)
    if newer.pop("nullable", False) is True:  # OpenAPI 3.0
        if isinstance(kind := newer.get("type"), str):
            newer["type"] = [kind, "null"]
        if isinstance(values := newer.get("enum"), list) and None not in values:
            newer["enum"] = [*values, None]
    return newer


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_implied(keyword: str, value: Any) -> bool:
    """Whether every value that a grammar generates satisfies ``keyword`` with this ``value``, even if the grammar ignores it."""
    if keyword == "propertyNames":
        return value in ({}, True, {"type": "string"})
    return value is False and keyword == "uniqueItems"


def _can_hold(keyword: str, value: Any) -> bool:
    if not isinstance(value, str):
        return False
    if keyword == "format":
        return value in FORMATS
    if keyword == "pattern":
        return not UNSUPPORTED_PATTERN.search(value)
    return value == "#" or value.startswith("#/")
