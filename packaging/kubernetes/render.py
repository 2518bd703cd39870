#!/usr/bin/env python3
"""render.py: amdvgpud.yaml beside this file, for those without Helm: the chartX.

Needs helm-python-sdk (Helm's own engine; dependency group ``charts``). The file's first line has a digest of the chart,
so that a test without Helm sees when the chart has changed and this has not been run.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHART = HERE.parent / "helm/amdvgpud"
MANIFESTS = HERE / "amdvgpud.yaml"
NAMESPACE = "kube-system"


def digest() -> str:
    parts = [f"{path.relative_to(CHART)}\0{path.read_text()}\0" for path in sorted(CHART.rglob("*")) if path.is_file()]
    return sha256("".join(parts).encode()).hexdigest()[:16]


def head() -> str:
    return f"# The chart in packaging/helm (digest {digest()}) with its default values, made by render.py.\n"


def manifests(values: dict[str, object]) -> list[str]:
    """The chart's objects as YAML texts, sorted by the file that they come from."""
    from helm_python import Chart

    rendered = Chart.load(CHART).render(values, name="amdvgpud", namespace=NAMESPACE)
    return [
        # What Helm says of itself is not true of a file.
        "\n".join(line for line in text.strip().splitlines() if "app.kubernetes.io/managed-by" not in line) + "\n"
        for path, text in sorted(rendered.items())
        if path.endswith(".yaml") and text.strip()
    ]


if __name__ == "__main__":
    MANIFESTS.write_text(head() + "---\n" + "---\n".join(manifests({})))
