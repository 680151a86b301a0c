"""Stand-in for kubectl in place of a real cluster with kubelets: its data is `$KUBECTL_WORLD`, a JSON file.

`objects`: kind to objects; `logs`: pod to text; `files`: `pod:path` to text; `forwards`: Service to a port of this
machine; `errors`: verb to the text on stderr before it fails; `slow`: verbs that never end. The file `calls` beside it
records every call with its process ID.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

WORLD = Path(os.environ["KUBECTL_WORLD"])


def world():
    return json.loads(WORLD.read_text())


def fail(text):
    print(text, file=sys.stderr)
    sys.exit(1)


def get(words, options):
    if words[0] == "secret":
        words[0] = "secrets"
    found = world()["objects"].get(words[0], [])
    for option in options:
        if option.startswith("--selector="):
            wanted = dict(pair.split("=") for pair in option.removeprefix("--selector=").split(","))
            found = [each for each in found if wanted.items() <= each["metadata"].get("labels", {}).items()]
    if len(words) > 1:
        found = [each for each in found if each["metadata"]["name"] == words[1]]
        if not found and "--ignore-not-found" in options:
            return
        if not found:
            fail(f'Error from server (NotFound): {words[0]} "{words[1]}" not found')
        print(json.dumps(found[0]))
    elif "--output=name" in options:
        for each in found:
            print(f"{words[0]}/{each['metadata']['name']}")
    else:
        print(json.dumps({"items": found}))


def show(text_of, tail, follow):
    """Print the last lines; with `follow` continue until the text no longer exists."""
    text = text_of()
    if text is None:
        fail("Error from server (NotFound): it has gone")
    lines = text.splitlines(keepends=True)
    shown = len(text)
    sys.stdout.write("".join(lines[len(lines) - tail :] if tail >= 0 else lines))
    sys.stdout.flush()
    while follow:
        time.sleep(0.02)
        text = text_of()
        if text is None:
            return
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)


def selected_logs(options, tail, follow):
    """Print the logs of all selected pods with the prefix of `--prefix`; with `follow` until all have ended."""
    for needed in ("--prefix", "--ignore-errors", "--container=agent"):
        assert needed in options
    wanted = next(option for option in options if option.startswith("--selector=")).removeprefix("--selector=")
    labels = dict(pair.split("=") for pair in wanted.split(","))
    pods = [each["metadata"] for each in world()["objects"].get("pods", [])]
    names = [each["name"] for each in pods if labels.items() <= each.get("labels", {}).items()]
    if not names:
        print("No resources found in default namespace.", file=sys.stderr)
    ended, shown = set(), dict.fromkeys(names, 0)
    while ended < set(names):
        for name in [each for each in names if each not in ended]:
            text = world()["logs"].get(name)
            if text is None and not shown[name]:
                print(f"error: container agent in pod {name} is waiting to start", flush=True)
            lines = (text or "").splitlines()
            first = max(0, len(lines) - tail) if not shown[name] and tail >= 0 else shown[name]
            for line in lines[first:]:
                print(f"[pod/{name}/agent] {line}", flush=True)
            shown[name] = len(lines)
            if text is None or not follow:
                ended.add(name)
        time.sleep(0.02)


def pump(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def forward(service, ports):
    target = world()["forwards"].get(service)
    if target is None:
        fail("error: timed out waiting for the condition")
    local, _, remote = ports.partition(":")
    listener = socket.create_server(("127.0.0.1", int(local or 0)))
    print(f"Forwarding from 127.0.0.1:{listener.getsockname()[1]} -> {remote}", flush=True)
    while True:
        client, _ = listener.accept()
        print("Handling connection", flush=True)
        server = socket.create_connection(("127.0.0.1", target))
        for pair in ((client, server), (server, client)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


def main():
    arguments = sys.argv[1:]
    inside = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    arguments = arguments[: len(arguments) - len(inside)]
    options = [word for word in arguments if word.startswith("-")]
    verb, *words = [word for word in arguments if not word.startswith("-")]
    with (WORLD.parent / "calls").open("a") as calls:
        calls.write(f"{os.getpid()} {' '.join(sys.argv[1:])}\n")
    if verb in world().get("slow", []):
        time.sleep(600)
    if verb in world().get("errors", {}):
        fail(world()["errors"][verb])
    follow = "--follow" in options
    if verb == "get":
        get(words, options)
    elif verb == "logs":
        tail = next(int(option.partition("=")[2]) for option in options if option.startswith("--tail="))
        if not words:
            selected_logs(options, tail, follow)
            return
        show(lambda: world()["logs"].get(words[0]), tail, follow)
    elif verb == "exec":
        show(lambda: world()["files"].get(f"{words[0]}:{inside[1]}"), -1, False)
    elif verb == "port-forward":
        forward(*words)


main()
