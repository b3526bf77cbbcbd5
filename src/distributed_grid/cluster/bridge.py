"""The only process with a Ray connection: places the agents, and answers its parent in JSON lines."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from distributed_grid.cluster.ray_node import HOST_LABEL
from distributed_grid.core.errors import GridError, NotFound, TimedOut, Unavailable, UsageError

NAMESPACE = "grid"
AGENT_CLASS = "distributed_grid.agent.actor:AgentActor"
_KV_NAMESPACE = b"grid"
#: Of Ray's tasks and actors, so many are told, and waited for so long.
MOST_TASKS = 1000
STATE_LIMIT_S = 10
#: How an agent says that it will never serve.
SERVER_ENDED = "the agent's server ended"


def agent_name(node: str) -> str:
    return f"grid-agent-{node}"


def group_name(lease_id: str) -> str:
    return f"grid-lease-{lease_id}"


def last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Bridge:
    """One method per request; each runs in its own thread, and Ray's driver is safe to share."""

    def __init__(self) -> None:
        self._connect_lock = threading.Lock()
        self._address = ""

    def do_ping(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "connected": self._address}

    def do_connect(self, address: str, node_ip: str) -> dict[str, Any]:
        """Join the cluster through the head's raylet; waits while that is still coming up."""
        import ray

        with self._connect_lock:
            if self._address == address:
                return {"address": address}
            if self._address:
                raise UsageError("the bridge is connected to another cluster", code="bridge-connected")
            ray.init(
                address=address, namespace=NAMESPACE, _node_ip_address=node_ip, log_to_driver=False,
                include_dashboard=False, configure_logging=False, ignore_reinit_error=True,
            )  # fmt: skip
            self._address = address
        return {"address": address}

    def do_nodes(self) -> dict[str, Any]:
        return {"nodes": [
            {
                "ray_node_id": one["NodeID"], "alive": bool(one["Alive"]), "address": one["NodeManagerAddress"],
                "node": one.get("Labels", {}).get(HOST_LABEL, ""), "labels": one.get("Labels", {}),
                "resources": one.get("Resources", {}),
            }
            for one in self._ray().nodes()
        ]}  # fmt: skip

    def do_tasks(self) -> dict[str, Any]:
        """Ray's tasks and actors that have not ended, by the ids of Ray's nodes; without our agents."""
        self._ray()
        from ray.util.state import list_actors, list_tasks

        options: dict[str, Any] = {
            "address": self._address, "limit": MOST_TASKS, "timeout": STATE_LIMIT_S, "raise_on_missing_output": False,
        }  # fmt: skip
        actors = [
            one for one in list_actors(filters=[("state", "!=", "DEAD")], **options)
            if not str(one["name"]).startswith(agent_name(""))
        ]  # fmt: skip
        tasks = list_tasks(filters=[("state", "!=", "FINISHED"), ("state", "!=", "FAILED")], **options)
        wanted = {one["actor_id"] for one in actors}
        return {
            "tasks": [
                {
                    "id": one["task_id"], "name": one["name"], "state": one["state"], "type": one["type"],
                    "ray_node_id": one["node_id"] or "", "pid": one["worker_pid"], "job_id": one["job_id"],
                }
                for one in tasks if not one["actor_id"] or one["actor_id"] in wanted
            ],
            "actors": [
                {
                    "id": one["actor_id"], "class": one["class_name"], "name": one["name"] or "", "state": one["state"],
                    "ray_node_id": one["node_id"] or "", "pid": one["pid"], "job_id": one["job_id"],
                }
                for one in actors
            ],
        }  # fmt: skip

    def do_ensure_agent(
        self, node: str, ray_node_id: str, config: dict[str, Any], actor: str = AGENT_CLASS, limit_s: float = 60.0
    ) -> dict[str, Any]:
        """Find the node's agent on that very Ray node, or put one there; an agent elsewhere is a leftover."""
        ray = self._ray()
        deadline = time.monotonic() + limit_s
        while True:
            handle = self._find(node)
            if handle is not None and not self._is_meant_for(node, ray_node_id):
                ray.kill(handle, no_restart=True)
                handle = None
            if handle is None:
                try:
                    handle = self._create(node, ray_node_id, config, actor)
                except ValueError:  # the old one's name is not free yet
                    self._pause(node, deadline)
                    continue
            try:
                found = ray.get(handle.endpoint.remote(), timeout=max(1.0, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                raise TimedOut(
                    f"the agent on {node} does not answer", hint=f"grid doctor --node {node}", code="agent-timeout"
                ) from None
            except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError) as error:
                if "The actor died because of an error raised in its creation task" in str(error):
                    ray.kill(handle, no_restart=True)
                    raise Unavailable(
                        f"the agent on {node} failed to start", cause=last_line(error), code="agent-failed"
                    ) from error
                self._pause(node, deadline)
                continue
            except ray.exceptions.RayTaskError as error:
                if SERVER_ENDED in str(error):  # the process lives, but does not serve: make room for a new one
                    ray.kill(handle, no_restart=True)
                raise Unavailable(
                    f"the agent on {node} failed to start", cause=last_line(error), code="agent-failed"
                ) from error
            return {**found, "endpoint": [found["host"], found["port"]], "ray_node_id": ray_node_id}

    def do_kill_agent(self, node: str) -> dict[str, Any]:
        """For good: Ray does not restart it."""
        handle = self._find(node)
        if handle is not None:
            self._ray().kill(handle, no_restart=True)
        return {"killed": handle is not None}

    def do_lease_group(self, lease_id: str, node: str, bundle: dict[str, float], limit_s: float) -> dict[str, Any]:
        """Set a lease's share of a node aside in Ray too, once; whether Ray has it by now."""
        self._ray()
        from ray.util.placement_group import get_placement_group, placement_group

        try:
            group = get_placement_group(group_name(lease_id))
        except ValueError:
            group = placement_group(
                [bundle], strategy="STRICT_PACK", name=group_name(lease_id), lifetime="detached",
                bundle_label_selector=[{HOST_LABEL: node}],
            )  # fmt: skip
        return {"id": group.id.hex(), "ready": bool(group.wait(limit_s))}

    def do_lease_groups(self) -> dict[str, Any]:
        """The leases that have a group, and its id."""
        self._ray()
        from ray.util.placement_group import placement_group_table

        prefix = group_name("")
        rows = [row for row in placement_group_table().values() if row["name"].startswith(prefix)]
        return {
            row["name"].removeprefix(prefix): row["placement_group_id"] for row in rows if row["state"] != "REMOVED"
        }

    def do_lease_group_remove(self, lease_id: str) -> dict[str, Any]:
        self._ray()
        from ray.util.placement_group import get_placement_group, remove_placement_group

        try:
            remove_placement_group(get_placement_group(group_name(lease_id)))
        except ValueError:
            return {"removed": False}
        return {"removed": True}

    def do_submit_job(
        self, dashboard: str, submission_id: str, entrypoint: str, node: str, metadata: dict[str, str]
    ) -> dict[str, Any]:
        """Show something in Ray's dashboard as a job of that node; once per id."""
        self._ray()
        from ray.job_submission import JobSubmissionClient

        client = JobSubmissionClient(dashboard)
        if any(job.submission_id == submission_id for job in client.list_jobs()):
            return {"submitted": False}
        client.submit_job(
            entrypoint=entrypoint, submission_id=submission_id, metadata=metadata, entrypoint_num_cpus=0,
            entrypoint_label_selector={HOST_LABEL: node},
        )  # fmt: skip
        return {"submitted": True}

    def _ray(self) -> Any:
        if not self._address:
            raise Unavailable("the bridge is not connected to Ray yet", code="bridge-not-connected")
        import ray

        return ray

    def _find(self, node: str) -> Any:
        try:
            return self._ray().get_actor(agent_name(node), namespace=NAMESPACE)
        except ValueError:
            return None

    def _is_meant_for(self, node: str, ray_node_id: str) -> bool:
        """Whether the agent of that name was pinned to this Ray node; one pinned to a dead node would wait for ever."""
        from ray.experimental import internal_kv

        found = internal_kv._internal_kv_get(agent_name(node).encode(), namespace=_KV_NAMESPACE)
        return bool(found == ray_node_id.encode())

    def _create(self, node: str, ray_node_id: str, config: dict[str, Any], actor: str) -> Any:
        from ray.experimental import internal_kv
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        internal_kv._internal_kv_put(
            agent_name(node).encode(), ray_node_id.encode(), overwrite=True, namespace=_KV_NAMESPACE
        )
        module, _, name = actor.partition(":")
        kind = getattr(importlib.import_module(module), name)
        return self._ray().remote(kind).options(
            name=agent_name(node), namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_restarts=-1,
            max_task_retries=0, max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node_id, soft=False),
        ).remote(config)  # fmt: skip

    @staticmethod
    def _pause(node: str, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TimedOut(f"the agent on {node} could not be placed", code="agent-timeout")
        time.sleep(0.1)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer until the parent goes away; a lost parent ends the bridge."""
    bridge = Bridge()
    lock = threading.Lock()

    def answer(request: dict[str, Any]) -> None:
        number = request.pop("id", 0)
        verb = str(request.pop("do", ""))
        method: Callable[..., dict[str, Any]] | None = getattr(bridge, f"do_{verb}", None)
        try:
            if method is None:
                raise NotFound(f"the bridge does not know {verb!r}", code="bridge-verb")
            reply = {"id": number, "ok": method(**request)}
        except GridError as error:
            reply = {"id": number, "error": error.to_wire()}
        except Exception as error:  # noqa: BLE001 - Ray raises of every kind, and the parent must get an answer
            wire = Unavailable(
                f"Ray failed at {verb}", cause=f"{type(error).__name__}: {error}"[:600], code="ray-error"
            ).to_wire()
            reply = {"id": number, "error": wire}
        with lock:
            answers.write(json.dumps(reply) + "\n")
            answers.flush()

    with ThreadPoolExecutor(max_workers=32) as pool:
        for line in requests:
            if line.strip():
                pool.submit(answer, json.loads(line))
        os._exit(0)  # not through Ray's own exit, which may wait for a cluster that is gone


def main() -> None:
    # Ray prints as it likes: what it writes to stdout goes to stderr, and only answers go to the parent.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=importlib.import_module, args=("ray",), daemon=True).start()
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
