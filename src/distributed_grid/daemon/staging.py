"""Carries the files of a moved process: to its target before and during the pause, and those it changed home again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from distributed_grid.agent.inspect.facts import TreeFacts
from distributed_grid.agent.staging.beneath import CHUNK_BYTES, Entry
from distributed_grid.agent.staging.names import Agreed
from distributed_grid.core.errors import GridError, Refused
from distributed_grid.daemon.events import EventHub
from distributed_grid.daemon.links import NodeLink, NodeLinks
from distributed_grid.daemon.manifests import Manifests
from distributed_grid.orchestration.offloading.model import Strategy
from distributed_grid.orchestration.offloading.staging import (
    MAX_FILES,
    MAX_FILES_HOME,
    Agreement,
    agree,
    changed_there,
    decide_home,
    fit,
    more_directories,
    other_name,
)  # fmt: skip
from distributed_grid.store.journal import Journal

log = logging.getLogger(__name__)

#: Small files travel together, up to so many bytes and so many at once.
BATCH_BYTES = 512 << 10
BATCH_FILES = 200
CALL_LIMIT_S = 600.0
#: A file that is written to while it is read is tried again so often.
TRIES = 3
SAMES = 9

Wire = dict[str, Any]
SharedDirs = Callable[[list[str]], Awaitable[tuple[str, ...]]]
Place = Callable[[list[Wire]], Awaitable[Any]]


class FileStaging:
    def __init__(self, journal: Journal, links: NodeLinks, events: EventHub) -> None:
        self._manifests = Manifests(journal)
        self._moves = journal.moves
        self._links = links
        self._events = events
        self._busy: dict[str, asyncio.Lock] = {}

    # -- plan -------------------------------------------------------------------------------------------------------

    async def plan(
        self, facts: TreeFacts, strategy: Strategy, node: str, files: Iterable[str], shared: tuple[str, ...],
        ask_shared: SharedDirs, limit_bytes: int, large: bool | None,
    ) -> tuple[Agreement, list[str], str]:  # fmt: skip
        """What would travel, what is to be said of it, and why it cannot be; nothing where all is shared."""
        if "/" in shared:
            return Agreement(), [], ""
        known = (*shared, *await ask_shared([one for one in more_directories(facts) if one not in shared]))

        def is_shared(path: str) -> bool:
            return any(path == one or path.startswith(one.rstrip("/") + "/") for one in known)

        agreement = agree(facts, strategy=strategy, files=list(files), shared=is_shared)
        found = await self._scan(self._links.get(node), agreement.sent, MAX_FILES_HOME if large else MAX_FILES)
        entries = [Entry(**one) for one in found["entries"]]
        return fit(agreement, entries, found["large"], limit_bytes, large)

    async def _scan(self, link: NodeLink, agreed: Agreed, max_files: int) -> Wire:
        if not agreed.trees and not agreed.files:
            return {"entries": [], "directories": [], "large": []}
        found: Wire = await link.call(
            "stage_scan", agreed=agreed.to_wire(), max_files=max_files, timeout_s=CALL_LIMIT_S
        )
        return found

    # -- there ------------------------------------------------------------------------------------------------------

    async def before(self, move_id: str, node: str, target: str, facts: Wire) -> None:
        """Before the freeze, while the process runs: all that can be there already."""
        previous = str(facts.get("from_task") or "")
        if previous:
            await self.bring_home(previous)
        if not facts.get("staging"):
            return
        kept = self._manifests.get(previous) if previous else None
        home = kept["home"] if kept else node
        agreement = Agreement.from_wire(facts["staging"])
        if home == target:  # the way home: what it changed has just been brought, the rest is once it stands still
            await self._check_no_conflict(agreement, kept or {"here": {}}, self._links.get(home))
            return
        here, there = self._links.get(node), self._links.get(target)
        known = self._manifests.known(move_id, home, target)
        await self._check_nobody_else(there, agreement, known)
        manifest: Wire = {"agreement": facts["staging"], "home": home, "sent": {}, "here": {}, "there": {}}
        self._manifests.put(move_id, manifest)
        await self._send_changed(move_id, here, there, agreement, manifest, known)
        seen = await self._scan(there, agreement.home, MAX_FILES_HOME)
        manifest["there"] = {one["path"]: [one["size"], one["mtime_ns"]] for one in seen["entries"]}
        manifest["here"] = dict(kept["here"] if kept else manifest["sent"])
        self._manifests.put(move_id, manifest)
        placed = [path for path, mark in manifest["sent"].items() if path not in known or known[path][0] != mark]
        self._manifests.same(move_id, manifest, target, placed)

    async def _check_no_conflict(self, agreement: Agreement, kept: Wire, home: NodeLink) -> None:
        """A file that it has open travels with it: over one that was changed at home meanwhile it may not."""
        open_files = Agreed(files=agreement.frozen)
        for path, one in (await self._look(home, open_files, agreement.frozen)).items():
            known = kept["here"].get(path)
            if known is not None and one.mark != known:
                raise Refused(
                    f"{path} was changed on {home.node} as well", cause="the process has it open and brings its own",
                    hint=f"mv {path} {path}.mine", code="file-conflict",
                )  # fmt: skip

    async def _check_nobody_else(
        self, there: NodeLink, agreement: Agreement, known: dict[str, tuple[list[int], list[int]]]
    ) -> None:
        """A file that it has open replaces the one there: not one that another moved process has changed since."""
        shared = [path for path in agreement.frozen if path in known]
        for path, one in (await self._look(there, Agreed(files=tuple(shared)), shared)).items():
            if one.mark != known[path][1]:
                raise Refused(
                    f"{path} was changed on {there.node} by a process that was moved there",
                    cause="the process has it open here and brings its own", hint="choose another node",
                    code="file-conflict",
                )  # fmt: skip

    async def after_freeze(self, move_id: str, node: str, target: str, facts: Wire) -> None:
        """It stands still: what changed since it was sent, and how everything stands now."""
        previous = str(facts.get("from_task") or "")
        if previous:
            await self.bring_home(previous)
        manifest = self._manifests.get(move_id)
        if manifest is None:
            return
        agreement = Agreement.from_wire(manifest["agreement"])
        here, there = self._links.get(node), self._links.get(target)
        before = dict(manifest["sent"])
        known = self._manifests.known(move_id, manifest["home"], target)
        for _ in range(TRIES):
            unsent = await self._send_changed(move_id, here, there, agreement, manifest, known)
            if not unsent:
                break
        else:
            log.warning("%s: left behind, another program keeps changing them: %s", move_id, unsent[:3])
        fresh = {path: mark for path, mark in manifest["sent"].items() if before.get(path) != mark}
        theirs = {path: other for path, (mark, other) in known.items() if fresh.get(path) == mark}
        manifest["there"] |= {**fresh, **theirs}
        carried = [path for path in agreement.frozen if agreement.home.covers(path)]
        arrived = await self._look(there, agreement.home, carried)
        manifest["there"] |= {path: one.mark for path, one in arrived.items()}
        if previous:
            manifest["here"] = dict((self._manifests.get(previous) or {"here": {}})["here"])
        else:
            at_home = await self._look(here, agreement.home, carried)
            manifest["here"] = {**manifest["sent"], **{path: one.mark for path, one in at_home.items()}}
        self._manifests.put(move_id, manifest)
        self._manifests.same(move_id, manifest, target, {*fresh, *arrived} - {*theirs})

    async def _send_changed(
        self, move_id: str, here: NodeLink, there: NodeLink, agreement: Agreement, manifest: Wire,
        known: dict[str, tuple[list[int], list[int]]],
    ) -> list[str]:  # fmt: skip
        """Send what the target does not have as it is here now; what has gone here goes there, too.

        `known`: what siblings brought there, and may have changed there since: as long as it is as it was here, theirs
        is the newer one. What was changed while it was read is not sent: the names of these.
        """
        found = await self._scan(here, agreement.sent, agreement.max_files)
        apart = {*agreement.frozen, *agreement.output}
        entries = [Entry(**one) for one in found["entries"] if one["path"] not in apart]
        sent: dict[str, list[int]] = manifest["sent"]
        sent |= {one.path: one.mark for one in entries if one.path in known and known[one.path][0] == one.mark}
        links = [one for one in entries if one.link and one.path not in sent]
        changed = [one for one in entries if not one.link and sent.get(one.path) != one.mark]
        with_digest = await self._look(here, agreement.sent, [one.path for one in changed], digests=True)
        agreed = agreement.sent.to_wire()
        if not sent or changed:
            files = {one.path.rpartition("/")[0] for one in entries if one.path in agreement.sent.files}
            directories = await here.call("stage_above", paths=[*agreement.directories, *sorted(files)])
            directories += [one for one in found["directories"] if one["path"] not in agreement.directories]
            await there.call("stage_make", directories=directories, timeout_s=CALL_LIMIT_S)
        missing: list[Entry] = []
        for batch in _batches([*links, *with_digest.values()], BATCH_FILES):
            lacking = set(
                await there.call(
                    "stage_have", agreed=agreed, entries=[one.to_wire() for one in batch], timeout_s=CALL_LIMIT_S
                )
            )
            missing += [one for one in batch if one.path in lacking]

        unsent: list[str] = []

        async def place(files: list[Wire]) -> None:
            answers = await there.call(
                "stage_place", move_id=move_id, agreed=agreed, files=files, timeout_s=CALL_LIMIT_S
            )
            for answer in answers:
                if answer.get("refused", "file-digest") != "file-digest":
                    raise Refused(answer["text"], code=answer["refused"])
                if "refused" in answer:
                    unsent.append(answer["path"])

        await self._carry(move_id, here, there, agreement.sent, [(one, None) for one in missing], place)
        now = {one.path for one in entries}
        gone = {path: mark for path, mark in sent.items() if path not in now}
        if gone:
            await there.call("stage_remove", agreed=agreed, marks=gone)
        manifest["sent"] = {
            **{path: mark for path, mark in sent.items() if path in now},
            **{path: one.mark for path, one in with_digest.items() if path not in unsent},
            **{one.path: one.mark for one in links},
        }
        return unsent

    async def _look(
        self, link: NodeLink, agreed: Agreed, paths: Iterable[str], *, digests: bool = False
    ) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for batch in _batches(list(paths), BATCH_FILES):
            answer = await link.call(
                "stage_look", agreed=agreed.to_wire(), paths=batch, digests=digests, timeout_s=CALL_LIMIT_S
            )
            found |= {one["path"]: Entry(**one) for one in answer if one["path"] in batch}
        return found

    async def _carry(
        self, move_id: str, giver: NodeLink, taker: NodeLink, agreed: Agreed,
        files: list[tuple[Entry, list[int] | None]], place: Place, names: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Send contents, large ones in pieces, small ones together; `place` puts them where they belong."""
        renamed = names or {}

        def told(entry: Entry, expect: list[int] | None) -> Wire:
            return {"entry": {**entry.to_wire(), "path": renamed.get(entry.path, entry.path)}, "expect": expect}

        small = [one for one in files if one[0].size <= BATCH_BYTES // 2]
        for batch in _by_size(small):
            wanted = [{"path": one.path, "offset": 0, "size": one.size} for one, _ in batch]
            data = await giver.call("stage_read", agreed=agreed.to_wire(), wanted=wanted, timeout_s=CALL_LIMIT_S)
            await place([{**told(*one), "data": piece} for one, piece in zip(batch, data, strict=True)])
        for entry, expect in files:
            if entry.size <= BATCH_BYTES // 2:
                continue
            for offset in range(0, entry.size, CHUNK_BYTES):
                size = min(CHUNK_BYTES, entry.size - offset)
                wanted = [{"path": entry.path, "offset": offset, "size": size}]
                (piece,) = await giver.call("stage_read", agreed=agreed.to_wire(), wanted=wanted)
                await taker.call("stage_piece", move_id=move_id, digest=entry.digest, offset=offset, data=piece)
            await place([told(entry, expect)])

    # -- home -------------------------------------------------------------------------------------------------------

    async def bring_home(self, move_id: str) -> dict[str, list[str]]:
        """Bring what the process has changed there home now; may be repeated. One at a time from each node."""
        row = self._moves.find(move_id)
        async with self._busy.setdefault(row.target if row else "", asyncio.Lock()):
            manifest = self._manifests.get(move_id)
            if manifest is None or row is None:
                return {"files": [], "conflicts": []}
            done = _Homecoming()
            for _ in range(TRIES):
                if not await self._bring(move_id, manifest, done):
                    break
            return {"files": sorted(done.files), "conflicts": sorted(done.conflicts)}

    async def _bring(self, move_id: str, manifest: Wire, done: _Homecoming) -> bool:
        """One round; whether there is need of another, because something changed while it was read."""
        row = self._moves.get(move_id)
        agreement = Agreement.from_wire(manifest["agreement"])
        there, home = self._links.get(row.target), self._links.get(manifest["home"])
        found = await self._scan(there, agreement.home, MAX_FILES_HOME)
        paths, outside = changed_there(found["entries"], manifest["there"], agreement.home, agreement.uid)
        paths = [path for path in paths if path not in agreement.output]  # written at home, never there
        if outside:
            log.warning("%s: %s sent names outside of what was agreed: %s", move_id, row.target, outside[:3])
        again = False
        for batch in _batches(paths, BATCH_FILES):
            again |= await self._bring_batch(move_id, manifest, agreement, there, home, batch, done)
            self._manifests.put(move_id, manifest)
        return again

    async def _bring_batch(
        self, move_id: str, manifest: Wire, agreement: Agreement, there: NodeLink, home: NodeLink, paths: list[str],
        done: _Homecoming,
    ) -> bool:  # fmt: skip
        theirs = await self._look(there, agreement.home, paths, digests=True)
        ours = await self._look(home, agreement.home, theirs)
        base: dict[str, list[int]] = manifest["here"]
        doubtful = [path for path, one in ours.items() if one.mark != base.get(path) and not one.link]
        ours |= await self._look(home, agreement.home, doubtful, digests=True)
        write: list[tuple[Entry, list[int] | None]] = []
        both: list[Entry] = []
        for path, entry in theirs.items():
            here = ours.get(path)
            decision = decide_home(base.get(path), here, entry.digest)
            if decision == "write":
                write.append((entry, here.mark if here else None))
            elif decision == "both":
                both.append(entry)
            elif here:
                base[path] = here.mark
        answers: list[Wire] = []

        async def place(files: list[Wire]) -> None:
            names = tuple(one["entry"]["path"] for one in files)
            allowed = Agreed(agreement.home.trees, (*agreement.home.files, *names))
            answers.extend(
                await home.call(
                    "stage_home", move_id=move_id, agreed=allowed.to_wire(), uid=agreement.uid, gid=agreement.gid,
                    files=files, timeout_s=CALL_LIMIT_S,
                )
            )  # fmt: skip

        await self._carry(move_id, there, home, agreement.home, write, place)
        torn = set()
        for answer in answers:
            if answer.get("refused") == "file-digest":
                torn.add(answer["path"])
            elif "refused" in answer:
                both.append(theirs[answer["path"]])
            else:
                base[answer["path"]] = [answer["size"], answer["mtime_ns"]]
                done.files.add(answer["path"])
        for entry in both:
            if not await self._keep_both(move_id, manifest, agreement, there, home, entry, done, place, answers):
                torn.add(entry.path)
        marks = {path: one.mark for path, one in theirs.items() if path not in torn}
        manifest["there"] |= marks
        self._manifests.same(move_id, manifest, there.node, {*marks} - done.conflicts)
        await there.call("stage_settle", marks=marks)
        return bool(torn)

    async def _keep_both(
        self, move_id: str, manifest: Wire, agreement: Agreement, there: NodeLink, home: NodeLink, entry: Entry,
        done: _Homecoming, place: Place, answers: list[Wire],
    ) -> bool:  # fmt: skip
        """Changed on both sides: theirs comes home under another name, the same one each time. False: it changed while
        it was read, and is still to be brought."""
        apart: dict[str, Any] = manifest.setdefault("apart", {})
        before = apart.get(entry.path)
        names = [before["name"]] if before else []
        names += [other_name(entry.path, there.node, number) for number in range(1, SAMES + 1)]
        for name in dict.fromkeys(names):
            answers.clear()
            expect = before["mark"] if before and before["name"] == name else None
            await self._carry(move_id, there, home, agreement.home, [(entry, expect)], place, {entry.path: name})
            if answers and "refused" not in answers[0]:
                apart[entry.path] = {"name": name, "mark": [answers[0]["size"], answers[0]["mtime_ns"]]}
                done.conflicts.add(entry.path)
                text = f"{entry.path} was changed on both sides: {name} is what {there.node} has"
                self._events.publish("offload.conflict", text, node=home.node, move=move_id, path=entry.path)
                return True
            if answers and answers[0]["refused"] == "file-digest":
                return False
        why = answers[0]["text"] if answers else "no answer"
        raise GridError(f"{entry.path} could not be brought home", cause=why, code="file-home")

    def forget(self, move_id: str) -> None:
        """The files are home, or never went: nothing is left to bring."""
        self._manifests.delete(move_id)

    def is_pending(self, move_id: str) -> bool:
        return self._manifests.get(move_id) is not None


class _Homecoming:
    def __init__(self) -> None:
        self.files: set[str] = set()
        self.conflicts: set[str] = set()


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def _by_size(files: list[tuple[Entry, list[int] | None]]) -> Iterator[list[tuple[Entry, list[int] | None]]]:
    batch: list[tuple[Entry, list[int] | None]] = []
    total = 0
    for one in files:
        if batch and (total + one[0].size > BATCH_BYTES or len(batch) >= BATCH_FILES):
            yield batch
            batch, total = [], 0
        batch.append(one)
        total += one[0].size
    if batch:
        yield batch
