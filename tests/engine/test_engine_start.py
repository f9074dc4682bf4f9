"""Start and stop of the server: clear refusals, and no remaining processes."""

from __future__ import annotations

import json
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from rlrun.inference.client.engine_client import EngineClient, EngineError
from tests.support.programs import wait_for, wait_for_exit

from .conftest import API_KEY, Server, group_members, random_model


def test_port_in_use_is_refused_before_vllm_is_loaded(launch: Callable[..., Server]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = launch(own_python=True, port=port)
        assert wait_for_exit(server.process) == 69
    assert server.log.read_text().splitlines() == [
        f"inference: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "stop the process that uses the port, or choose another port"
    ]


def test_model_without_weights_is_refused_before_vllm_is_loaded(
    launch: Callable[..., Server], model_folder: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    server = launch(own_python=True, model_path=str(tmp_path))
    assert wait_for_exit(server.process) == 65
    assert server.log.read_text() == f"model: {tmp_path} contains no *.safetensors file\n"


def test_setting_unsupported_by_model_is_configuration_error(launch: Callable[..., Server]) -> None:
    server = launch(max_model_len=100_000)
    assert wait_for_exit(server.process) == 78
    last = server.log.read_text()
    assert "Traceback" not in last
    assert "max_model_len" in last


def test_sigterm_during_start_leaves_no_process(launch: Callable[..., Server]) -> None:
    server = launch()
    group = server.process.pid
    wait_for(lambda: any("VLLM" in name for name in group_members(group)), "the engine's process exists")
    assert server.stop(signal.SIGTERM) == 143
    wait_for(lambda: not group_members(group), "all processes of the server are gone")


async def test_server_stops_after_a_partial_reload(launch: Callable[..., Server]) -> None:
    """vLLM can neither compute nor load afterwards, so only a new server helps."""
    server = launch()
    group = server.process.pid
    wait_for(server.serving, "the server answers")
    good, broken = server.publish(random_model(1), "good"), server.publish(random_model(2), "broken")
    make_uncopyable(broken / "model.safetensors", "model.norm.weight")
    async with EngineClient(server.url, API_KEY) as client:
        await client.update_weights(str(good), 1)
        with pytest.raises(EngineError, match="weights are unknown, so the server stops") as failed:
            await client.update_weights(str(broken), 2)
        assert failed.value.status == 500
        readiness = await client.ready()
        assert (readiness.ready, readiness.weight_version) == (False, None)
        assert "weights are unknown" in str(readiness.reason)
    assert wait_for_exit(server.process) == 1
    wait_for(lambda: not group_members(group), "all processes of the server are gone")


def make_uncopyable(file: Path, name: str) -> None:
    """Declare one tensor as 4-bit floats: a valid file that no float32 model can load."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    start, end = header[name]["data_offsets"]
    saved = (end - start) * 7 // 8
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - saved for offset in entry["data_offsets"]]
    header[name] |= {"dtype": "F4", "data_offsets": [start, end - saved]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + body[: end - saved] + body[end:])
