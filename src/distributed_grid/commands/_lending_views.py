"""How offers, leases, boosts and the queue are shown, and how amounts are read from the command line."""

from __future__ import annotations

import time
from typing import Any

import click

from distributed_grid.commands._common import print_table
from distributed_grid.core.errors import UsageError
from distributed_grid.core.resources import AllocationPriority, ResourceType, format_duration

WORDS = {"cpu": "cores", "gpu": "GPU", "memory": "GB"}


def amount_text(kind: str, amount: float) -> str:
    return f"{amount:.4g} {WORDS.get(kind, '')}".strip()


def amounts_text(amounts: dict[str, Any]) -> str:
    from distributed_grid.orchestration.resource_sharing.model import Amounts

    return str(Amounts.from_wire(amounts))


def moment(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "-"


def asked(pairs: list[tuple[str, str | None]]) -> dict[str, int]:
    """Exact amounts from (type, what was typed); several of one type are a mistake, not a sum."""
    from distributed_grid.orchestration.resource_sharing.amounts import combine, parse_amount, parse_type

    given = [(parse_type(kind), text) for kind, text in pairs if text is not None]
    if len({kind for kind, _ in given}) != len(given):
        raise UsageError("one amount for each type", hint="--cpu 2 --memory 4", code="amount")
    if not given:
        raise UsageError("nothing is asked for", hint="--resource-type cpu --amount 2", code="amount")
    return combine(*(parse_amount(kind, text) for kind, text in given)).to_wire()


def priority_name(text: str) -> str:
    return str(AllocationPriority.parse(text))


def show_offers(offers: list[dict[str, Any]], nodes: list[dict[str, Any]]) -> None:
    click.echo("Resource offers")
    if offers:
        now = time.time()
        rows = [
            (o["node"], o["type"], amount_text(o["type"], o["amount"]), format_duration(o["expires_at"] - now))
            for o in offers
        ]  # fmt: skip
        print_table(("node", "type", "available", "expires in"), rows)
    else:
        click.echo("No resource offers available: see `grid status`")
    for node in nodes:
        if node["cooling"]:
            click.echo(f"{node['node']} cools down and lends nothing new: grid resource-sharing cooldown --end")
        for kind, why in node["reasons"].items():
            click.echo(f"{node['node']} does not offer {kind}: {why}")


def show_allocations(leases: list[dict[str, Any]]) -> None:
    click.echo("Active allocations")
    rows = [
        (
            one["id"][:8], one["kind"], one["node"], one["target"], amounts_text(one["amounts"]), one["priority"],
            "overdue" if one["overdue"] and one["state"] == "active" else one["state"], one["user"],
            format_duration(time.time() - one["created"]), ", ".join(one["tasks"]),
        )
        for one in sorted(leases, key=lambda one: one["created"])
    ]  # fmt: skip
    if rows:
        headers = ("id", "kind", "source", "target", "lent", "priority", "state", "user", "age", "tasks")
        print_table(headers, rows)
    else:
        click.echo("none")


def show_queue(queue: list[dict[str, Any]]) -> None:
    if not queue:
        return
    click.echo("Waiting")
    rows = [
        (
            one["position"], "resume" if one["resume"] else "request", amounts_text(one["amounts"]), one["priority"],
            one["user"], format_duration(one["waited_s"]), one["reason"],
        )
        for one in queue
    ]  # fmt: skip
    print_table(("place", "what", "asked", "priority", "user", "waited", "why"), rows)


def show_lending(status: dict[str, Any]) -> None:
    if not status["enabled"]:
        click.echo("Resource sharing not enabled")
    show_offers(status["offers"], status["nodes"])
    click.echo()
    show_allocations(status["allocations"])
    if status["queue"]:
        click.echo()
    show_queue(status["queue"])


def show_boosts(found: dict[str, Any]) -> None:
    click.echo(f"Active boosts: {found['total']}")
    for kind in ResourceType:
        if found["totals"][kind.value]:
            click.echo(f"  {kind.value}: {amount_text(kind.value, found['totals'][kind.value])}")
    if found["boosts"]:
        rows = [
            (
                one["boost_id"][:8], one["source_node"], one["target_node"], one["resource_type"],
                amount_text(one["resource_type"], one["amount"]), moment(one["allocated_at"]),
                moment(one["expires_at"]), "" if one["state"] == "active" else one["state"],
            )
            for one in found["boosts"]
        ]  # fmt: skip
        print_table(("boost id", "source", "target", "type", "amount", "allocated", "expires", ""), rows)
