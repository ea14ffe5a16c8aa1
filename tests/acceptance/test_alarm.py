"""Somebody is told that messages are parked: the log of itself, the metrics when they are asked."""

from pathlib import Path

from tests.support.process import ServiceProcess
from tests.support.rabbit import Rabbit
from tests.support.waiting import eventually


def value(page: str, metric: str) -> float:
    """Return a metric's value."""
    [line] = [line for line in page.splitlines() if line.startswith(f"{metric} ")]
    return float(line.split()[-1])


async def test_what_is_parked_is_warned_of_once_though_nobody_asks_and_counted_for_who_does(
    environment: dict[str, str], rabbit: Rabbit, tmp_path: Path
) -> None:
    service = ServiceProcess(
        environment | {"BILLING_PARKED_ALARM": "2"}, tmp_path / "log", ("-m", "service", "run", "--migrate")
    ).start()
    await service.ready()
    assert value((await service.get("/metrics")).text, "billing_parked") == 0
    for number in range(3):
        await rabbit.publish("order.placed", b"{", message_id=f"bad-{number}")
    [record] = await service.logged("parking_alarm", within=60)
    assert (record["level"], record["queue"], record["threshold"]) == ("warning", "orders.parking", 2)
    assert record["count"] in {2, 3}

    async def metrics() -> str:
        return (await service.get("/metrics")).text

    page = await eventually(metrics, lambda text: value(text, "billing_parked") == 3)
    assert value(page, "billing_frames_guarded") == 1
    await eventually(metrics, lambda text: value(text, "billing_parked_oldest_seconds") > 0)
    assert len(service.records("parking_alarm")) == 1
    assert await rabbit.count("orders.parking") == 3
    assert await service.stop() == 0


async def test_metrics_answer_where_the_management_interface_does_not(
    environment: dict[str, str], rabbit: Rabbit, tmp_path: Path, unused_tcp_port: int
) -> None:
    """It is told once, without the password; every other gauge is there."""
    url = f"http://u:S3cr3t@127.0.0.1:{unused_tcp_port}"
    service = ServiceProcess(
        environment | {"BILLING_RABBITMQ_MANAGEMENT_URL": url}, tmp_path / "log", ("-m", "service", "run", "--migrate")
    ).start()
    await service.ready()
    for _ in range(2):
        answer = await service.get("/metrics")
        assert answer.status_code == 200
        assert value(answer.text, "billing_outbox_unsent") == 0
    [record] = service.records("management_not_available")
    assert "ConnectError" in record["explanation"]
    assert "S3cr3t" not in service.log
    assert await service.stop() == 0
