"""Runs in a pod without a token: sends requests to each port and prints the results as JSON.

"refused": the port reports a missing token. "answered": the request succeeded. Any other result is a text.
"""

import json
import sys
import urllib.error
import urllib.request

import grpc

PATHS = ["/health", "/metrics", "/v1/models", "/v1/status", "/v1/watch", "/v1/evidence", "/api/v0/nodes", "/api/jobs/"]
POSTS = ["/v1/completions", "/invocations", "/get_or_create_runtime_env", "/api/job_agent/jobs/"]
# Public by design: they report only liveness and metrics.
PUBLIC = {8090: {"/metrics"}}
METHODS = [
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.rpc.ReporterService/HealthCheck",
    "/ray.rpc.RayletDriver/ClusterInfo",
]
SECONDS = 10


def http(address: str, port: int) -> list[str]:
    return [web(f"http://{address}:{port}{path}", None) for path in PATHS if path not in PUBLIC.get(port, ())] + [
        web(f"http://{address}:{port}{path}", b"{}") for path in POSTS
    ]


def web(url: str, body: bytes | None) -> str:
    question = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(question, timeout=SECONDS):
            return "answered"
    except urllib.error.HTTPError as error:
        return "refused" if error.code in (401, 403) else f"status {error.code}"
    except OSError as error:
        return str(error)


def rpc(address: str, port: int) -> list[str]:
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        return [call(channel, method) for method in METHODS]


def call(channel: grpc.Channel, method: str) -> str:
    try:
        channel.unary_unary(method)(b"", timeout=SECONDS)
    except grpc.RpcError as error:
        code = error.code()
        return "refused" if code is grpc.StatusCode.UNAUTHENTICATED else code.name
    return "answered"


ways = {"http": http, "grpc": rpc}
print(json.dumps({one["name"]: ways[one["way"]](one["address"], one["port"]) for one in json.loads(sys.argv[1])}))
