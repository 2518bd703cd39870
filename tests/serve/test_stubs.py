"""What protoc makes of the .proto files is committed, so that nobody who installs needs it; and it is not old."""

from __future__ import annotations

from pathlib import Path

from amdvgpud.serve.pb import generate


def test_the_committed_messages_are_what_protoc_makes_of_the_proto_files(tmp_path: Path) -> None:
    generate.generate(tmp_path)
    made = {path.name: _without_version(path.read_text()) for path in tmp_path.iterdir()}
    there = {path.name: _without_version(path.read_text()) for path in generate.HERE.glob("*_pb2.py*")}
    assert made == there


def _without_version(text: str) -> str:
    """Without what a newer protoc writes of itself: the floor that it sets for protobuf is our pyproject's matter."""
    head, found, tail = text.partition("_runtime_version.ValidateProtobufRuntimeVersion(")
    lines = [line for line in head.splitlines() if "Protobuf Python Version" not in line]
    return "\n".join(lines) + (tail.partition(")\n")[2] if found else "")
