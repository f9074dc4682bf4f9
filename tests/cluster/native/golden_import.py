"""Import of image archives into the golden root, by a containerd in separate namespaces.

Run as `python -I -S golden_import.py CONFIG LOG REQUEST` under unshare, as PID 1, so that no process or mount survives
it. REQUEST is the JSON of `golden.Request`. The exit status is 0 if every archive is imported and unpacked.

Every layer has a label that protects it from containerd's garbage collection, which each import starts: nodes may link
to a layer although its image's name means another image by now. `collect` removes the labels before the import.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

START_TIMEOUT_S = 30.0
CTR = ("ctr", "--namespace", "k8s.io")
ROOT_LABEL = "containerd.io/gc.root"


def ctr(*arguments: str) -> str:
    """Run containerd's client; end with its message if it fails."""
    result = subprocess.run([*CTR, *arguments], stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit(f"ctr {' '.join(arguments)} failed with {result.returncode}")
    return result.stdout


def label_layers(value: str) -> None:
    """Protect all layers from collection, or with an empty value leave it to the images' names.

    An uncommitted layer is a half-unpacked layer of an interrupted import, which may be collected at any time.
    """
    for layer in committed_layers():
        command = [*CTR, "snapshots", "label", layer, f"{ROOT_LABEL}={value}"]
        labelled = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        # Collection runs at the same time: a layer without an image may be deleted between the list and its label.
        if labelled.returncode != 0 and layer in committed_layers():
            sys.exit(f"ctr cannot label the layer {layer}: {labelled.stderr.strip()}")


def committed_layers() -> list[str]:
    """Return the names of the complete layers."""
    lines = [line.split() for line in ctr("snapshots", "ls").splitlines()[1:]]
    return [words[0] for words in lines if words[-1] == "Committed"]


def main() -> None:
    """Start containerd, import, label and stop it in order, because its databases are complete only after a regular
    stop."""
    config, log, request = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    text = Path(config).read_text()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    Path("/run/containerd.toml").write_text(text)
    with Path(log).open("ab") as output:
        daemon = subprocess.Popen(["containerd", "--config", "/run/containerd.toml"], stdout=output, stderr=output)
    deadline = time.monotonic() + START_TIMEOUT_S
    while subprocess.run([*CTR, "version"], capture_output=True).returncode != 0:
        if time.monotonic() > deadline or daemon.poll() is not None:
            sys.exit(f"containerd does not start: see {log}")
        time.sleep(0.05)
    if request["collect"]:
        label_layers("")
    for name in request["drop"]:
        ctr("images", "rm", name)
    for archive in request["archives"]:
        ctr("images", "import", archive)
    for name in ctr("images", "ls", "--quiet").split():
        ctr("images", "label", name, "io.cri-containerd.image=managed")
    label_layers("golden")
    daemon.terminate()
    daemon.wait()


if __name__ == "__main__":
    main()
