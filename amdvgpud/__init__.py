"""amdvgpud: share AMD GPUs on one machine. See docs/architecture.md for the map."""

__version__ = "0.1.0"
