"""Compares the contract with that of the last release, and fails on a change that would break somebody.

Released contracts are kept as `docs/contract/<version>.yaml`. A breaking change needs a higher major version, a higher
minor one while the major is 0; a changed body needs another `schema-version` as well, since its readers see no other.

Which change breaks depends on the direction. Of what arrives, producers must be able to send all that they could: there
must be nothing narrower. Of what leaves, consumers must get nothing that they never saw: there must be nothing wider.
A removed field breaks either: its reader misses it, its writer's words lose their meaning. A keyword that is not known
here counts as a break where it differs; titles, descriptions and examples never do.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import yaml

Json = Any

_UPPER_LIMITS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_LOWER_LIMITS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_ANNOTATIONS = {"title", "description", "summary", "examples", "$comment", "deprecated"}
_COMPARED_APART = {"type", "enum", "const", "required", "properties", "items", *_UPPER_LIMITS, *_LOWER_LIMITS}


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
        major, minor, patch = (int(part) for part in self.document["info"]["version"].split("."))
        return major, minor, patch

    @property
    def operations(self) -> dict[str, Json]:
        """What the service does: receive or send, by name."""
        return dict(self.document.get("operations", {}))

    def resolve(self, value: Json) -> Json:
        """Return what a reference points to, or the value itself."""
        while isinstance(value, dict) and "$ref" in value:
            target = self.document
            for part in value["$ref"].removeprefix("#/").split("/"):
                target = target[part.replace("~1", "/").replace("~0", "~")]
            value = target
        return value

    def messages(self, operation: Json) -> dict[str, Json]:
        """Return the messages of an operation, by name."""
        found = (self.resolve(message) for message in operation.get("messages", ()))
        return {message.get("name", message.get("title", "")): message for message in found}

    def shape(self, value: Json) -> Json:
        """Return a schema without its annotations and with its references filled in, to compare as a whole."""
        value = self.resolve(value)
        match value:
            case dict():
                return {k: self.shape(v) for k, v in sorted(value.items()) if k not in _ANNOTATIONS}
            case list():
                return sorted((self.shape(v) for v in value), key=json.dumps)
            case _:
                return value


def breaks(old: Contract, new: Contract) -> list[Break]:
    """Return what would break somebody who relies on `old`."""
    found: list[Break] = []
    for name, before in old.operations.items():
        after = new.operations.get(name)
        if after is None:
            found.append(Break(name, "removed"))
        else:
            found += _operation_breaks(name, old, before, new, after)
    return found


def unversioned(old: Contract, new: Contract) -> list[Break]:
    """Return the messages whose body changed breakingly under the same `schema-version`."""
    found = []
    for name, before in old.operations.items():
        after = new.operations.get(name)
        for message, (one, other) in (_pairs(old, before, new, after) if after else {}).items():
            body = list(_Schemas(old, new, before["action"] == "receive").compare(one["payload"], other["payload"], ""))
            if body and _schema_version(one) == _schema_version(other):
                found.append(Break(message, f"its body changed ({body[0].place.strip()}), but not its schema-version"))
    return found


def must_be_at_least(version: tuple[int, int, int]) -> str:
    """Return the first version after `version` that may break."""
    major, minor, _ = version
    return f"0.{minor + 1}.0" if major == 0 else f"{major + 1}.0.0"


def judge(old: Contract, new: Contract) -> list[str]:
    """Return what is wrong, as lines for a person; nothing where the change may land."""
    if new.version < old.version:
        return [f"version {new.document['info']['version']} is lower than the last release"]
    lines = [str(each) for each in unversioned(old, new)]
    allowed = new.version[:2] > old.version[:2] if old.version[0] == 0 else new.version[0] > old.version[0]
    if not allowed and (found := breaks(old, new)):
        lines = [str(each) for each in found] + lines
        lines.append(
            f"restore what others rely on, or raise the version to {must_be_at_least(old.version)} "
            "and tell them in CHANGELOG.md"
        )
    return lines


def _operation_breaks(name: str, old: Contract, before: Json, new: Contract, after: Json) -> Iterator[Break]:
    if before["action"] != after["action"]:
        yield Break(name, f"{before['action']} became {after['action']}")
        return
    one, other = old.resolve(before["channel"]), new.resolve(after["channel"])
    places = {"address": (one["address"], other["address"])}
    for source, old_side, new_side in (("channel", one, other), ("operation", before, after)):
        old_binding, new_binding = (side.get("bindings", {}).get("amqp", {}) for side in (old_side, new_side))
        places |= {
            f"{source} {key}": (old_binding.get(key), new_binding.get(key))
            for key in ("is", "exchange", "queue", "x-queue", "cc", "deliveryMode", "expiration")
        }
    for place, (was, is_now) in places.items():
        if was != is_now:
            yield from _value_breaks(f"{name} {place}", was, is_now)
    pairs = _pairs(old, before, new, after)
    for message in old.messages(before).keys() - pairs.keys():
        yield Break(f"{name} message {message}", "removed")
    schemas = _Schemas(old, new, arrives=before["action"] == "receive")
    for message_before, message_after in pairs.values():
        for part in ("headers", "payload"):
            yield from schemas.compare(message_before.get(part, {}), message_after.get(part, {}), f"{name} {part}")
        if message_before.get("contentType") != message_after.get("contentType"):
            yield Break(f"{name} contentType", "changed")


def _pairs(old: Contract, before: Json, new: Contract, after: Json) -> dict[str, tuple[Json, Json]]:
    olds, news = old.messages(before), new.messages(after)
    return {name: (message, news[name]) for name, message in olds.items() if name in news}


def _value_breaks(place: str, was: Json, is_now: Json) -> Iterator[Break]:
    """Name the innermost values that differ."""
    if isinstance(was, dict) and isinstance(is_now, dict):
        for key in sorted(was.keys() | is_now.keys()):
            if was.get(key) != is_now.get(key):
                yield from _value_breaks(f"{place}.{key}", was.get(key), is_now.get(key))
    else:
        yield Break(place, f"{_told(was)} became {_told(is_now)}")


def _schema_version(message: Json) -> Json:
    return message.get("headers", {}).get("properties", {}).get("schema-version", {}).get("enum")


@dataclass(frozen=True, slots=True)
class _Schemas:
    """Compares two JSON Schemas in the direction in which their messages go."""

    old: Contract
    new: Contract
    arrives: bool

    def compare(self, before: Json, after: Json, place: str) -> Iterator[Break]:
        """Yield what would break: of what arrives, all that is narrower; of what leaves, all that is wider."""
        before, after = self.old.resolve(before), self.new.resolve(after)
        yield from self._sets("type", _types(before), _types(after), place)
        yield from self._sets("enum", _values(before), _values(after), place)
        for limit in _UPPER_LIMITS:
            yield from self._limit(limit, before.get(limit, inf), after.get(limit, inf), place, upper=True)
        for limit in _LOWER_LIMITS:
            yield from self._limit(limit, before.get(limit, -inf), after.get(limit, -inf), place, upper=False)
        yield from self._required(set(before.get("required", ())), set(after.get("required", ())), place)
        yield from self._properties(before.get("properties", {}), after.get("properties", {}), place)
        if "items" in before or "items" in after:
            yield from self.compare(before.get("items", {}), after.get("items", {}), f"{place}[]")
        for keyword in sorted((before.keys() | after.keys()) - _COMPARED_APART - _ANNOTATIONS):
            if self.old.shape(before.get(keyword)) != self.new.shape(after.get(keyword)):
                yield Break(place, f"{keyword}: {_told(before.get(keyword))} became {_told(after.get(keyword))}")

    def _sets(self, keyword: str, was: set[str] | None, is_now: set[str] | None, place: str) -> Iterator[Break]:
        """Compare what is allowed; None allows everything."""
        narrow, wide = (is_now, was) if self.arrives else (was, is_now)
        if narrow is not None and (wide is None or wide - narrow):
            yield Break(place, f"{keyword}: {_told(was)} became {_told(is_now)}; {self._for_whom()}")

    def _limit(self, keyword: str, was: float, is_now: float, place: str, *, upper: bool) -> Iterator[Break]:
        narrower = is_now < was if upper else is_now > was
        if was != is_now and narrower == self.arrives:
            yield Break(place, f"{keyword}: {_told(was)} became {_told(is_now)}; {self._for_whom()}")

    def _required(self, was: set[str], is_now: set[str], place: str) -> Iterator[Break]:
        for name in sorted(is_now - was if self.arrives else was - is_now):
            what = "became required; producers may not send it" if self.arrives else "is no longer always there"
            yield Break(f"{place}.{name}", what)

    def _properties(self, was: Json, is_now: Json, place: str) -> Iterator[Break]:
        for name in sorted(was):
            if name in is_now:
                yield from self.compare(was[name], is_now[name], f"{place}.{name}")
            else:
                yield Break(f"{place}.{name}", "removed")

    def _for_whom(self) -> str:
        return "producers may send more" if self.arrives else "consumers may get what they never saw"


def _types(schema: Json) -> set[str] | None:
    kinds = schema.get("type")
    if kinds is None:
        return None
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _values(schema: Json) -> set[str] | None:
    if "const" in schema:
        return {json.dumps(schema["const"])}
    return {json.dumps(value) for value in schema["enum"]} if "enum" in schema else None


def _told(value: Json) -> str:
    if value is None or value in (inf, -inf):
        return "nothing"
    return ", ".join(sorted(value)) if isinstance(value, set) else json.dumps(value)


def last_release(folder: Path) -> Contract:
    """Return the released contract with the highest version.

    Raises:
        FileNotFoundError: there is none.
    """
    released = [Contract(yaml.safe_load(path.read_text())) for path in folder.glob("*.yaml")]
    if not released:
        raise FileNotFoundError(f"{folder} holds no released contract")
    return max(released, key=lambda contract: contract.version)


def main() -> None:
    """Judge the contract, or keep it as that of a release."""
    parser = argparse.ArgumentParser(prog="contract_gate", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("contract", type=Path, help="the contract as it is now: asyncapi.yaml")
    parser.add_argument("released", type=Path, help="the folder of the released ones: docs/contract")
    parser.add_argument("--release", action="store_true", help="keep the contract as that of its version's release")
    arguments = parser.parse_args()
    text = arguments.contract.read_text()
    current = Contract(yaml.safe_load(text))
    if arguments.release:
        kept = arguments.released / f"{current.document['info']['version']}.yaml"
        if kept.exists() and kept.read_text() != text:
            sys.exit(f"contract: {kept} is released already, and other: raise the version")
        kept.write_text(text)
        return
    lines = judge(last_release(arguments.released), current)
    if lines:
        sys.exit("\n".join(f"contract: {line}" for line in lines))


if __name__ == "__main__":
    main()
