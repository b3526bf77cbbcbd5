"""Looks after blocks: sees servers that died, takes over what nodes hold, frees what is due, makes copies anew."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distributed_grid.agent.memory.accounting import show_bytes
from distributed_grid.agent.memory.connection import incarnation_at
from distributed_grid.agent.memory.errors import PoolFull, ServerLost
from distributed_grid.core.errors import GridError
from distributed_grid.core.process import ProcessId
from distributed_grid.orchestration.distributed_memory_pool.blocks import block_name, wire_id
from distributed_grid.orchestration.distributed_memory_pool.placement import choose_nodes
from distributed_grid.store.blocks import BlockRow

if TYPE_CHECKING:
    from distributed_grid.daemon.control import ControlPlane
    from distributed_grid.daemon.memory import MemoryDirectory

log = logging.getLogger(__name__)

ROUND_S = 2.0
PROBE_LIMIT_S = 3.0
AGENT_LIMIT_S = 5.0
COPY_LIMIT_S = 110.0  # shorter than a server holds a block still
#: A copy goes in steps that a slow link does within the limit, and is repeated for what was written meanwhile.
COPY_STEP_BYTES = 256 * 1024**2
COPY_STEP_PIECES = 4096
COPY_PASSES = 5
#: So little is left that writers can wait for it.
COPY_REST_BYTES = 64 * 1024**2
MOST_COPYING = 2
#: A copy that failed is tried again after this long, then after twice as long.
COPY_AGAIN_S, COPY_AGAIN_MOST_S = 1.0, 300.0
LOST_KEPT_S = 7 * 86400.0
LOOKED_FOR_S = 3600.0
PRESSED = 0.95


class MemoryCare:
    def __init__(self, directory: MemoryDirectory, plane: ControlPlane) -> None:
        self._directory = directory
        self._plane = plane
        self._checking: dict[str, asyncio.Lock] = {}
        self._copying: dict[str, asyncio.Task[None]] = {}
        #: By block: when its copies may be made again, and how long was waited for that.
        self._not_before: dict[str, tuple[float, float]] = {}
        self._pressed: set[str] = set()

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(ROUND_S)
                try:
                    await self._round()
                except GridError as error:
                    log.warning("looking after blocks failed: %s", error.message)
                except Exception:
                    log.exception("looking after blocks failed")
        finally:
            copying = list(self._copying.values())
            for task in copying:
                task.cancel()
            await asyncio.gather(*copying, return_exceptions=True)

    async def _round(self) -> None:
        rows = list(self._directory.rows.values())
        nodes = {copy["node"] for row in rows if row.state == "ready" for copy in row.data["copies"]}
        await self._directory.room.refresh(nodes)
        if not rows:
            return
        await asyncio.gather(*(self.check_node(node) for node in nodes))
        await self._look_for_lost(rows)
        await self._mend(rows)
        self._not_before = {row.id: self._not_before[row.id] for row in rows if row.id in self._not_before}
        for row in rows:
            if self._directory.rows.get(row.id) is not row:
                continue  # it changed meanwhile
            if row.state == "freeing":
                await self.finish_freeing(row.id)
            elif row.state == "lost" and time.time() - row.data.get("lost_at", row.created) > LOST_KEPT_S:
                self._directory.remove(row.id)
            elif row.data["owner"] and not ProcessId(*row.data["owner"]).is_alive():
                self._directory.put(row, state="freeing")
                await self.finish_freeing(row.id)
            elif row.state == "ready" and len(row.data["copies"]) < row.data["replicas"]:
                self._begin_copy(row)
            elif row.state == "ready" and row.data.get("trying"):
                await self._clear(row.id)
        self._watch_pressure(nodes)

    async def _look_for_lost(self, rows: list[BlockRow]) -> None:
        """A server that was only out of reach still has its blocks."""
        since = time.time() - LOOKED_FOR_S
        recent = [row for row in rows if row.state == "lost" and row.data.get("lost_at", 0) > since]
        servers = {(c["node"], c["host"], c["port"], c["incarnation"]) for row in recent for c in row.data["copies"]}
        for node, host, port, incarnation in servers:
            if self._online(node) and not await self._why_gone(node, host, port, incarnation):
                await self.adopt_if_there(node)

    def _online(self, node: str) -> bool:
        return node in self._plane.links.names() and bool(self._plane.links.get(node).state.online)

    # -- freeing --------------------------------------------------------------------------------------------------

    async def finish_freeing(self, block_id: str) -> None:
        """Free it on every node that answers; those that don't are asked again when they are back."""
        row = self._directory.rows.get(block_id)
        if row is None or row.state != "freeing" or block_id in self._copying:
            return  # a copy that is just being made would be left behind: the next round frees them all
        left = []
        trying = [{"node": node} for node in row.data.get("trying", [])]
        for copy in [*row.data["copies"], *trying]:
            try:
                await self._plane.links.get(copy["node"]).call("memory_free", timeout_s=15, block=wire_id(block_id))
            except GridError as error:
                log.info("%s is not freed on %s yet: %s", block_id, copy["node"], error.message)
                left.append(copy)
        if left:
            self._directory.put(row, copies=left, trying=[])
        else:
            self._directory.remove(block_id)

    # -- nodes that go and come -----------------------------------------------------------------------------------

    async def check_node(self, node: str) -> None:
        """Is the server there that holds this node's blocks? If not, they are lost, or live on elsewhere."""
        async with self._checking.setdefault(node, asyncio.Lock()):
            servers = {
                (copy["host"], copy["port"], copy["incarnation"])
                for row in self._directory.copies_on(node) for copy in row.data["copies"] if copy["node"] == node
            }  # fmt: skip
            for host, port, incarnation in servers:
                reason = await self._why_gone(node, host, port, incarnation)
                if reason:
                    await self._lose(node, incarnation, f"{node}: {reason}")

    async def _why_gone(self, node: str, host: str, port: int, incarnation: int) -> str:
        """Empty while that very server is there. A silent one may just be slow: its agent knows whether it lives."""
        reason, certain = await asyncio.to_thread(_probe, host, port, incarnation)
        if not reason or certain:
            return reason
        (reason, certain), lives = await asyncio.gather(
            asyncio.to_thread(_probe, host, port, incarnation), self._lives(node, incarnation)
        )
        if reason and lives and not certain:
            log.warning("%s: %s; its process is there", node, reason)
            return ""
        return reason

    async def _lives(self, node: str, incarnation: int) -> bool:
        try:
            found = await self._plane.links.get(node).call("memory_server", timeout_s=AGENT_LIMIT_S)
        except GridError:
            return False  # silent too
        return found is not None and found["incarnation"] == incarnation

    async def _lose(self, node: str, incarnation: int, reason: str) -> None:
        lost = []
        for block_id in [row.id for row in self._directory.copies_on(node)]:
            row = self._directory.rows.get(block_id)
            if row is None or row.state != "ready":
                continue  # it changed while others were seen to
            kept = [c for c in row.data["copies"] if (c["node"], c["incarnation"]) != (node, incarnation)]
            if len(kept) == len(row.data["copies"]):
                continue
            if kept:
                await self._drop_copy(row, kept)
            else:
                self._directory.put(row, state="lost", reason=reason, lost_at=time.time())
                lost.append(row)
        if lost:
            size = show_bytes(sum(row.size_bytes for row in lost))
            self._plane.events.publish(
                "memory.lost", f"{len(lost)} blocks ({size}) are lost with {reason}", node=node,
                blocks=[row.id for row in lost[:100]], uids=sorted({row.uid for row in lost}),
            )  # fmt: skip

    async def _drop_copy(self, row: BlockRow, kept: list[dict[str, Any]]) -> None:
        """Go on without a copy. From here on it has another generation, so that nobody writes to fewer than all."""
        row = self._directory.put(
            dataclasses.replace(row, node=kept[0]["node"]), copies=kept, generation=row.data["generation"] + 1
        )
        for copy in kept:
            try:
                await self._admin(
                    copy["node"], "set_generation", block=wire_id(row.id), generation=row.data["generation"]
                )
            except GridError as error:  # done when its agent is back, or when a client complains
                log.warning("%s does not know yet that %s goes on: %s", copy["node"], row.id, error.message)
        where = ", ".join(copy["node"] for copy in kept)
        self._plane.events.publish("memory.copy_lost", f"{row.id} goes on with its copy on {where}", node=row.node)

    async def _mend(self, rows: list[BlockRow]) -> None:
        """A writer that was broken off between two copies leaves them different: all but the first are made anew."""
        copied = [row for row in rows if row.state == "ready" and row.data["replicas"] > 1]
        for node in {copy["node"] for row in copied for copy in row.data["copies"]}:
            try:
                torn = (await self._admin(node, "torn"))["blocks"] if self._online(node) else []
                for number in torn:
                    await self._mend_one(block_name(number), node)
            except GridError as error:
                log.info("whether copies on %s differ is not known: %s", node, error.message)

    async def _mend_one(self, block_id: str, node: str) -> None:
        row = self._directory.rows.get(block_id)
        if row is None or row.state != "ready" or block_id in self._copying or self._is_early(block_id):
            return
        kept, others = row.data["copies"][0], [copy["node"] for copy in row.data["copies"][1:]]
        for one in {node, kept["node"]}:  # first: what is torn from now on is seen the next time
            await self._admin(one, "mend", block=wire_id(block_id))
        row = self._unchanged(row)
        if row is not None and others:
            self._put_off(block_id)  # those who break off all the time do not have us copy all the time
            await self._drop_copy(self._directory.put(row, trying=others), [kept])

    async def _admin(self, node: str, call: str, **arguments: Any) -> Any:
        limit_s = COPY_LIMIT_S if call in ("copy", "freeze") else 15.0
        return await self._plane.links.get(node).call(
            "memory_admin", timeout_s=limit_s, call=call, arguments=arguments
        )

    async def look_at(self, node: str) -> None:
        """Somebody could not do something there: is it gone, or does it only know less, or more, than the journal?"""
        await self.check_node(node)
        if self._online(node) and self._directory.copies_on(node):
            await self.adopt_if_there(node)

    async def adopt_if_there(self, node: str) -> None:
        try:
            await self.adopt(node)
        except GridError as error:
            log.warning("what %s holds is not known yet: %s", node, error.message)

    async def adopt(self, node: str) -> None:
        """A node's agent is there (again): what its server holds is the truth about its bytes."""
        found: set[str] = set()
        more, after = True, -1
        while more:
            held = await self._plane.links.get(node).call("memory_held", timeout_s=15, after=after)
            server = held["server"]
            if server is None:
                return
            for one in held["blocks"]:
                await self._adopt_one(node, server, one)
                found.add(block_name(one["id"]))
                after = one["id"]
            more = held["more"]
        gone = [row for row in self._directory.copies_on(node) if row.id not in found]
        if any(time.time() - row.created > 60 for row in gone):
            await self.check_node(node)

    async def _adopt_one(self, node: str, server: dict[str, Any], one: dict[str, Any]) -> None:
        directory, block_id = self._directory, block_name(one["id"])
        kept = ("node", "host", "port", "local_name", "incarnation")
        copy = {**{name: server[name] for name in kept}, "shared": one["shared"]}
        row = directory.rows.get(block_id)
        if row is None:
            data = {
                "generation": one["generation"], "copies": [copy], "replicas": 1, "name": "", "meta": {}, "owner": None,
                "at_rest": one["at_rest"],
            }  # fmt: skip
            directory.put(BlockRow(block_id, node, one["uid"], "ready", one["size_bytes"], one["created"], data))
            text = f"{block_id} is on {node}; the journal did not know it"
            self._plane.events.publish("memory.adopted", text, node=node)
            return
        if row.state == "allocating" or block_id in self._copying:
            return
        listed = any((c["node"], c["incarnation"]) == (node, server["incarnation"]) for c in row.data["copies"])
        if not listed or row.state == "freeing":
            await self._plane.links.get(node).call("memory_free", timeout_s=15, block=one["id"])
            return
        generation = max(row.data["generation"], one["generation"])
        if row.state == "lost" or generation != row.data["generation"]:
            back = row.state == "lost"
            directory.put(row, state="ready", generation=generation, reason="")
            if back:
                self._plane.events.publish("memory.back", f"{block_id} is there again with {node}", node=node)
        if one["generation"] != generation:
            await self._admin(node, "set_generation", block=one["id"], generation=generation)

    # -- copies ---------------------------------------------------------------------------------------------------

    def _is_early(self, block_id: str) -> bool:
        return time.monotonic() < self._not_before.get(block_id, (0.0, 0.0))[0]

    def _put_off(self, block_id: str) -> None:
        now, (due, waited_s) = time.monotonic(), self._not_before.get(block_id, (0.0, 0.0))
        again = now - due < COPY_AGAIN_MOST_S  # else that is long ago
        wait_s = min(COPY_AGAIN_MOST_S, 2 * waited_s) if again and waited_s else COPY_AGAIN_S
        self._not_before[block_id] = (now + wait_s, wait_s)

    def _begin_copy(self, row: BlockRow) -> None:
        """In a task of its own, for it can take long."""
        if row.id in self._copying or len(self._copying) >= MOST_COPYING or self._is_early(row.id):
            return

        async def copy() -> None:
            try:
                await self._copy_again(row)
            except GridError as error:
                log.warning("copying %s failed: %s", row.id, error.message)
                self._put_off(row.id)
            except Exception:
                log.exception("copying %s failed", row.id)
                self._put_off(row.id)
            finally:
                self._copying.pop(row.id, None)
            await self._clear(row.id)

        self._copying[row.id] = asyncio.create_task(copy())

    async def _copy_again(self, row: BlockRow) -> None:
        """Make the copy that is missing: writers wait for the last of it, and go on with both."""
        source = row.data["copies"][0]
        if row.data.get("trying"):  # what an earlier try left
            await self._clear(row.id)
            return
        taken = {copy["node"] for copy in row.data["copies"]}
        rooms = await self._directory.room.by_node("")
        fitting = {node: room for node, room in rooms.items() if node not in taken}
        current = self._unchanged(row)
        if current is None or not self._online(source["node"]) or not fitting:
            return
        with contextlib.ExitStack() as stack:
            try:
                target = choose_nodes(fitting, self._directory.room.needed(row))[0]
                stack.enter_context(self._directory.room.hold(target, row))
            except GridError as error:
                log.info("no place for another copy of %s: %s", row.id, error.message)
                return
            await self._make_copy(self._directory.put(current, trying=[target]), target)

    def _unchanged(self, row: BlockRow) -> BlockRow | None:
        """The row as it is now (its name may be another), if it still lies where it did and nobody frees it."""
        now = self._directory.rows.get(row.id)
        same = now is not None and now.state == row.state and all(
            now.data[name] == row.data[name] for name in ("copies", "generation")
        )  # fmt: skip
        return now if same else None

    async def _make_copy(self, row: BlockRow, target: str) -> None:
        source, number = row.data["copies"][0], wire_id(row.id)
        old, new = row.data["generation"], row.data["generation"] + 1
        copy = await self._directory.allocate_on(target, row, number, new)
        await self._directory.room.let_grow(row, [target])

        async def fill(pieces: list[tuple[int, int]]) -> None:
            for step in _steps(pieces):
                if not self._unchanged(row):
                    raise ServerLost("the block changed meanwhile")
                order = {
                    "block": number, "generation": new, "source_generation": old, "host": source["host"],
                    "port": source["port"], "pieces": step,
                }  # fmt: skip
                try:
                    await self._admin(target, "copy", **order)
                except PoolFull:  # kept packed, and to take more than it was allowed
                    await self._directory.room.let_grow(row, [target])
                    await self._admin(target, "copy", **order)

        await self._admin(source["node"], "track", block=number)
        left = [(0, row.size_bytes)]
        for _ in range(COPY_PASSES):
            await fill(left)
            left = (await self._admin(source["node"], "changed", block=number))["pieces"]
            if sum(length for _, length in left) <= COPY_REST_BYTES:
                break
        try:
            await self._admin(source["node"], "freeze", block=number)
            left += (await self._admin(source["node"], "changed", block=number))["pieces"]
            await fill(left)
            if not self._unchanged(row):
                raise ServerLost("the block changed meanwhile")
            await self._admin(source["node"], "thaw", block=number, generation=new)
        except GridError:
            await self._admin(source["node"], "thaw", block=number, generation=old)
            raise
        for other in row.data["copies"][1:]:
            await self._admin(other["node"], "set_generation", block=number, generation=new)
        current = self._unchanged(row)
        if current is None:
            raise ServerLost("the block changed meanwhile")
        self._directory.put(current, copies=[*row.data["copies"], copy], generation=new, trying=[])
        self._plane.events.publish("memory.copied", f"{row.id} has a new copy on {target}", node=target)

    async def _clear(self, block_id: str) -> None:
        """Free what a try that came to nothing has left, before anything else is tried."""
        row = self._directory.rows.get(block_id)
        if row is None or row.state != "ready" or not row.data.get("trying"):
            return  # one that is being freed is freed there too
        listed = {copy["node"] for copy in row.data["copies"]}
        for node in set(row.data["trying"]) - listed:
            try:
                await self._plane.links.get(node).call("memory_free", timeout_s=15, block=wire_id(block_id))
            except GridError as error:
                log.info("what is left of a copy of %s on %s stays for now: %s", block_id, node, error.message)
                return
        current = self._directory.rows.get(block_id)
        if current is not None and current.state == "ready":
            self._directory.put(current, trying=[])

    # -- warnings -------------------------------------------------------------------------------------------------

    def _watch_pressure(self, nodes: set[str]) -> None:
        """Tell the owners, once each time, that a node with their blocks is itself short of memory."""
        shots = self._plane.collector.get_all_latest_snapshots()
        pressed = {node for node in nodes if node in shots and shots[node].memory_pressure > PRESSED}
        for node in pressed - self._pressed:
            uids = sorted({row.uid for row in self._directory.copies_on(node)})
            self._plane.events.publish(
                "memory.pressure", f"{node} is short of memory; free blocks there if you can", node=node, uids=uids
            )
        self._pressed = pressed


def _steps(pieces: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The same in order, so much at a time."""
    step: list[tuple[int, int]] = []
    size = 0
    for start, length in pieces:
        for offset in range(start, start + length, COPY_STEP_BYTES):
            part = min(COPY_STEP_BYTES, start + length - offset)
            if step and (size + part > COPY_STEP_BYTES or len(step) >= COPY_STEP_PIECES):
                yield step
                step, size = [], 0
            step.append((offset, part))
            size += part
    if step:
        yield step


def _probe(host: str, port: int, incarnation: int) -> tuple[str, bool]:
    """Why that very server is not there, empty if it is, and whether that is certain: a refusal is, silence is not."""
    try:
        if incarnation_at(host, port, PROBE_LIMIT_S) == incarnation:
            return "", True
        return "its memory server was started anew", True
    except ServerLost as error:
        reason = f"its memory server does not answer ({error.cause or error.message})"
        return reason, "refused" in error.cause.lower()
