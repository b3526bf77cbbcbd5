"""`grid memory`: files and blocks in the memory of other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from distributed_grid.commands._common import (
    chosen_file,
    config_option,
    emit,
    format_option,
    note,
    print_table,
    with_daemon,
)  # fmt: skip
from distributed_grid.commands.memory_views import (
    age,
    as_block,
    as_object,
    check_key,
    checked,
    parse_bytes,
    pick,
    rate,
    state,
    where,
)  # fmt: skip
from distributed_grid.core.errors import GridError, UsageError
from distributed_grid.core.resources import format_bytes, parse_memory

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool

#: Longer than the daemon waits for a node that starts its memory server on a busy machine.
ALLOCATE_LIMIT_S = 200.0
COMPLETION_LIMIT_S = 2.0


@click.group()
def command() -> None:
    """Files and blocks in the memory of other nodes. They live until they are deallocated, or the cluster stops.

    \b
    grid memory store model model.bin             a file, under the name "model"
    cat big | grid memory store k -               a pipe
    grid memory retrieve k -o - | wc -c           and out again
    grid memory list-objects
    """


# -- what they share -----------------------------------------------------------------------------------------------


async def every_block(client: Any) -> list[dict[str, Any]]:
    """All that the daemon shows to this user, newest first."""
    from distributed_grid.orchestration.distributed_memory_pool.blocks import PAGE_BLOCKS

    found: list[dict[str, Any]] = []
    while True:
        before = [found[-1]["created"], found[-1]["id"]] if found else None
        page = await client.call("memory_list", before=before)
        found += page
        if len(page) < PAGE_BLOCKS:
            return found


def _complete(kind: str) -> Any:
    """Names and ids for TAB, if a daemon is there and quick."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from distributed_grid.daemon.client import connect

        async def ask() -> list[dict[str, Any]]:
            async with asyncio.timeout(COMPLETION_LIMIT_S), await connect() as client:
                if kind == "nodes":
                    status = await client.call("cluster_status")
                    return [{"name": node["name"]} for node in status["nodes"]]
                return await every_block(client)

        try:
            found = asyncio.run(ask())
        except (GridError, TimeoutError, OSError):
            return []
        words = [one["name"] for one in found if one["name"]]
        words += [one["id"] for one in found if "id" in one] if kind == "blocks" else []
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]

    return complete


def place_options(function: Any) -> Any:
    for option in reversed((
        click.option("-n", "--node", default="", shell_complete=_complete("nodes"),
                     help="Preferred node; default: where there is most room."),
        click.option("--strict", is_flag=True, help="On that node or not at all."),
        click.option("--replicas", default=1, show_default=True, type=click.IntRange(1, 3),
                     help="Copies, each on another node."),
        click.option("--at-rest", default="", type=click.Choice(["", "lz4", "zstd"]), metavar="[lz4|zstd]",
                     help="Keep it packed there, so that the node holds more."),
    )):  # fmt: skip
        function = option(function)
    return function


@contextlib.contextmanager
def open_pool(config_path: str | None) -> Iterator[SyncMemoryPool]:
    """The pool of the daemon's cluster. SIGTERM is taken like Ctrl-C, so that nothing half-done stays."""
    from distributed_grid.config.loader import load_cluster_config
    from distributed_grid.orchestration.distributed_memory_pool.sync import SyncMemoryPool

    path, _named = chosen_file(config_path)
    with_daemon(lambda client: client.call("memory_open"), config_path)  # it is there, and of this configuration
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with SyncMemoryPool(load_cluster_config(path) if path else None) as pool:
            yield pool
    finally:
        signal.signal(signal.SIGTERM, before)


# -- commands -----------------------------------------------------------------------------------------------------


@command.command()
@click.argument("key", shell_complete=_complete("names"))
@click.argument("file", type=click.Path(allow_dash=True))
@place_options
@click.option("--size", type=parse_bytes, metavar="BYTES", help="Of a pipe: at most so much will come (4096, 2GB); "
              "else twice the room is needed for a while.")  # fmt: skip
@config_option
@format_option
def store(
    key: str, file: str, node: str, strict: bool, replicas: int, at_rest: str, size: int | None,
    config_path: str | None, output: str,
) -> None:  # fmt: skip
    """Put a file or a pipe into a worker's memory.

    FILE (- for standard input) is found again by KEY. What had that name stays readable until the new object is
    whole. Breaking off leaves everything as it was.

    \b
    grid memory store model model.bin -n gpu2
    tar c data | grid memory store data.tar -
    pg_dump lab | grid memory store dump - --size 2GB
    """
    from distributed_grid.commands import memory_transfer

    check_key(key)
    if strict and not node:
        raise UsageError("--strict needs a node", hint="-n NODE --strict", code="usage")
    with open_pool(config_path) as pool:
        place = memory_transfer.Place(node or None, strict, replicas, at_rest)
        found, seconds = memory_transfer.store(pool, key, file, place, size)
    told = {**as_object(found), "seconds": round(seconds, 3)}
    emit(told, output, lambda: click.echo(f"{key}: {rate(told['size_bytes'], seconds)} on {where(told)}"))
    _tell_elsewhere(node, told)


def _tell_elsewhere(wanted: str, told: dict[str, Any]) -> None:
    if wanted and wanted not in told["nodes"]:
        note(f"{wanted} had no room for it, so it is on {where(told)}")


@command.command()
@click.argument("key", shell_complete=_complete("blocks"))
@click.option("-o", "--output", "file", type=click.Path(allow_dash=True), help="File to write; -: standard output.")
@click.option("--offset", type=parse_bytes, metavar="BYTES", default="0", help="First byte (4096, 2GB).  [default: 0]")
@click.option("-s", "--size", type=parse_bytes, metavar="BYTES", help="How many bytes.  [default: all from there]")
@config_option
@format_option
def retrieve(
    key: str, file: str | None, offset: int, size: int | None, config_path: str | None, output: str
) -> None:
    """Get an object back, or a part of it.

    KEY is its name, or the id of a block. Without -o it goes to standard output, if that is not a terminal. A file
    appears only when it is whole.

    \b
    grid memory retrieve model -o model.bin
    grid memory retrieve data.tar -o - | tar x
    grid memory retrieve log --offset 1GB -s 4096
    """
    from distributed_grid.commands import memory_transfer

    if file is None and os.isatty(1):
        raise UsageError("bytes are not for a terminal", hint="-o FILE, or -o - if you mean it", code="usage")
    to = file or "-"
    if to == "-" and output == "json":
        raise UsageError("the bytes and --format json can't both go to standard output", hint="-o FILE", code="usage")
    with open_pool(config_path) as pool:
        found = pool.info(pick(pool.list_blocks(), key)["id"])
        count, seconds = memory_transfer.retrieve(pool, found, to, offset, size)
    if to != "-":
        told = {**as_object(found), "file": to, "offset": offset, "bytes": count, "seconds": round(seconds, 3)}
        emit(told, output, lambda: click.echo(f"{to}: {rate(count, seconds)} from {where(told)}"))


@command.command("list-objects")
@config_option
@format_option
def list_objects(config_path: str | None, output: str) -> None:
    """What is stored, newest first.

    Of you; the daemon's owner sees everybody's.
    """
    blocks = with_daemon(every_block, config_path)
    objects = [as_object(block) for block in blocks if block["name"]]
    rows = [(o["key"], format_bytes(o["size_bytes"]), where(o), state(o), age(o), o["user"], o["id"])
            for o in objects]  # fmt: skip
    headers = ("key", "size", "nodes", "state", "age", "user", "block")
    emit(objects, output, lambda: print_table(headers, rows, right=(1,)))


@command.command("list-blocks")
@config_option
@format_option
def list_blocks(config_path: str | None, output: str) -> None:
    """All blocks, newest first.

    With and without a name, of you; the daemon's owner sees everybody's.
    """
    blocks = [as_block(one) for one in with_daemon(every_block, config_path)]
    rows = [(b["id"], format_bytes(b["size_bytes"]), where(b), state(b), age(b), b["user"], b["name"] or "-")
            for b in blocks]  # fmt: skip
    headers = ("block", "size", "nodes", "state", "age", "user", "key")
    emit(blocks, output, lambda: print_table(headers, rows, right=(1,)))


@command.command()
@click.argument("size")
@place_options
@click.option("--name", default="", help="Found again by it; a block that had the name is freed.")
@config_option
@format_option
def allocate(
    size: str, node: str, strict: bool, replicas: int, at_rest: str, name: str, config_path: str | None, output: str
) -> None:
    """Make a new block, all zero; prints its id.

    SIZE is in GB, or has a unit: 4, 512MiB. Programs fill it: see docs/memory.md.

    \b
    grid memory allocate 5 -n gpu2
    grid memory allocate 512MiB --replicas 2 --name cache
    """
    from distributed_grid.orchestration.distributed_memory_pool.blocks import check_size, new_block_id

    size_bytes = check_size(checked(parse_memory(size), size))
    if name:
        check_key(name)
    if strict and not node:
        raise UsageError("--strict needs a node", hint="-n NODE --strict", code="usage")
    arguments: dict[str, Any] = {
        "block_id": new_block_id(), "size_bytes": size_bytes, "preferred_node": node, "strict": strict,
        "replicas": replicas, "key": name, "at_rest": at_rest,
    }  # fmt: skip
    found = with_daemon(
        lambda client: client.call("memory_allocate", timeout_s=ALLOCATE_LIMIT_S, **arguments), config_path
    )
    told = as_block(found)
    emit(told, output, lambda: click.echo(told["id"]))
    _tell_elsewhere(node, told)


@command.command()
@click.argument("blocks", metavar="BLOCK...", nargs=-1, required=True, shell_complete=_complete("blocks"))
@config_option
@format_option
def deallocate(blocks: tuple[str, ...], config_path: str | None, output: str) -> None:
    """Free blocks and objects.

    BLOCK is an id (any unique beginning) or the name of an object. Lost ones are forgotten.

    \b
    grid memory deallocate model
    grid memory deallocate block_3f2a block_91c0
    """

    async def work(client: Any) -> list[dict[str, Any]]:
        known = await every_block(client)
        chosen = {one["id"]: one for one in (pick(known, word, own=False) for word in blocks)}
        for block_id in chosen:  # all words made sense
            await client.call("memory_deallocate", block_id=block_id)
        return [as_block(one) for one in chosen.values()]

    freed = with_daemon(work, config_path)

    def show() -> None:
        for one in freed:
            name = f" ({one['name']})" if one["name"] else ""
            click.echo(f"freed {one['id']}{name}: {format_bytes(one['size_bytes'])} on {where(one)}")

    emit(freed, output, show)


@command.command()
@config_option
@format_option
def stats(config_path: str | None, output: str) -> None:
    """Each node's blocks, use and room.

    How much was promised, how much is really in use, and what would still fit.
    """

    async def work(client: Any) -> dict[str, Any]:
        await client.call("memory_open")  # says whether a cluster is up
        found: dict[str, Any] = await client.call("memory_stats")
        for node in found["nodes"].values():
            node.pop("server", None)
        return found

    found = with_daemon(work, config_path)

    def show() -> None:
        rows = [
            (name, node["blocks"], format_bytes(node["promised_bytes"]), format_bytes(node["resident_bytes"]),
             format_bytes(node["room_bytes"]), "yes" if node["lends"] else "only when named")
            for name, node in found["nodes"].items()
        ]  # fmt: skip
        print_table(("node", "blocks", "promised", "in use", "room", "lends"), rows, right=(1, 2, 3, 4))
        lost = f", {found['lost']} of them lost" if found["lost"] else ""
        click.echo(f"yours: {found['blocks']} blocks, {format_bytes(found['bytes'])}{lost}")

    emit(found, output, show)
