"""Make the modules beside this one from the ``.proto`` files, by the protoc that is in grpcio-tools.

Messages only. The stubs of services that protoc would make too are untyped and tie us to one release of grpcio, and
what they hold for us is the names of six methods.
"""

from __future__ import annotations

from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent
NAMES = ("deviceplugin", "exporter", "podresources")


def generate(out: Path) -> None:
    """Write ``<name>_pb2.py`` and its ``.pyi`` for each name into ``out``."""
    for name in NAMES:
        words = ["protoc", f"-I{HERE}", f"--python_out={out}", f"--pyi_out={out}", f"{name}.proto"]
        if code := protoc.main(words):
            raise SystemExit(f"protoc failed on {name}.proto with exit code {code}")


if __name__ == "__main__":
    generate(HERE)
