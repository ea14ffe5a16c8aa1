"""Compares the contract with that of the last release, and fails on a change that would break somebody.

Released contracts are kept as `docs/contract/<version>.yaml`. A breaking change needs a higher major version, a higher
minor one while the major is 0; a changed body needs another `schema-version` as well, since its readers see no other.

Which change breaks depends on the direction. Of what arrives, producers must be able to send all that they could: there
must be nothing narrower. Of what leaves, consumers must get nothing that they never saw: there must be nothing wider.
Readers ignore fields that they do not know, so one may be added to what leaves, an optional one to what arrives, and an
optional one that arrived may be removed. A removed required one breaks: producers had to say it, so they count on what
it did. A keyword that is not known here counts as a break where it differs; titles, descriptions and examples never do.
Not seen is what only prose says, or only a validator written in Python.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import yaml

Json = Any
Refs = frozenset[str]

# Each limit with what holds where it is absent.
_LIMITS = dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), inf)
_LIMITS |= {"minimum": -inf, "exclusiveMinimum": -inf, "minLength": 0, "minItems": 0, "minProperties": 0}
# They only forbid: without one, more is allowed. Which of two values allows more can be told for multipleOf alone.
_RESTRICTIONS = ("pattern", "format", "multipleOf")
_COMPARED_APART = {*_LIMITS, *_RESTRICTIONS, "type", "enum", "const", "required", "properties", "items"}
_COMPARED_APART |= {"additionalProperties", "anyOf"}
# Definitions count where they are referred to.
_MEANINGLESS = {"title", "description", "summary", "examples", "$comment", "deprecated", "$defs", "definitions"}
_BY_NAME = {"properties", "patternProperties", "dependentSchemas"}
_UNORDERED = {"anyOf", "oneOf", "allOf", "required", "type"}
_WORDS = {"bindingVersion", "x-acknowledgement"}
"""Of a binding: how it is said, not what."""


@dataclass(frozen=True, slots=True)
class Break:
    """One change that would break somebody: where, what, and for whom."""

    place: str
    what: str

    def __str__(self) -> str:
        """Return it as a line."""
        return f"{self.place}: {self.what}"


@dataclass(frozen=True, slots=True)
class Contract:
    """An AsyncAPI 3.0 document."""

    document: Json

    @property
    def version(self) -> tuple[int, int, int]:
        """Its own version, as numbers.

        Raises:
            ValueError: it is not like 1.2.3.
        """
        written = str(self.document["info"]["version"])
        if not (parts := re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", written)):
            raise ValueError(f"the version {written} is not like 1.2.3")
        return int(parts[1]), int(parts[2]), int(parts[3])

    @property
    def operations(self) -> dict[str, Json]:
        """What the service does: receive or send, by name."""
        return {name: self.resolve(operation) for name, operation in self.document.get("operations", {}).items()}

    def resolve(self, value: Json) -> Json:
        """Return what a reference points to, with what is said beside it, or the value itself.

        Raises:
            ValueError: it points out of the document, or to nothing.
        """
        if not isinstance(value, dict) or "$ref" not in value:
            return value
        target = self.document
        for part in value["$ref"].removeprefix("#/").split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if target is None:
            raise ValueError(f"{value['$ref']} points to nothing")
        beside = {key: said for key, said in value.items() if key != "$ref"}
        return _both(self.resolve(target), beside) if beside else self.resolve(target)

    def schema(self, value: Json) -> dict[str, Json]:
        """Return a schema as an object: true allows everything, false nothing."""
        found = self.resolve(value)
        if isinstance(found, bool):
            return {} if found else {"not": {}}
        return dict(found)

    def messages(self, operation: Json) -> dict[str, Json]:
        """Return the messages of an operation, by name; where it lists none, they are those of its channel."""
        if "messages" in operation:
            found = {entry["$ref"].rpartition("/")[2]: self.resolve(entry) for entry in operation["messages"]}
        else:
            of_channel = self.resolve(operation["channel"]).get("messages", {})
            found = {key: self.resolve(message) for key, message in of_channel.items()}
        return {message.get("name", key): message for key, message in found.items()}

    def shape(self, value: Json, keyword: str = "", within: Refs = frozenset()) -> Json:
        """Return the value of a keyword so that equal meanings are equal: references filled in, sets sorted."""
        if keyword in {"const", "default"} or not isinstance(value, dict | list):
            return value
        if keyword == "enum":
            return sorted(value, key=_text)
        if isinstance(value, list):
            shaped = [self.shape(each, within=within) for each in value]
            return sorted(shaped, key=_text) if keyword in _UNORDERED else shaped
        if keyword in _BY_NAME:
            return {name: self.shape(each, within=within) for name, each in value.items()}
        if value.get("$ref") in within:  # it contains itself
            return value
        within |= {value["$ref"]} if "$ref" in value else set()
        return {k: self.shape(v, k, within) for k, v in self.schema(value).items() if k not in _MEANINGLESS}


def breaks(old: Contract, new: Contract) -> list[Break]:
    """Return what would break somebody who relies on `old`."""
    found = list(_limit_breaks(old.document.get("x-limits", {}), new.document.get("x-limits", {})))
    for name, before in old.operations.items():
        after = new.operations.get(name)
        if after is None:
            found.append(Break(name, "removed"))
        else:
            found += _operation_breaks(name, old, before, new, after)
    return found


def _limit_breaks(was: Json, is_now: Json) -> Iterator[Break]:
    """Compare what producers may rely on: numbers of which a smaller one, or none, takes something away."""
    for name, limit in was.items():
        if is_now.get(name, -inf) < limit:
            yield Break(f"x-limits {name}", f"{_told(limit)} became {_told(is_now.get(name))}")


def unversioned(old: Contract, new: Contract) -> list[Break]:
    """Return the messages whose body changed breakingly under the same `schema-version`, where they have one."""
    found = []
    for name, before in old.operations.items():
        after = new.operations.get(name)
        for message, (one, other) in (_pairs(old, before, new, after) if after else {}).items():
            schemas = _Schemas(old, new, arrives=before["action"] == "receive")
            body = list(schemas.compare(one.get("payload", {}), other.get("payload", {}), "payload"))
            was, is_now = _schema_version(old, one), _schema_version(new, other)
            if body and was is not None and is_now in (None, was):
                found.append(Break(message, f"its body changed ({body[0].place}), but not its schema-version"))
    return found


def must_be_at_least(version: tuple[int, int, int]) -> str:
    """Return the first version after `version` that may break."""
    major, minor, _ = version
    return f"0.{minor + 1}.0" if major == 0 else f"{major + 1}.0.0"


def judge(old: Contract, new: Contract) -> list[str]:
    """Return what is wrong, as lines for a person; nothing where the change may land.

    Raises:
        ValueError: one of the documents cannot be read.
    """
    if new.version < old.version:
        return [f"version {new.document['info']['version']} is lower than the last release"]
    lines = [str(each) for each in unversioned(old, new)]
    allowed = new.version[:2] > old.version[:2] if old.version[0] == 0 else new.version[0] > old.version[0]
    if not allowed and (found := breaks(old, new)):
        lines = [str(each) for each in found] + lines
        least = must_be_at_least(old.version)
        lines.append(
            f"restore what others rely on, or raise the version to at least {least}, tell them in CHANGELOG.md, "
            f"and add docs/contract/{least}.yaml at the release (make contract-release)"
        )
    return lines


def _operation_breaks(name: str, old: Contract, before: Json, new: Contract, after: Json) -> Iterator[Break]:
    if before["action"] != after["action"]:
        yield Break(name, f"{before['action']} became {after['action']}")
        return
    arrives = before["action"] == "receive"
    one, other = old.resolve(before["channel"]), new.resolve(after["channel"])
    yield from _value_breaks(f"{name} address", one.get("address"), other.get("address"))
    yield from _binding_breaks(f"{name} channel", old, one, new, other)
    yield from _binding_breaks(f"{name} operation", old, before, new, after)
    pairs = _pairs(old, before, new, after)
    for message in sorted(old.messages(before).keys() - pairs.keys()):
        yield Break(f"{name} message {message}", "removed")
    for message in () if arrives else sorted(new.messages(after).keys() - pairs.keys()):
        yield Break(f"{name} message {message}", "added; consumers may get what they never saw")
    for message, (was, is_now) in pairs.items():
        place = name if message == name else f"{name} {message}"
        yield from _binding_breaks(f"{place} message", old, was, new, is_now)
        yield from _value_breaks(f"{place} contentType", _content_type(old, was), _content_type(new, is_now))
        for part in ("headers", "payload"):
            schemas = _Schemas(old, new, arrives)
            yield from schemas.compare(was.get(part, {}), is_now.get(part, {}), f"{place} {part}")


def _pairs(old: Contract, before: Json, new: Contract, after: Json) -> dict[str, tuple[Json, Json]]:
    olds, news = old.messages(before), new.messages(after)
    return {name: (message, news[name]) for name, message in olds.items() if name in news}


def _binding_breaks(place: str, old: Contract, before: Json, new: Contract, after: Json) -> Iterator[Break]:
    was, is_now = (c.resolve(side.get("bindings", {})).get("amqp", {}) for c, side in ((old, before), (new, after)))
    for key in sorted((was.keys() | is_now.keys()) - _WORDS):
        yield from _value_breaks(f"{place} {key}", was.get(key), is_now.get(key))


def _value_breaks(place: str, was: Json, is_now: Json) -> Iterator[Break]:
    """Name the innermost values that differ."""
    if isinstance(was, dict) and isinstance(is_now, dict):
        for key in sorted(was.keys() | is_now.keys()):
            yield from _value_breaks(f"{place}.{key}", was.get(key), is_now.get(key))
    elif _text(was) != _text(is_now):
        yield Break(place, f"{_told(was)} became {_told(is_now)}")


def _content_type(contract: Contract, message: Json) -> Json:
    return message.get("contentType", contract.document.get("defaultContentType"))


def _schema_version(contract: Contract, message: Json) -> set[str] | None:
    headers = contract.schema(message.get("headers", {}))
    return _values(contract.schema(headers.get("properties", {}).get("schema-version", {})))


@dataclass(frozen=True, slots=True)
class _Schemas:
    """Compares two JSON Schemas in the direction in which their messages go."""

    old: Contract
    new: Contract
    arrives: bool

    def compare(self, before: Json, after: Json, place: str, within: Refs = frozenset()) -> Iterator[Break]:
        """Yield what would break: of what arrives, all that is narrower; of what leaves, all that is wider."""
        if (here := _text([before, after])) in within:  # they contain themselves, and are being compared already
            return
        within |= {here}
        before, after = self.old.schema(before), self.new.schema(after)
        if "anyOf" in before or "anyOf" in after:
            yield from self._alternatives(before, after, place, within)
            return
        yield from self._sets("type", _types(before), _types(after), place)
        yield from self._sets("enum", _values(before), _values(after), place)
        for limit, absent in _LIMITS.items():
            yield from self._limit(limit, before.get(limit, absent), after.get(limit, absent), place)
        for keyword in _RESTRICTIONS:
            yield from self._restriction(keyword, before.get(keyword), after.get(keyword), place)
        yield from self._fields(before, after, place, within)
        if "items" in before or "items" in after:
            yield from self.compare(before.get("items", {}), after.get("items", {}), f"{place}[]", within)
        for keyword in sorted((before.keys() | after.keys()) - _COMPARED_APART - _MEANINGLESS):
            was, is_now = before.get(keyword), after.get(keyword)
            if _text(self.old.shape(was, keyword)) != _text(self.new.shape(is_now, keyword)):
                yield Break(place, f"{keyword}: {_told(was)} became {_told(is_now)}")

    def _alternatives(self, before: Json, after: Json, place: str, within: Refs) -> Iterator[Break]:
        """Each old alternative must still be accepted; each new one that leaves must have been among the old ones."""
        olds, news = _options(self.old, before), _options(self.new, after)
        fits = {
            (o, n)
            for o, one in enumerate(olds)
            for n, other in enumerate(news)
            if not any(self.compare(one, other, place, within))
        }
        fitting = {o if self.arrives else n for o, n in fits}
        if len(fitting) < len(olds if self.arrives else news):
            yield self._changed("anyOf", before.get("anyOf"), after.get("anyOf"), place)

    def _sets(self, keyword: str, was: set[str] | None, is_now: set[str] | None, place: str) -> Iterator[Break]:
        """Compare what is allowed; None allows everything."""
        narrow, wide = (is_now, was) if self.arrives else (was, is_now)
        if narrow is None:
            return
        integers = {"integer"} if "number" in narrow else set()  # they are numbers
        if wide is None or wide - narrow - integers:
            yield self._changed(keyword, was, is_now, place)

    def _limit(self, limit: str, was: float, is_now: float, place: str) -> Iterator[Break]:
        narrower = is_now < was if _LIMITS[limit] == inf else is_now > was
        if was != is_now and narrower == self.arrives:
            yield self._changed(limit, was, is_now, place)

    def _restriction(self, keyword: str, was: Json, is_now: Json, place: str) -> Iterator[Break]:
        narrow, wide = (is_now, was) if self.arrives else (was, is_now)  # as it would have to be, to break
        if narrow in (None, wide) or (keyword == "multipleOf" and wide is not None and wide % narrow == 0):
            return
        if wide is None:
            yield self._changed(keyword, was, is_now, place)
        else:  # which of the two allows more is not understood
            yield Break(place, f"{keyword}: {_told(was)} became {_told(is_now)}")

    def _fields(self, before: Json, after: Json, place: str, within: Refs) -> Iterator[Break]:
        was, is_now = before.get("properties", {}), after.get("properties", {})
        others_before, others = before.get("additionalProperties", True), after.get("additionalProperties", True)
        had, has = set(before.get("required", ())), set(after.get("required", ()))
        removed = was.keys() - is_now.keys()
        for name in sorted(has - had if self.arrives else had - has - removed):
            what = "became required; producers may not send it" if self.arrives else "is no longer always there"
            yield Break(f"{place}.{name}", what)
        for name in sorted(was):
            if name in is_now:
                yield from self.compare(was[name], is_now[name], f"{place}.{name}", within)
            elif not self.arrives or name in had or others is not True:
                yield Break(f"{place}.{name}", "removed")
        if others is False and others_before is not False and self.arrives:
            yield self._changed("additionalProperties", before.get("additionalProperties"), others, place)
        elif others is not False and others_before is not False:
            yield from self.compare(others_before, others, f"{place}.*", within)

    def _changed(self, keyword: str, was: Json, is_now: Json, place: str) -> Break:
        whom = "producers may send more" if self.arrives else "consumers may get what they never saw"
        return Break(place, f"{keyword}: {_told(was)} became {_told(is_now)}; {whom}")


def _both(one: dict[str, Json], other: dict[str, Json]) -> dict[str, Json]:
    """Return the schema of what fulfils both."""
    if (one.keys() & other.keys()) - _MEANINGLESS:
        return {"allOf": [one, other]}
    return {**one, **other}


def _options(contract: Contract, schema: dict[str, Json]) -> list[dict[str, Json]]:
    """Return the alternatives of a schema, each with what holds for all of them."""
    if "anyOf" not in schema:
        return [schema]
    for_all = {keyword: value for keyword, value in schema.items() if keyword != "anyOf"}
    return [_both(for_all, contract.schema(each)) for each in schema["anyOf"]]


def _types(schema: Json) -> set[str] | None:
    kinds = schema.get("type")
    if kinds is None:
        return None
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _values(schema: Json) -> set[str] | None:
    if "const" in schema:
        return {_text(schema["const"])}
    return {_text(value) for value in schema["enum"]} if "enum" in schema else None


def _text(value: Json) -> str:
    """Return the same text for the same JSON only: to Python, true is 1."""
    return json.dumps(value, sort_keys=True)


def _told(value: Json) -> str:
    if value is None or value in (inf, -inf):
        return "nothing"
    return ", ".join(sorted(value)) if isinstance(value, set) else json.dumps(value)


def last_release(folder: Path) -> Contract:
    """Return the released contract with the highest version.

    Raises:
        FileNotFoundError: there is none.
        ValueError: one has no version like 1.2.3.
    """
    released = [Contract(yaml.safe_load(path.read_text())) for path in folder.glob("*.yaml")]
    if not released:
        raise FileNotFoundError(f"{folder} holds no released contract")
    return max(released, key=lambda contract: contract.version)


def gate(text: str, folder: Path, *, release: bool) -> list[str]:
    """Return what is wrong with a contract; with `release`, keep one that may land as that of its version.

    Raises:
        FileNotFoundError: there is no release to compare with, nor is this one.
        ValueError: one of the documents cannot be read.
    """
    current = Contract(yaml.safe_load(text))
    kept = folder / f"{'.'.join(map(str, current.version))}.yaml"
    if release and kept.exists() and kept.read_text() != text:
        return [f"{kept} is released already, and other: raise the version"]
    is_first = release and not any(folder.glob("*.yaml"))
    lines = [] if is_first else judge(last_release(folder), current)
    if release and not lines:
        kept.write_text(text)
    return lines


def main() -> None:
    """Judge the contract, or keep it as that of a release."""
    parser = argparse.ArgumentParser(prog="contract_gate", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("contract", type=Path, help="the contract as it is now: asyncapi.yaml")
    parser.add_argument("released", type=Path, help="the folder of the released ones: docs/contract")
    parser.add_argument("--release", action="store_true", help="keep the contract as that of its version's release")
    arguments = parser.parse_args()
    try:
        lines = gate(arguments.contract.read_text(), arguments.released, release=arguments.release)
    except (FileNotFoundError, ValueError) as error:
        lines = [str(error)]
    if lines:
        sys.exit("\n".join(f"contract: {line}" for line in lines))


if __name__ == "__main__":
    main()
