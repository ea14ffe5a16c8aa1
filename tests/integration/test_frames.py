"""Frames that the client library cannot decode are parked at their first delivery, and stop nobody."""

import asyncio
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pamqp import decode

from service.reliability import frames
from tests.support.orders import placed
from tests.support.process import ServiceProcess
from tests.support.rabbit import Rabbit
from tests.support.waiting import eventually
from tests.support.wire import publish_bytes, short_string, table

BAD = short_string(b"\xff\xfe")
GOOD_ID = short_string(b"m-1")
LATE = struct.pack(">Q", 2**64 - 1)
"""A timestamp that no calendar has."""


def nested(levels: int) -> bytes:
    """Return a table in a table in a table."""
    inner = table()
    for _ in range(levels):
        inner = table((b"a", b"F" + inner))
    return inner


def nested_arrays(levels: int) -> bytes:
    """Return an array in an array in an array."""
    inner = b"A" + struct.pack(">I", 0)
    for _ in range(levels):
        inner = b"A" + struct.pack(">I", len(inner)) + inner
    return inner


HOSTILE: dict[str, dict[str, bytes]] = {
    "message_id": {"message_id": BAD},
    "content_type": {"message_id": GOOD_ID, "content_type": BAD},
    "content_encoding": {"message_id": GOOD_ID, "content_encoding": BAD},
    "correlation_id": {"message_id": GOOD_ID, "correlation_id": BAD},
    "reply_to": {"message_id": GOOD_ID, "reply_to": BAD},
    "app_id": {"message_id": GOOD_ID, "app_id": BAD},
    "type": {"message_id": GOOD_ID, "type": BAD},
    "a long id": {"message_id": short_string(b"\xff" * 255)},
    "a timestamp": {"message_id": GOOD_ID, "timestamp": LATE},
    "a header's name": {"message_id": GOOD_ID, "headers": table((b"\xff\xfe", b"t\x01"), (b"mine", b"t\x01"))},
    "a header's timestamp": {"message_id": GOOD_ID, "headers": table((b"when", b"T" + LATE), (b"mine", b"t\x01"))},
    "a name in a table": {"message_id": GOOD_ID, "headers": table((b"in", b"F" + table((b"\xff", b"t\x01"))))},
    "deep tables": {"message_id": GOOD_ID, "headers": nested(5000)},
    "deep arrays": {"message_id": GOOD_ID, "headers": table((b"a", nested_arrays(5000)))},
}


@pytest.mark.guarantee("G6")
async def test_what_cannot_be_decoded_is_parked_and_its_neighbours_are_processed_once(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """A02: each kind, between good messages; the connection stays, nobody's delivery is counted again."""
    service = await ServiceProcess(environment, tmp_path / "log").start().ready()
    for number, properties in enumerate(HOSTILE.values()):
        order = f"5d2e1f0a-0000-4000-8000-{number:012d}"
        await publish_bytes(rabbit.url, b"order.placed", b"{}", **properties)
        await rabbit.publish(*placed(order), message_id=order)
    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == len(HOSTILE))
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n == len(HOSTILE))
    listed = json.loads((await parking_list(environment)).decode())
    assert (listed["total"], listed["reasons"]) == (len(HOSTILE), {"unreadable": len(HOSTILE)})
    parked = await rabbit.take("orders.parking")
    assert {message.headers["x-attempts"] for message in parked} == {0}
    assert {message.headers["x-exception-type"] for message in parked} == {"UnreadableProperty"}
    assert {message.body for message in parked} == {b"{}"}
    ids = [message.message_id for message in parked]
    assert ids[0] == r"\xff\xfe"
    assert set(ids[1:]) == {"m-1", (r"\xff" * 64)[:255]}
    kept = [message.headers.get("mine") for message in parked]
    assert kept.count(True) == 2
    assert len(service.records("consumer_started")) == 1
    assert len(service.records("consumer_lost")) == 0
    assert [r["attempt"] for r in service.records("delivery_settled")] == [1] * len(HOSTILE)
    assert len(service.records("message_parked")) == len(HOSTILE)
    metrics = (await service.get("/metrics")).text
    assert f'billing_messages_parked_total{{reason="unreadable"}} {len(HOSTILE)}.0' in metrics
    assert await service.stop() == 0


async def test_a_routing_key_that_is_no_utf_8_is_parked(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit
) -> None:
    """It gets to the queue by the header CC; the copy tells its bytes."""
    service = await ServiceProcess(environment, tmp_path / "log").start().ready()
    headers = table((b"CC", b"A" + struct.pack(">I", 17) + b"S" + struct.pack(">I", 12) + b"order.placed"))
    await publish_bytes(rabbit.url, b"\xff\xfe", b"{}", message_id=GOOD_ID, headers=headers)
    await eventually(lambda: rabbit.count("orders.parking"), lambda n: n == 1)
    [parked] = await rabbit.take("orders.parking")
    assert parked.headers["x-original-routing-key"] == r"\xff\xfe"
    assert await service.stop() == 0


async def parking_list(environment: dict[str, str]) -> bytes:
    """Return what the tool tells of the parking queue."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "service", "parking", "list", "--json"),
        env={"PATH": os.environ["PATH"]} | environment,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output


def test_the_decoders_are_where_they_are_expected() -> None:
    """An upgrade of the client that moves them fails here, and warns at every start."""
    assert frames.guard()
    assert decode.METHODS["shortstr"] is not decode.short_str
    assert frames.guard()


@pytest.mark.parametrize(("table_", "key"), [("METHODS", "table"), ("TABLE_MAPPING", b"T")])
def test_a_client_that_has_moved_a_decoder_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table_: str, key: Any
) -> None:
    monkeypatch.delitem(getattr(decode, table_), key)
    assert not frames.guard()
    told = capsys.readouterr().out
    assert "frames_not_guarded" in told
    assert "pamqp" in told


WITH_ANOTHER_CLIENT = """
import runpy, sys
from pamqp import decode
moved = decode.METHODS["timestamp"]
decode.METHODS["timestamp"] = lambda value: moved(value)
sys.argv = ["billing", "run"]
runpy.run_module("service", run_name="__main__", alter_sys=True)
"""


async def test_a_service_whose_client_has_moved_a_decoder_warns_once_and_works(
    environment: dict[str, str], tmp_path: Path, rabbit: Rabbit, connection: asyncpg.Connection
) -> None:
    """Each of its connections is guarded; one warning is enough."""
    service = await ServiceProcess(environment, tmp_path / "log", ("-c", WITH_ANOTHER_CLIENT)).start().ready()
    await rabbit.publish(*placed("5d2e1f0a-0000-4000-8000-000000000000"))
    await eventually(lambda: connection.fetchval("select count(*) from invoices"), lambda n: n == 1)
    assert await service.stop() == 0
    [warning] = service.records("frames_not_guarded")
    assert (warning["level"], warning["decoders"]) == ("warning", ["timestamp"])
    assert warning["client"].startswith("pamqp ")


@pytest.mark.parametrize("levels", [1, 19, 20, 5000])
def test_tables_are_read_to_a_depth_and_told_from_there(levels: int) -> None:
    frames.guard()
    consumed, value = decode.METHODS["table"](nested(levels))
    assert consumed == len(nested(levels))
    assert frames.is_unreadable(value) == (levels >= 20)
